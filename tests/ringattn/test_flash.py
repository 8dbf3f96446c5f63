"""The call without a group, against softmax attention written out and differentiated by autograd."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn import BlockMask, Mask, custom_op, flash, flash_attention
from ringattn.kernels import interval_mask
from ringattn.kernels.dropout import Dropout, keep_mask

OPERATOR = torch.ops.ringattn.flash_attention.default


def inputs(num_queries: int, num_keys: int, heads: int = 4, key_heads: int = 2, dtype=torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, num_queries, heads, 8), (2, num_keys, key_heads, 8), (2, num_keys, key_heads, 6)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def written_out(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, keep: Tensor | None = None, p: float = 0.0) -> Tensor:
    """Attention with the scores in memory; `allowed` and `keep` broadcast to (B, H, Nq, Nk)."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    probabilities = scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num(0.0)
    if keep is not None:
        probabilities = probabilities * keep / (1 - p)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v)


def assert_same(call: Callable[..., Tensor], expected: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """Equal outputs and gradients in float64."""
    out, reference = call(*tensors), expected(*tensors)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    pairs = zip(torch.autograd.grad(out, tensors, dout), torch.autograd.grad(reference, tensors, dout), strict=True)
    for got, exact in [(out, reference), *pairs]:
        torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-10)


def allowed_by(mask: Mask, num_queries: int, num_keys: int) -> Tensor:
    return interval_mask.dense(*mask.intervals(num_keys, num_queries), num_keys)[:, None]


@pytest.mark.parametrize("backend", ("reference", "blockwise"))
@pytest.mark.parametrize("rows", ((9, 9), (3, 9), (9, 3), (1, 12)), ids=lambda n: f"{n[0]}x{n[1]}")
@pytest.mark.parametrize("mask", (Mask.full(), Mask.causal(), Mask.causal(window=4), Mask.full(window=3)), ids=str)
def test_masks_and_lengths(mask: Mask, rows: tuple[int, int], backend: str) -> None:
    allowed = allowed_by(mask, *rows)
    assert_same(lambda *x: flash_attention(*x, mask=mask, backend=backend), lambda *x: written_out(*x, allowed), inputs(*rows))


def test_the_last_query_stands_at_the_last_key() -> None:
    assert allowed_by(Mask.causal(), 2, 4)[0, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert allowed_by(Mask.causal(), 3, 2)[0, 0].int().tolist() == [[0, 0], [1, 0], [1, 1]]
    assert allowed_by(Mask.causal(documents=[3, 2]), 3, 5)[0, 0].int().tolist() == [
        [1, 1, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_it_takes_the_place_of_torchs() -> None:
    q, k, v = inputs(11, 11, key_heads=4)
    transposed = (x.transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*transposed, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(flash_attention(q, k, v, is_causal=True), expected)


@pytest.mark.parametrize("backend", ("reference", "blockwise"))
def test_dropout(backend: str) -> None:
    positions = torch.arange(40, dtype=torch.int32)
    keep = keep_mask(Dropout(0.3, 5, positions, positions), 2, 4)
    allowed = allowed_by(Mask.causal(), 40, 40)
    assert_same(
        lambda *x: flash_attention(*x, is_causal=True, dropout_p=0.3, seed=5, backend=backend),
        lambda *x: written_out(*x, allowed, keep, 0.3),
        inputs(40, 40),
    )


@settings(max_examples=10)
@given(st.integers(0, 2**16))
def test_blocks(seed: int) -> None:
    """Any kept blocks, a row without any included, under a causal mask; lengths that end in mid-block."""
    keep = torch.rand(1, 4, 2, 2, generator=torch.Generator().manual_seed(seed)) < 0.5
    blocks = BlockMask(keep, size=64)
    allowed = allowed_by(Mask.causal(), 70, 70) & blocks.dense(70, 70)
    assert_same(
        lambda *x: flash_attention(*x, is_causal=True, blocks=blocks), lambda *x: written_out(*x, allowed), inputs(70, 70)
    )


def test_blocks_that_change_before_the_backward_are_refused() -> None:
    q, k, v = (torch.randn(1, 128, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    keep = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    out = flash_attention(q, k, v, blocks=BlockMask(keep, size=64))
    keep[..., 0, 1] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_torch_checks_the_operator() -> None:
    keep = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    arguments = (*inputs(7, 9), keep, 64, Mask.full().lengths, True, 4, 0.5, 0.1, 3, "blockwise", "ieee")
    torch.library.opcheck(OPERATOR, arguments)


@pytest.mark.parametrize("backend", ("blockwise", "reference"))
def test_results_lie_as_a_compiler_is_told(backend: str) -> None:
    """Contiguous, also of tensors that have rows and heads the other way round, as `scaled_dot_product_attention` has them."""
    tensors = [torch.randn(2, 3, 7, 4).transpose(1, 2).requires_grad_() for _ in range(3)]
    out, lse = flash_attention(*tensors, is_causal=True, backend=backend, return_lse=True)
    settings = None, 0, Mask.full().lengths, True, 0, 0.5, 0.0, 0, backend, "ieee"
    gradients = torch.ops.ringattn.flash_attention_backward(*tensors, out, lse, out, None, *settings)
    assert all(x.is_contiguous() for x in (out, lse, *gradients))


def test_a_default_device_does_not_matter() -> None:
    tensors = inputs(7, 9)
    mask = Mask.causal(documents=[2, 7])
    expected = flash_attention(*tensors, mask=mask)
    with torch.device("meta"):
        assert torch.equal(flash_attention(*tensors, mask=Mask.causal(documents=[2, 7])), expected)


def test_a_mask_of_an_evaluation_serves_training() -> None:
    with torch.inference_mode():
        mask = Mask.causal(documents=[2, 7])
    tensors = inputs(9, 9)
    flash_attention(*tensors, mask=mask).sum().backward()
    assert all(x.grad is not None for x in tensors)


def test_lists_of_a_block_mask_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Counted(BlockMask):
        def __post_init__(self) -> None:
            made.append(self)

    monkeypatch.setattr(flash, "BlockMask", Counted)
    blocks = Counted(torch.ones(1, 1, 1, 1, dtype=torch.bool))
    for _ in range(3):
        flash_attention(*inputs(7, 9), blocks=blocks).sum().backward()
    assert len(made) == 2, "the caller's, and one for all calls"
    blocks.keep[:] = False
    assert not flash_attention(*inputs(7, 9), blocks=blocks).any(), "changed in place, it is another mask"


def test_a_captured_call_keeps_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(custom_op, "_kept_for_graphs", {})
    plan, device = object(), torch.device("cuda")
    custom_op.keep_for_graph(plan, device)
    custom_op.keep_for_graph(object(), torch.device("cpu"))
    assert list(custom_op._kept_for_graphs.values()) == [plan]


def test_compiles_whole() -> None:
    compiled = torch.compile(flash_attention, backend="aot_eager", fullgraph=True)
    tensors = inputs(7, 9)
    assert torch.equal(compiled(*tensors, is_causal=True), flash_attention(*tensors, is_causal=True))


REFUSED = {
    "mask-twice": ({"mask": Mask.full(), "is_causal": True}, "both mask and is_causal"),
    "dropout-of-one": ({"dropout_p": 1.0}, "dropout_p ?= ?1.0"),
    "negative-seed": ({"seed": -1}, "seed = -1"),
    "half-a-seed": ({"seed": 1.5}, "seed = 1.5"),
    "unknown-precision": ({"precision": "bf16"}, "unknown precision 'bf16'"),
    "queries-before-documents": ({"mask": Mask.causal(documents=[2, 3])}, "7 queries of 5 keys in documents"),
    "blocks-of-another-shape": ({"blocks": BlockMask(torch.ones(1, 1, 2, 2, dtype=torch.bool))}, "block mask"),
}


@pytest.mark.parametrize("shape", ((), (4,), (1, 2, 1, 4, 1)), ids=("0-d", "1-d", "5-d"))
def test_tensors_of_other_dimensions_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"give \(B, N, H, D\)"):
        flash_attention(*(torch.zeros(shape) for _ in range(3)))


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_contradictions_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(*inputs(7, 5), **changes)


def test_autocast_is_obeyed_as_by_torchs_own():
    q, k, v = inputs(7, 9, dtype=torch.float32)
    expected = flash_attention(*(x.bfloat16() for x in (q, k, v)), is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        for tensors in ((q, k, v), (q, k, v.bfloat16())):
            assert torch.equal(flash_attention(*tensors, is_causal=True), expected)
        in_double = [x.double() for x in (q, k, v)]
        under = flash_attention(*in_double, is_causal=True)
    assert torch.equal(under, flash_attention(*in_double, is_causal=True))


def test_dropout_of_the_last_queries():
    q, k, v = inputs(40, 40)
    options = dict(is_causal=True, dropout_p=0.3, seed=5)
    whole = flash_attention(q, k, v, **options)
    torch.testing.assert_close(flash_attention(q[:, 30:], k, v, **options), whole[:, 30:])


def test_one_tensor_keeps_blocks_of_two_sizes():
    keep = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    for size in (64, 128):
        x = torch.randn(1, 2 * size, 1, 8)
        torch.testing.assert_close(flash_attention(x, x, x, blocks=BlockMask(keep, size)), flash_attention(x, x, x))


def test_blocks_of_an_evaluation():
    with torch.inference_mode():
        keep = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        q, k, v = (x.detach() for x in inputs(7, 9))
        for kept in (True, False):
            keep.fill_(kept)
            assert flash_attention(q, k, v, blocks=BlockMask(keep)).any() == kept
