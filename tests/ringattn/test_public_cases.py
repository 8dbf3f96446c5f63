"""The shapes and masks of flash-attention's test suite (hopper/test_flash_attn.py), in float64 and, on a GPU, in bf16."""

from functools import partial

import pytest
import torch
from torch import Tensor

from ringattn import Mask, flash_attention
from tests.covering import every_pair

# (queries, keys). There are more queries than keys in some cases.
SHAPES = [
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211)),
    *((108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023)),
]
HEADS = {"mha": 6, "gqa": 2, "mqa": 1}  # key heads of 6 query heads
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
MASKS = ("full", "causal", "local", "causal local")


def window_of(kind: str, num_keys: int) -> tuple[int | None, int | None]:
    """Return (left, right), drawn at random for local masks. None means all keys on this side."""
    left, right = torch.randint(0, num_keys, (2,), generator=torch.Generator().manual_seed(num_keys)).tolist()
    is_causal = "causal" in kind
    return (left if "local" in kind else None), (0 if is_causal else right if "local" in kind else None)


def reference(q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None]) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of dense attention. The last query is at the position of the last key."""
    key = torch.arange(k.shape[1], device=q.device)
    query = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
    left, right = window
    allowed = torch.ones_like(key - query, dtype=torch.bool)
    allowed &= True if left is None else key >= query - left
    allowed &= True if right is None else key <= query + right
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    scores = scores.masked_fill(~allowed, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0))
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse[..., 0].transpose(1, 2)


def check(shape: tuple[int, int], kind: str, heads: str, dims: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    """Compare the output and all gradients. An error relative to the largest element would be above 0.1 for a wrong mask."""
    (num_queries, num_keys), (dim, value_dim) = shape, dims
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator, dtype=torch.float64)
    sizes = (
        (num_queries, 6, dim),
        (num_keys, HEADS[heads], dim),
        (num_keys, HEADS[heads], value_dim),
        (num_queries, 6, value_dim),
    )
    q, k, v, dout = (normal(1, *size).to(device, dtype) for size in sizes)
    window = window_of(kind, num_keys)

    def results(attend, *inputs: Tensor) -> list[Tensor]:
        inputs = [x.requires_grad_() for x in inputs]
        out, _ = attend(*inputs)
        return [out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype))]

    got = results(partial(flash_attention, mask=Mask(window=window), return_lse=True), q, k, v)
    expected = results(partial(reference, window=window), *(x.detach().double() for x in (q, k, v)))
    tolerance = 1e-10 if dtype == torch.float64 else 2e-2
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        error = (x.double() - y).abs().max() / y.abs().max().clamp(min=1e-3)
        assert error <= tolerance, (name, error)


@every_pair(shape=[shape for shape in SHAPES if max(shape) <= 256], kind=MASKS, heads=HEADS)
def test_short_cases_of_flash_attention(shape: tuple[int, int], kind: str, heads: str) -> None:
    """Small head dims, which the mask does not depend on."""
    check(shape, kind, heads, (8, 5), torch.float64, "cpu")


@pytest.mark.slow
@every_pair(shape=[shape for shape in SHAPES if max(shape) > 256], kind=MASKS, heads=HEADS)
def test_long_cases_of_flash_attention(shape: tuple[int, int], kind: str, heads: str) -> None:
    check(shape, kind, heads, (8, 5), torch.float64, "cpu")


@pytest.mark.gpu
@every_pair(shape=SHAPES, kind=MASKS, heads=HEADS, dims=DIMS)
def test_cases_of_flash_attention_on_a_gpu(shape: tuple[int, int], kind: str, heads: str, dims: tuple[int, int]) -> None:
    check(shape, kind, heads, dims, torch.bfloat16, "cuda")
