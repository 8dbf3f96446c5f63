"""The launch that converts q, k and v to e4m3, compared with the PyTorch version.

Triton's interpreter rounds to e4m3 in another way, so only tests that compare the launch with itself run in the interpreter.
"""

import pytest
import torch

from ringattn.kernels import fp8
from ringattn.kernels.triton import quantize as triton_quantize
from tests.kernels.conftest import ON_GPU
from tests.kernels.problems import spread_heads

SHAPES = {"short": (1, 1, (1, 1)), "uneven": (130, 257, (4, 2)), "blocks": (256, 384, (2, 2))}


@pytest.fixture
def device() -> torch.device:
    if ON_GPU and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that converts to e4m3")
    return torch.device("cuda" if ON_GPU else "cpu")


def inputs(shape: str, dim: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return q, k and v with rows of very different magnitude."""
    generator = torch.Generator().manual_seed(0)
    num_queries, num_keys, heads = SHAPES[shape]
    sizes = (num_queries, heads[0]), (num_keys, heads[1]), (num_keys, heads[1])
    tensors = [torch.randn(2, tokens, number, dim, generator=generator) for tokens, number in sizes]
    for x in tensors:
        x *= torch.logspace(-2, 2, x.shape[1])[:, None, None]
        x[1, : x.shape[1] // 3] = 0
    return [x.to(device, dtype) for x in tensors]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", triton_quantize.HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_results_are_those_of_pytorch(shape, dtype, dim, device):
    q, k, v = inputs(shape, dim, dtype, device)
    expected, actual = fp8.quantize(q, k, v), triton_quantize.quantize(q, k, v)
    # Values are not rotated, so all bits are equal.
    assert torch.equal(actual[2].data.view(torch.uint8), expected[2].data.view(torch.uint8))
    assert torch.equal(actual[2].scales, expected[2].scales)
    assert actual[2].data.stride() == expected[2].data.stride()
    for x, y in zip(actual[:2], expected[:2], strict=True):
        # The sums of the rotation have another order. Sums round to another number only if they are almost halfway between two
        # numbers.
        assert torch.equal(x.scales, y.scales)
        a, b = x.data.float(), y.data.float()
        assert ((a - b).abs() <= 0.125 * torch.maximum(a.abs(), b.abs()).clamp(min=2**-6)).all()
        assert (a != b).float().mean().item() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dim", triton_quantize.HEAD_DIMS)
def test_strided_inputs(dim, device):
    q, k, v = inputs("uneven", dim, torch.bfloat16, device)
    packed = torch.cat((k, v), dim=3).transpose(1, 2).contiguous().transpose(1, 2)
    strided = q.transpose(2, 3).contiguous().transpose(2, 3), packed[..., :dim], packed[..., dim:]
    for x, y in zip(triton_quantize.quantize(*strided), triton_quantize.quantize(q, k, v), strict=True):
        assert torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8))
        assert torch.equal(x.scales, y.scales)


# The interpreter cannot multiply bf16 matrices. The kernel also splits fp32 numbers into bf16 numbers.
@pytest.mark.parametrize("dim", triton_quantize.HEAD_DIMS)
@pytest.mark.parametrize(
    "dtype", [torch.float16, *(pytest.param(x, marks=pytest.mark.gpu) for x in (torch.bfloat16, torch.float32))]
)
def test_elements_that_are_not_finite_do_not_change_the_scale(dtype, dim, device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 130, 1, dim, generator=generator).to(device, dtype) for _ in range(3))
    before = fp8.quantize(q, k, v)
    for x, value in zip((q, k, v), (float("nan"), float("inf"), float("-inf")), strict=True):
        x[0, 3, 0, dim - 1] = x[0, 129, 0, 2] = value
    for got, expected, finite in zip(triton_quantize.quantize(q, k, v), fp8.quantize(q, k, v), before, strict=True):
        assert torch.equal(got.scales, expected.scales)
        assert got.scales[0, 0] == finite.scales[0, 0]


@pytest.mark.gpu
def test_elements_that_are_not_finite_become_nan(device):
    q, k, v = inputs("uneven", 64, torch.bfloat16, device)
    q[0, 3, 1, 5], v[0, 7, 0, 2], v[0, 9, 1, 3] = float("nan"), float("inf"), float("-inf")
    rows, _, values = triton_quantize.quantize(q, k, v)
    # The rotation spreads an element over its whole row.
    assert rows.data[0, 3, 1].float().isnan().all()
    assert not rows.data[0, 4].float().isnan().any()
    assert values.data.float().isnan().sum().item() == 2


@pytest.mark.gpu
def test_other_head_dims_use_pytorch(device):
    q, k, v = inputs("uneven", 96, torch.bfloat16, device)
    for x, y in zip(triton_quantize.quantize(q, k, v), fp8.quantize(q, k, v), strict=True):
        assert torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8))


@pytest.mark.parametrize("stride", [2**30, 2**31], ids=["32-bit-stride", "64-bit-stride"])
@pytest.mark.parametrize("name", "qkv")
def test_heads_beyond_32_bits(name, stride, device):
    """Only one of the tensors is larger than 2**31 elements, so the strides of q, k and v have different types."""
    inputs = {x: torch.randn(1, 130, 3, 64, device=device).half() for x in "qkv"}
    expected = triton_quantize.quantize(**inputs)
    inputs[name] = spread_heads(inputs[name], stride)
    for x, y in zip(triton_quantize.quantize(**inputs), expected, strict=True):
        assert torch.equal(x.data.view(torch.uint8), y.data.view(torch.uint8))
        assert torch.equal(x.scales, y.scales)
