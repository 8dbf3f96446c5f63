"""The FP8 format: rounding, scales, rotation, and the order of the keys of values."""

import pytest
import torch
from torch import Tensor

from ringattn.kernels import fp8, reference
from ringattn.kernels.fp8 import dequantize, quantize, quantize_rows, quantize_values
from tests.kernels.masks import full

CPU = torch.device("cpu")
# The largest error of an e4m3 number relative to its magnitude: half of the last of four significant bits.
EPS = 2**-4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attention_error(q: Tensor, k: Tensor, v: Tensor, **options: bool) -> float:
    """Return the relative error of exact attention on quantised inputs, over the whole output."""
    values = {"per_block": options.get("per_block", True)}
    operands = quantize_rows(q, **options), quantize_rows(k, **options), quantize_values(v, **values)
    quantized = (dequantize(x, torch.float64, k.shape[1])[:, : len(y[0])] for x, y in zip(operands, (q, k, v), strict=True))
    problem = full(q.shape[1], k.shape[1]), q.shape[3] ** -0.5
    exact, got = (reference.forward(*x, *problem, final=True)[0] for x in ((q.double(), k.double(), v.double()), quantized))
    return ((got - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dim", [1, 16, 64, 80, 96, 128, 192, 256])
def test_the_rotation_is_orthogonal_and_does_not_change(dim):
    matrix = fp8.rotation(dim, CPU)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=1e-5, rtol=0)
    largest_part = 1 << dim.bit_length() - 1
    assert matrix.abs().amax(1).max().item() <= 1.0
    assert matrix[0].count_nonzero() == largest_part
    # All ranks and all versions must use the same signs, because queries and keys of different ranks are multiplied.
    assert fp8.rotation(16, CPU)[:, 0].sign().tolist() == [1, -1, -1, 1, -1, -1, -1, -1, -1, -1, -1, 1, 1, -1, 1, 1]


@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 300])
def test_elements_are_rounded_to_four_significant_bits(tokens):
    x = normal(2, tokens, 3, 16) * torch.logspace(-3, 3, 3)[:, None]
    for quantized in (quantize_rows(x, rotate=False), quantize_values(x)):
        got = dequantize(quantized, torch.float64, tokens)
        assert got.shape == x.shape
        assert got.is_contiguous()
        smallest = 2**-6 * quantized.scales.double().repeat_interleave(128, 1)[:, :tokens, :, None]  # below, e4m3 is subnormal
        assert ((got - x).abs() <= EPS * torch.maximum(x.double().abs(), smallest)).all()


def test_scales_are_the_smallest_powers_of_two_without_overflow():
    largest = torch.tensor([448.0, 448.1, 1.0, 0.0, 2.0**-100, 2.0**120, 1e-44])
    x = torch.zeros(1, 7 * 128, 1, 4)
    x[0, 5::128, 0, 2] = -largest
    for quantized in (quantize_rows(x, rotate=False), quantize_values(x)):
        assert quantized.scales.shape == (1, 7, 1)
        assert quantized.scales.dtype == torch.float32
        assert quantized.scales.flatten().tolist() == [1.0, 2.0, 2**-8, 1.0, 2.0**-108, 2.0**112, 2.0**-126]
        got = dequantize(quantized, torch.float64)[0, 5::128, 0, 2]
        assert got.tolist() == [-448, -448, -1, 0, -(2.0**-100), -(2.0**120), 0]


def test_rows_of_a_block_share_a_scale_per_head():
    """A large row changes the scale of its own block and head only, for all rows of the block."""
    x = torch.ones(1, 300, 2, 8)
    x[0, 130, 1] = 1000.0
    scales = quantize_rows(x, rotate=False).scales
    assert scales[0].tolist() == [[2**-8] * 2, [2**-8, 4.0], [2**-8] * 2]
    assert quantize_rows(x, rotate=False, per_block=False).scales[0, :, 1].tolist() == [4.0] * 3


def test_the_order_of_the_keys_of_values():
    """The keys of a group of 32, as the docstring of the module shows them."""
    expected = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    expected += [16 + key for key in expected]
    order = fp8.key_order(CPU).tolist()
    assert order == [32 * group + key for group in range(4) for key in expected]
    # Keys and features are different small integers, which e4m3 represents exactly.
    x = torch.arange(200).remainder(13)[None, :, None, None] + torch.tensor([0.0, 16.0])
    values = quantize_values(x)
    assert values.data.shape == (1, 1, 2, 2, 128)
    tile = values.data[0, 0, 1].float() * values.scales[0, 1, 0]
    expected = torch.tensor([[(128 + key) % 13 + 16.0 * d if 128 + key < 200 else 0.0 for key in order] for d in range(2)])
    assert torch.equal(tile, torch.where(expected > 16, (expected / 2).round() * 2, expected))


def test_dequantised_numbers_are_exact_in_bf16():
    q, k, v = quantize(normal(1, 200, 2, 64), normal(1, 150, 1, 64), normal(1, 150, 1, 32))
    for x in (q, k, v):
        assert torch.equal(dequantize(x, torch.bfloat16, 150).double(), dequantize(x, torch.float64, 150))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_inputs_of_any_dtype_and_strides(dtype):
    x = normal(2, 3, 140, 32).to(dtype).transpose(1, 2)
    for quantize_one in (quantize_rows, quantize_values):
        got, expected = (quantize_one(y) for y in (x, x.contiguous().float()))
        assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(got.scales, expected.scales)


@pytest.mark.parametrize("dim", [16, 80])
def test_rotated_rows_are_rotated_back(dim):
    x = normal(1, 5, 2, dim).double()
    back = fp8.rotate_back(x @ fp8.rotation(dim, CPU).double())
    assert back.dtype == torch.float64
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6)


def test_autocast_does_not_change_the_rotation():
    x = normal(1, 20, 1, 64)
    expected, expected_back = quantize_rows(x), fp8.rotate_back(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fp8.rotate_back(x), expected_back)
        assert torch.equal(quantize_rows(x).data.view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_become_nan(value, monkeypatch):
    """Becoming 448 times the scale would be an error without a message. Other elements keep their values."""

    def frexp(x: Tensor) -> tuple[Tensor, Tensor]:
        """In some releases of PyTorch, the exponent of numbers that are not finite is arbitrary."""
        mantissa, exponent = original(x)
        return mantissa, exponent.masked_fill(~x.isfinite(), -(2**31))

    original = torch.frexp
    monkeypatch.setattr(torch, "frexp", frexp)
    x = normal(1, 130, 1, 8) * 100
    expected = [
        dequantize(y, torch.float32, 130) for y in (quantize_rows(x, rotate=False), quantize_values(x), quantize_rows(x))
    ]
    x[0, 129, 0, 3] = value
    for quantized, y in zip((quantize_rows(x, rotate=False), quantize_values(x)), expected, strict=False):
        y[0, 129, 0, 3] = float("nan")
        torch.testing.assert_close(dequantize(quantized, torch.float32, 130), y, rtol=0, atol=0, equal_nan=True)
    rotated = dequantize(quantize_rows(x), torch.float32)
    assert rotated[0, 129].isnan().all()
    assert torch.equal(rotated[0, :129], expected[2][0, :129])


def test_a_block_without_finite_numbers_has_the_scale_1():
    x = torch.full((1, 128, 1, 4), float("inf"))
    for quantized in (quantize_rows(x, rotate=False), quantize_values(x)):
        assert quantized.scales.item() == 1.0
        assert dequantize(quantized, torch.float32).isnan().all()


def test_the_rotation_removes_the_error_of_outliers():
    """One feature of the queries and keys is 30 times larger than the rest."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 1, 128, generator=generator) for n in (64, 4096, 4096))
    outlier = [x.clone() for x in (q, k)]
    for x in outlier:
        x[..., 5] *= 30
    assert attention_error(q, k, v) < 0.06
    assert attention_error(*outlier, v) < 0.06 < 0.3 < attention_error(*outlier, v, rotate=False)


def test_scales_per_block_keep_small_blocks_exact():
    """Without them, values that are 2**16 times smaller than those of other blocks are rounded to few bits, or to zero."""
    v = normal(1, 256, 1, 16)
    v[:, 128:] *= 2.0**-16
    errors = []
    for per_block in (True, False):
        got = dequantize(quantize_values(v, per_block), torch.float32)[:, 128:]
        errors.append(((got - v[:, 128:]).norm() / v[:, 128:].norm()).item())
    assert errors[0] < 0.04 < 0.2 < errors[1]
