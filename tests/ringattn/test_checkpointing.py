"""Tests of activation checkpointing that saves the results of attention, so that attention is never recomputed."""

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn import Layout, Mask, flash_attention, ring_attention, save_attention, ulysses_attention
from ringattn.ring import Ring

MASK = Mask.causal(documents=[5, 7])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with every forward pass of a ring."""
    calls, forward = [], Ring.forward
    monkeypatch.setattr(Ring, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))
    return calls


def inputs() -> list[Tensor]:
    """q, k and v with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 12, 4, 8), (1, 12, 2, 8), (1, 12, 2, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call attention twice. The second call depends on both results of the first call, out and lse."""
    settings = dict(layout=Layout.contiguous(12, 1), mask=MASK)
    x, lse = ring_attention(q.sin(), k.sin(), v.sin(), **settings, return_lse=True)
    x = x * lse.sigmoid()[..., None]
    return ring_attention(x.sin(), k.cos(), v.cos(), **settings).sin()


def checkpointed(*operands: Tensor, run=block) -> Tensor:
    """Run a function in a checkpoint that saves attention."""
    return checkpoint(run, *operands, use_reentrant=False, context_fn=save_attention)


def test_attention_runs_once(calls: list[int]) -> None:
    """Two calls run attention twice, and the gradients equal those without a checkpoint."""
    operands = inputs()
    expected = torch.autograd.grad(block(*operands).sum(), operands)
    calls.clear()
    out = checkpointed(*operands)
    found = torch.autograd.grad(out.sum(), operands)
    assert all(map(torch.equal, found, expected))
    assert len(calls) == 2


def test_a_graph_may_be_used_twice(calls: list[int]) -> None:
    """A second backward pass through a retained graph uses the saved results once more."""
    operands = inputs()
    out = checkpointed(*operands).sum()
    first = torch.autograd.grad(out, operands, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(out, operands), first))
    assert len(calls) == 2


def test_a_checkpoint_inside_a_checkpoint(calls: list[int]) -> None:
    """The inner checkpoint receives the results that the outer one saved."""
    operands = inputs()
    expected = torch.autograd.grad(block(*operands).sum(), operands)
    calls.clear()
    found = torch.autograd.grad(checkpointed(*operands, run=checkpointed).sum(), operands)
    assert all(map(torch.equal, found, expected))
    assert len(calls) == 2


def test_a_compiled_function_inside_a_checkpoint(calls: list[int]) -> None:
    """The operator reuses saved results inside compiled code, in the first call and in later ones."""
    operands = inputs()
    compiled = torch.compile(block, backend="aot_eager")
    expected = torch.autograd.grad(block(*operands).sum(), operands)
    calls.clear()
    for _ in range(2):
        for x, y in zip(torch.autograd.grad(checkpointed(*operands, run=compiled).sum(), operands), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
    assert len(calls) == 2 * 2


def call_all_three(x: Tensor) -> Tensor:
    """Call ring, Ulysses and flash attention one after the other."""
    settings = dict(layout=Layout.contiguous(12, 1), mask=MASK)
    x = ring_attention(x.sin(), x.cos(), x, **settings).sin()
    x = ulysses_attention(x.sin(), x.cos(), x, **settings).sin()
    return flash_attention(x.sin(), x.cos(), x, is_causal=True).sin()


@pytest.mark.parametrize("options", [{}, {"context_fn": save_attention}], ids=("recompute", "save"))
def test_first_derivatives_with_create_graph(options: dict) -> None:
    """Autograd unpacks the saved tensors of a call only once. Second derivatives raise an error, as without a checkpoint."""
    (x, *_) = inputs()
    (expected,) = torch.autograd.grad(call_all_three(x).square().sum(), x)
    out = checkpoint(call_all_three, x, use_reentrant=False, **options).square().sum()
    for _ in range(2):
        (found,) = torch.autograd.grad(out, x, create_graph=True)
        assert torch.equal(found, expected)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        found.sum().backward()


@pytest.mark.parametrize("run", [block, lambda q, k, v: call_all_three(q)], ids=("ring", "all-three"))
def test_a_compiled_checkpoint(run, calls: list[int]) -> None:
    """torch.compile of the whole checkpoint saves attention by a selective policy."""
    operands = inputs()[: 3 if run is block else 1] * (1 if run is block else 3)
    expected = torch.autograd.grad(run(*operands).sum(), operands[0])
    calls.clear()
    compiled = torch.compile(lambda *operands: checkpointed(*operands, run=run).sum(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*operands), operands[0]), expected, rtol=1e-12, atol=1e-12)
    assert len(calls) == 2


@pytest.mark.parametrize("use_graph", [True, False], ids=("after-backward", "unused"))
def test_saved_results_are_released_with_the_graph(use_graph: bool) -> None:
    """Saved tensors form no reference cycle, so they are released without the garbage collector."""
    contexts = []

    def context_fn() -> tuple:
        pair = save_attention()
        contexts.append(weakref.ref(pair[1]))
        return pair

    operands = inputs()
    gc.collect()
    gc.disable()
    try:
        out = checkpoint(block, *operands, use_reentrant=False, context_fn=context_fn).sum()
        if use_graph:
            out.backward()
        del out
        assert [context() for context in contexts] == [None]
    finally:
        gc.enable()


def test_calls_outside_of_a_checkpoint_are_not_saved() -> None:
    """Calls after a checkpoint, or after one that raised an exception, compute their own results."""
    operands = inputs()

    def fails(*operands: Tensor) -> Tensor:
        raise KeyError(block(*operands).shape)

    with pytest.raises(KeyError):
        checkpointed(*operands, run=fails)
    out = checkpointed(*operands)
    other = flash_attention(*(x * 2 for x in operands), mask=MASK)
    out.sum().backward()
    assert torch.equal(other, flash_attention(*(x * 2 for x in operands), mask=MASK))
    assert not torch.equal(other, out)


def test_a_recomputation_with_more_calls_raises_an_error() -> None:
    """The message states how many calls the forward pass made."""
    operands = inputs()
    save, reuse = save_attention()
    with save:
        first = flash_attention(*operands, mask=MASK)
    with reuse:
        assert torch.equal(flash_attention(*(2 * x for x in operands), mask=MASK), first)
        with pytest.raises(RuntimeError, match="called attention 1 times"):
            flash_attention(*operands, mask=MASK)


@pytest.mark.parametrize("change", [lambda x: x.add_(1), lambda x: x[:, :1].zero_()], ids=["tensor", "view"])
def test_modifying_the_output_in_place_raises_an_error(change) -> None:
    """The saved tensor shares its memory with the output, so a modified output cannot be reused."""
    operands = inputs()

    def attend(q, k, v):
        return ring_attention(q.sin(), k, v, layout=Layout.contiguous(12, 1), mask=MASK)

    def modify(q, k, v):
        x = attend(q, k, v)
        change(x)
        return x.square()

    with pytest.raises(RuntimeError, match=r"modified in place.*out = out . x"):
        checkpointed(*operands, run=modify).sum().backward()
    out = checkpointed(*operands, run=attend)
    change(out)
    with pytest.raises(RuntimeError, match=r"modified in place.*out = out . x"):
        out.square().sum().backward()


def test_results_of_inference_mode_may_be_saved() -> None:
    """Inference tensors have no version counter, so modifications are not detected."""
    save, reuse = save_attention()
    with torch.inference_mode():
        operands = inputs()
        with save:
            first = flash_attention(*operands, mask=MASK)
        with reuse:
            assert torch.equal(flash_attention(*operands, mask=MASK), first)
