"""The rounding of probabilities to e4m3: the errors of the formula and the constants of the instructions."""

import re

import pytest
import torch
from torch import Tensor

from ringattn.kernels.hopper import softmax_fp8

TOP, SLACK = softmax_fp8.TOP.value, softmax_fp8.SLACK.value


def round_to_e4m3(x: Tensor) -> Tensor:
    """Return 2**x rounded as the docstring of the module explains, computed in float64."""
    t = ((8 * x + 72 + softmax_fp8.BIAS.value) / softmax_fp8.RANGE.value).clamp(0, 1)
    lines = softmax_fp8.RANGE.value * t + softmax_fp8.LOWEST_BYTE.value, softmax_fp8.RANGE.value * t / 3
    return torch.maximum(lines[0].round(), lines[1].round()).to(torch.uint8).view(torch.float8_e4m3fn).double()


def test_errors_of_normal_numbers():
    x = torch.linspace(-6, TOP + SLACK, 100_001, dtype=torch.float64)
    error = round_to_e4m3(x) / 2**x - 1
    assert error.abs().max().item() < 0.085 and error.square().mean().sqrt().item() < 0.034
    # The bytes of many scores are right on average, so that lse is not biased.
    octave = x[x < 8]
    assert abs((round_to_e4m3(octave).sum() / (2**octave).sum()).item() - 1) < 2e-3


def test_errors_of_subnormal_numbers():
    x = torch.linspace(-8, -6, 1001, dtype=torch.float64)
    ratio = round_to_e4m3(x) / 2**x
    assert ratio.min().item() > 0.7 and ratio.max().item() < 1.6 and 0.9 < ratio.mean().item() < 1.3
    assert round_to_e4m3(torch.tensor([-9.5, -100.0, float("-inf")])).tolist() == [0, 0, 0]


def test_the_largest_probability_is_finite_and_powers_of_two_are_exact():
    x = torch.arange(-6, int(TOP + SLACK) + 1).double()
    assert torch.equal(round_to_e4m3(x), 2**x)
    assert round_to_e4m3(torch.tensor([TOP + SLACK, 100.0])).tolist() == [384, 448]


def test_constants_of_the_instructions():
    """The 16-bit constants are the slopes and offsets of the two lines in fp16."""
    words = re.findall(r"mov\.b32 (\w+), 0x(\w{4})(\w{4});", softmax_fp8._rounding_assembly())
    assert all(low == high for _, low, high in words)
    constants = {name: torch.tensor(int(low, 16), dtype=torch.int16).view(torch.float16).item() for name, low, _ in words}
    slope = softmax_fp8.RANGE.value
    assert constants == pytest.approx({"slope": slope, "offset": 1024 - 16, "third": slope / 3, "zero": 1024}, rel=1e-3)
