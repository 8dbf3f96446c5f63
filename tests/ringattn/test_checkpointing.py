"""Activation checkpointing that keeps what attention returned: attention runs once, whatever surrounds it."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn import Layout, Mask, flash_attention, ring_attention, save_attention, ulysses_attention
from ringattn import attention as attention_module

MASK = Mask.causal(documents=[5, 7])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every forward of a ring."""
    runs = []
    honest = attention_module.Ring.forward
    monkeypatch.setattr(attention_module.Ring, "forward", lambda *args, **options: runs.append(1) or honest(*args, **options))
    return runs


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 12, 4, 8), (1, 12, 2, 8), (1, 12, 2, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two calls of attention, the second of what the first returns, its lse included."""
    settings = dict(layout=Layout.contiguous(12, 1), mask=MASK)
    x, lse = ring_attention(q.sin(), k.sin(), v.sin(), **settings, return_lse=True)
    x = x * lse.sigmoid()[..., None]
    return ring_attention(x.sin(), k.cos(), v.cos(), **settings).sin()


def kept(*operands: Tensor, run=block) -> Tensor:
    return checkpoint(run, *operands, use_reentrant=False, context_fn=save_attention)


def test_attention_runs_once_and_gradients_are_those_without_checkpoints(runs: list[int]) -> None:
    operands = inputs()
    expected = torch.autograd.grad(block(*operands).sum(), operands)
    runs.clear()
    out = kept(*operands)
    found = torch.autograd.grad(out.sum(), operands)
    assert all(map(torch.equal, found, expected))
    assert len(runs) == 2


def test_a_graph_may_be_run_through_again(runs: list[int]) -> None:
    operands = inputs()
    out = kept(*operands).sum()
    first = torch.autograd.grad(out, operands, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(out, operands), first))
    assert len(runs) == 2


def test_a_checkpoint_inside_a_checkpoint(runs: list[int]) -> None:
    operands = inputs()
    expected = torch.autograd.grad(block(*operands).sum(), operands)
    runs.clear()
    found = torch.autograd.grad(kept(*operands, run=kept).sum(), operands)
    assert all(map(torch.equal, found, expected))
    assert len(runs) == 2


def test_a_compiler_may_trace_inside(runs: list[int]) -> None:
    operands = inputs()
    compiled = torch.compile(block, backend="aot_eager")
    expected = torch.autograd.grad(block(*operands).sum(), operands)
    runs.clear()
    for _ in range(2):  # traced, and again
        for x, y in zip(torch.autograd.grad(kept(*operands, run=compiled).sum(), operands), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert len(runs) == 2 * 2


def attended_three_ways(x: Tensor) -> Tensor:
    settings = dict(layout=Layout.contiguous(12, 1), mask=MASK)
    x = ring_attention(x.sin(), x.cos(), x, **settings).sin()
    x = ulysses_attention(x.sin(), x.cos(), x, **settings).sin()
    return flash_attention(x.sin(), x.cos(), x, is_causal=True).sin()


@pytest.mark.parametrize("run", (block, lambda q, k, v: attended_three_ways(q)), ids=("twice", "three ways"))
def test_a_compiler_may_trace_the_whole_checkpoint(run, runs: list[int]) -> None:
    operands = inputs()[: 3 if run is block else 1] * (1 if run is block else 3)
    expected = torch.autograd.grad(run(*operands).sum(), operands[0])
    runs.clear()
    compiled = torch.compile(lambda *operands: kept(*operands, run=run).sum(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*operands), operands[0]), expected, rtol=1e-12, atol=1e-12)
    assert len(runs) == 2


def test_what_is_kept_is_given_back_with_the_graph() -> None:
    contexts = []

    def remembered() -> tuple:
        pair = save_attention()
        contexts.append(weakref.ref(pair[1]))
        return pair

    operands = inputs()
    gc.collect()
    gc.disable()  # what only the collector finds would stay for long
    try:
        checkpoint(block, *operands, use_reentrant=False, context_fn=remembered).sum().backward()
        assert [context() for context in contexts] == [None]
    finally:
        gc.enable()


def test_what_ran_outside_is_not_kept() -> None:
    """Calls after a checkpoint, and after one that failed, are their own."""
    operands = inputs()

    def fails(*operands: Tensor) -> Tensor:
        raise KeyError(block(*operands).shape)

    with pytest.raises(KeyError):
        kept(*operands, run=fails)
    out = kept(*operands)
    other = flash_attention(*(x * 2 for x in operands), mask=MASK)
    out.sum().backward()
    assert torch.equal(other, flash_attention(*(x * 2 for x in operands), mask=MASK))
    assert not torch.equal(other, out)


def test_a_repetition_that_calls_more_is_refused() -> None:
    operands = inputs()
    keep, repeat = save_attention()
    with keep:
        first = flash_attention(*operands, mask=MASK)
    with repeat:
        assert torch.equal(flash_attention(*(2 * x for x in operands), mask=MASK), first)
        with pytest.raises(RuntimeError, match="called attention 1 times and its repetition calls it once more"):
            flash_attention(*operands, mask=MASK)


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[:, :1].zero_()], ids=["whole", "by a view"])
def test_a_result_that_is_changed_in_place_is_refused(change) -> None:
    """What is kept for the repetition is the tensor that was returned."""
    operands = inputs()

    def attend(q, k, v):
        return ring_attention(q.sin(), k, v, layout=Layout.contiguous(12, 1), mask=MASK)

    def inside(q, k, v):
        x = attend(q, k, v)
        change(x)
        return x.square()

    with pytest.raises(RuntimeError, match="what attention returned was changed in place"):
        kept(*operands, run=inside).sum().backward()
    out = kept(*operands, run=attend)
    change(out)
    with pytest.raises(RuntimeError, match="what attention returned was changed in place"):
        out.square().sum().backward()


def test_what_an_inference_returns_may_be_kept() -> None:
    """Such tensors count no changes."""
    keep, repeat = save_attention()
    with torch.inference_mode():
        operands = inputs()
        with keep:
            first = flash_attention(*operands, mask=MASK)
        with repeat:
            assert torch.equal(flash_attention(*operands, mask=MASK), first)
