"""The rounding of probabilities to e4m3: the errors of the formula and the constants of the instructions."""

import re

import torch
from torch import Tensor

from ringattn.kernels.hopper import softmax_fp8

TOP, MAX_LEVEL, UNIT = softmax_fp8.TOP.value, softmax_fp8.MAX_LEVEL.value, softmax_fp8.UNIT.value
# The largest score relative to the reference max, in log2 units, whose level does not exceed MAX_LEVEL.
LARGEST = (MAX_LEVEL - 72) / 8


def level_of(x: Tensor) -> Tensor:
    """Return the levels of x with the conversion of the kernel, as integers."""
    level = ((8 * x + softmax_fp8.ONE_LEVEL.value + softmax_fp8.BIAS.value) * UNIT).clamp(min=0)
    return level.half().view(torch.int16)


def round_to_e4m3(x: Tensor) -> Tensor:
    """Return 2**x rounded as the docstring of the module explains."""
    level = level_of(x).double()
    return torch.maximum(level - 16, (level / 3).round()).to(torch.uint8).view(torch.float8_e4m3fn).double()


def constant(code: str, name: str) -> Tensor:
    """Return the 16 bits of a constant that both halves of a word contain."""
    low, high = re.search(rf"mov\.b32 {name}, 0x(\w{{4}})(\w{{4}});", code).groups()
    assert low == high
    return torch.tensor([int(low, 16)], dtype=torch.uint16).view(torch.int16)


def test_errors_of_normal_numbers():
    x = torch.linspace(-6, LARGEST, 100_001, dtype=torch.float64)
    error = round_to_e4m3(x) / 2**x - 1
    assert error.abs().max().item() < 0.085
    assert error.square().mean().sqrt().item() < 0.034
    # The bytes of many scores are right on average, so that lse is not biased.
    octave = x[x < 8]
    assert abs((round_to_e4m3(octave).sum() / (2**octave).sum()).item() - 1) < 2e-3


def test_errors_of_subnormal_numbers():
    x = torch.linspace(-8, -6, 1001, dtype=torch.float64)
    ratio = round_to_e4m3(x) / 2**x
    assert ratio.min().item() > 0.7
    assert ratio.max().item() < 1.6
    assert 0.9 < ratio.mean().item() < 1.3
    assert round_to_e4m3(torch.tensor([-9.5, -100.0, float("-inf")])).tolist() == [0, 0, 0]


def test_the_largest_probability_is_finite_and_powers_of_two_are_exact():
    x = torch.arange(-6, int(LARGEST) + 1).double()
    assert torch.equal(round_to_e4m3(x), 2**x)
    # 1.75 * 2^6 is the byte of TOP_LEVEL.
    assert level_of(torch.tensor([6.81])).item() == softmax_fp8.TOP_LEVEL.value
    assert round_to_e4m3(torch.tensor([LARGEST])).item() == 448
    # `raise_ref_max` leaves no level above MAX_LEVEL.
    assert TOP + softmax_fp8.SLACK.value <= LARGEST


def test_levels_of_different_reference_maxima_differ_by_an_integer():
    x = torch.linspace(-20, 200, 10_001, dtype=torch.float64)
    levels = level_of(x).view(torch.float16)
    change = levels.max() - torch.tensor(softmax_fp8.TOP_LEVEL.value, dtype=torch.int16).view(torch.float16)
    shifted = (levels - change).clamp(min=0).view(torch.int16)
    assert torch.equal(shifted, level_of(x - change.double() / UNIT / 8))


def test_constants_of_the_instructions():
    code = softmax_fp8._byte_assembly()
    levels = torch.arange(MAX_LEVEL + 1, dtype=torch.int16)
    thirds = (levels.view(torch.float16) * constant(code, "third").view(torch.float16)).view(torch.int16)
    assert torch.equal(thirds.double(), (levels / 3).round().double())
    assert constant(code, "normal").item() == -16
    assert constant(softmax_fp8._shift_assembly(2), "one").view(torch.float16).item() == 1
    # 2^21 in fp32 converts an fp16 number to log2 units.
    (factor,) = re.findall(r"change, 0f(\w{8});", softmax_fp8._limit_assembly())[:1]
    assert torch.tensor(int(factor, 16), dtype=torch.int32).view(torch.float32).item() == 1 / (8 * UNIT)
