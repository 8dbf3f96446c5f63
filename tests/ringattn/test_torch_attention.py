"""Tests of `sdpa`: outputs and gradients equal torch's own function in float64."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ringattn import Mask, flash_attention, sdpa

ROOT = Path(__file__).parents[2]
INF = float("-inf")


def results(function, *tensors: Tensor, **options) -> list[Tensor]:
    """Return the output and the gradients of a fixed projection of the output."""
    inputs = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*inputs, **options)
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape).cos()
    return [out.detach(), *torch.autograd.grad(out, inputs, direction)]


def check(*tensors: Tensor, **options) -> None:
    """Compare with torch."""
    got, expected = results(sdpa, *tensors, **options), results(F.scaled_dot_product_attention, *tensors, **options)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


def random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


@pytest.mark.slow
def test_the_samples_of_torch() -> None:
    """The samples run in another process, because torch's module of samples changes global settings of torch."""
    subprocess.run([sys.executable, "-m", "tests.ringattn.sdpa_samples"], cwd=ROOT, check=True, timeout=200)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 5)),
        ((2, 4, 9, 8), (1, 2, 5, 8), (2, 2, 5, 8)),
        ((4, 3, 8), (2, 6, 8), (2, 6, 8)),
        ((2, 3, 4, 6, 8), (2, 3, 1, 6, 8), (1, 3, 1, 6, 8)),
    ],
    ids=str,
)
def test_grouped_query_attention(shapes: tuple, is_causal: bool) -> None:
    """There are more queries than keys, three or five dims, and leading dims of 1."""
    check(*random(*shapes), is_causal=is_causal, enable_gqa=True, scale=0.3)


def test_leading_dims_are_broadcast() -> None:
    """Without `enable_gqa`, a head dim of 1 is broadcast, too. Two dims are one head."""
    check(*random((2, 4, 5, 8), (1, 1, 5, 8), (4, 5, 8)))
    check(*random((5, 8), (6, 8), (6, 3)), is_causal=True)


def documents(*lengths: int) -> Tensor:
    """The mask of packed documents, with causal attention in each of them."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (numbers[:, None] == numbers).tril()


MASKS = {
    "causal": torch.ones(9, 9, dtype=torch.bool).tril(),
    "window": torch.ones(9, 9, dtype=torch.bool).tril(2).triu(-3),
    "documents": documents(2, 4, 3),
    "per entry": torch.stack([documents(2, 4, 3), documents(9)])[:, None],
    "fewer queries": torch.ones(4, 9, dtype=torch.bool).tril(3),
    "fewer keys": torch.ones(9, 4, dtype=torch.bool).tril(),
    "empty rows": documents(2, 4, 3).triu(-1) & (torch.arange(9) != 1)[:, None] & (torch.arange(9) != 8)[:, None],
    "padding": (torch.arange(9) < 6).expand(9, 9),
}


@pytest.mark.parametrize("as_float", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks_are_recognised(name: str, as_float: bool) -> None:
    """The mask may also be a float mask of 0 and -inf."""
    mask = MASKS[name]
    tensors = random((2, 3, mask.shape[-2], 8), (2, 3, mask.shape[-1], 8), (2, 3, mask.shape[-1], 5))
    if as_float:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, INF)
    check(*tensors, attn_mask=mask)


def test_masks_of_tensors_without_heads() -> None:
    """The first of three dims is the batch, and a mask may differ between its entries."""
    check(*random((9, 8), (9, 8), (9, 5)), attn_mask=MASKS["window"])
    q, k, v = random((4, 9, 8), (2, 9, 8), (2, 9, 5))
    check(q[:2], k, v, attn_mask=MASKS["per entry"][:, 0])
    check(q, k, v, attn_mask=MASKS["causal"].expand(4, 9, 9), enable_gqa=True)
    with pytest.raises(ValueError, match="differs between heads"):
        sdpa(q, k, v, attn_mask=torch.stack([MASKS["causal"], MASKS["window"]] * 2), enable_gqa=True)


def test_transforms_raise_an_error() -> None:
    """Tracing would store the mask of the example inputs as a constant."""
    q, k, v = random((2, 3, 9, 8), (2, 3, 9, 8), (2, 3, 9, 5))
    with pytest.raises(ValueError, match=r"neither torch\.func nor torch\.jit\.trace"):
        torch.vmap(sdpa)(q, k, v)
    with pytest.raises(ValueError, match=r"neither torch\.func nor torch\.jit\.trace"):
        torch.jit.trace(lambda mask: sdpa(q, k, v, mask), MASKS["causal"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask": MASKS["causal"].flip(0)}, "never decrease"),
        ({"attn_mask": torch.eye(9, dtype=torch.bool).roll(1, 0)}, "never decrease"),
        ({"attn_mask": torch.stack([MASKS["causal"], MASKS["window"], MASKS["causal"]])}, "differs between heads"),
        ({"attn_mask": torch.full((9, 9), 0.5)}, "is a bias"),
        ({"attn_mask": torch.zeros(9, 9, requires_grad=True)}, "is a bias"),
        ({"attn_mask": torch.ones(8, 9, dtype=torch.bool)}, "broadcastable"),
        ({"attn_mask": torch.ones(4, 1, 9, 9, dtype=torch.bool)}, "broadcastable"),
        ({"attn_mask": torch.ones(1, 1, 1, 9, 9, dtype=torch.bool)}, "broadcastable"),
        ({"attn_mask": True}, "is a bool"),
        ({"attn_mask": MASKS["causal"], "is_causal": True}, "both attn_mask and is_causal"),
        ({"scale": 0.0}, "positive"),
        ({"enable_gqa": 1}, "True or False"),
    ],
    ids=str,
)
def test_what_is_not_supported_raises_an_error(options: dict, message: str) -> None:
    """The message names the argument and a remedy."""
    q, k, v = random((2, 3, 9, 8), (2, 3, 9, 8), (2, 3, 9, 8))
    with pytest.raises(ValueError, match=message):
        sdpa(q, k, v, **options)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        sdpa(*random((1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8)))


@pytest.mark.parametrize(
    "options",
    [{"mask": Mask.causal(documents=[5, 4])}, {"sink_logits": torch.zeros(3)}, {}],
    ids=("documents", "sinks", "key heads"),
)
def test_heads_before_tokens_are_noticed(options: dict) -> None:
    """`flash_attention` takes (B, N, H, D). It rejects (B, H, N, D) if the shapes prove the mistake."""
    q, k = torch.zeros(2, 3, 9, 8), torch.zeros(2, 3 if options else 1, 9 if options else 7, 8)
    call = partial(flash_attention, q, k, k, **options)
    with pytest.raises(ValueError, match=r"\(batch, (heads, )?tokens, head.* x\.transpose\(1, 2\)"):
        call()
