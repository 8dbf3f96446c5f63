"""Tests of attention as one operator: autograd, torch.compile, checkpoint policies, fake tensors, and FLOP counts."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import warn_once_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ringattn import BlockMask, Layout, Mask, custom_op, flash_attention, ring_attention, simulate, ulysses_attention
from ringattn.ring import Ring
from ringattn.spec import AttentionSpec

OPERATOR = torch.ops.ringattn.ring_attention.default


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v of 12 tokens with 4 query heads and 2 key heads, and with gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 12, 4, 8), (1, 12, 2, 8), (1, 12, 2, 8)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """Call ring_attention on one rank."""
    return ring_attention(q, k, v, layout=Layout.contiguous(12, 1), mask=mask)


def test_the_operator_passes_the_checks_of_torch() -> None:
    """Schema, fake tensors and autograd, as torch.library.opcheck tests them."""
    options = dict(scale=0.5, dropout_p=0.2, seed=7, first_head=2, backend="blockwise")
    spec = AttentionSpec.create(Mask.causal(window=4, documents=[5, 7]), Layout.contiguous(12, 1), **options)
    torch.library.opcheck(OPERATOR, (*inputs(), *spec))


def test_gradients_equal_finite_differences() -> None:
    """Both results, out and lse, have gradients."""
    mask = Mask.causal(window=5, documents=[1, 4, 7])

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return ring_attention(q, k, v, layout=Layout.contiguous(12, 1), mask=mask, return_lse=True)

    assert torch.autograd.gradcheck(both, inputs(), fast_mode=True)


def test_second_derivatives_raise_an_error() -> None:
    """This holds also for a sum, whose gradient does not depend on the output."""
    q, k, v = inputs()
    out = ring_attention(q, k, v, layout=Layout.contiguous(12, 1), mask=Mask.causal())
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grad.square().sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(grad.square().sum() + q.sum(), q)


def test_compiled_code_contains_one_node_and_follows_the_mask() -> None:
    """There is no graph break, and documents that change from batch to batch change the result."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _) -> torch.nn.Module:
        graphs.append(graph)
        return graph

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for documents in (None, [3, 9], [6, 6], [4, 4, 4]):
        q, k, v = inputs()
        mask = Mask.causal(documents=documents)
        assert torch.equal(compiled(q, k, v, mask), attend(q, k, v, mask))
    for graph in graphs:
        assert sum("ring_attention" in str(node.target) for node in graph.graph.nodes) == 1


@pytest.mark.parametrize("saved", [True, False], ids=("saved", "recomputed"))
def test_selective_checkpointing_saves_the_output(saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a policy that saves this operator, the backward does not run the forward pass of the ring."""
    calls, forward = [], Ring.forward
    monkeypatch.setattr(Ring, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))

    def policy(_, operator, *args, **kwargs) -> CheckpointPolicy:
        keep = saved and operator == OPERATOR
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = inputs()
    out = checkpoint(
        lambda: attend(q.sin(), k.sin(), v.sin(), Mask.causal()).sin(),
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    (got,) = torch.autograd.grad(out.sum(), q)
    (expected,) = torch.autograd.grad(attend(q.sin(), k.sin(), v.sin(), Mask.causal()).sin().sum(), q)
    assert torch.equal(got, expected)
    assert len(calls) == (1 if saved else 2) + 1


@pytest.mark.parametrize("dynamic", [None, True], ids=["automatic", "dynamic"])
def test_a_new_number_of_documents_needs_no_compilation(dynamic: bool | None) -> None:
    """Calls with eleven numbers of documents compile at most twice: with a constant, and with a variable number."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _) -> torch.nn.Module:
        graphs.append(graph)
        return graph

    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=dynamic)
    q, k, v = (x.detach() for x in inputs())
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12):
        mask = Mask.causal(documents=[1] * (count - 1) + [13 - count])
        assert torch.equal(compiled(q, k, v, mask), attend(q, k, v, mask))
    assert len(graphs) <= 2


@pytest.mark.filterwarnings("error", "ignore:.torch.jit:DeprecationWarning")  # torch 2.11 emits this warning itself
@pytest.mark.parametrize("call", [ring_attention, ulysses_attention, flash_attention], ids=lambda call: call.__name__)
def test_compilation_emits_no_warning(call: Callable) -> None:
    """The public calls contain nothing that torch.compile cannot trace."""
    options = {"mask": Mask.causal(window=3)} | ({} if call is flash_attention else {"layout": Layout.zigzag(12, 1)})
    torch._dynamo.reset()
    warn_once_cache.clear()
    torch.compile(partial(call, **options), backend="eager", fullgraph=True)(*inputs())


def test_an_assigned_layout_is_compiled_without_graph_break() -> None:
    """The name of such a layout contains the owners of its chunks."""
    layout = Layout.assigned([0, 0, 0], 4, 12, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, layout=layout, mask=Mask.causal())

    operands = inputs()
    assert torch.equal(torch.compile(attend, backend="eager", fullgraph=True)(*operands), attend(*operands))


@pytest.mark.parametrize("call", [ring_attention, ulysses_attention, flash_attention], ids=lambda call: call.__name__)
def test_meta_tensors_yield_shapes(call: Callable) -> None:
    """Forward and backward compute shapes only, and no rank sends a message."""
    shapes = [x.shape for x in inputs()]

    def on_rank(rank: int, group) -> list[torch.Size]:
        options = {
            ring_attention: {"layout": Layout.zigzag(24, 2), "group": group},
            ulysses_attention: {"layout": Layout.contiguous(24, 1).split(2), "ulysses_group": group},
            flash_attention: {},
        }[call]
        operands = [x.detach().to("meta").requires_grad_() for x in inputs()]
        out = call(*operands, mask=Mask.causal(), **options)
        assert out.is_meta
        return [out.shape, *(x.shape for x in torch.autograd.grad(out.sum(), operands))]

    assert simulate(2, on_rank) == [[shapes[0], *shapes]] * 2


@pytest.mark.parametrize("mixed", [False, True], ids=["fake-only", "mixed"])
def test_fake_tensors(mixed: bool) -> None:
    """Memory estimates use fake tensors, which must not remain in caches that real calls use afterwards."""
    layout, mask = Layout.assigned([0, 0], 7, 12, 1), Mask.causal(window=11, documents=[5, 7])

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        whole = ring_attention(q, k, v, layout=layout, mask=mask)
        return whole + flash_attention(q, k, v, mask=mask)

    with FakeTensorMode(allow_non_fake_inputs=mixed):
        operands = inputs()
        if mixed:
            mask.intervals(12), layout.positions(0)
        out = call(*operands)
        assert out.shape == (1, 12, 4, 8)
        assert [x.shape for x in torch.autograd.grad(out.sum(), operands)] == [x.shape for x in operands]
    call(*inputs()).sum().backward()


def test_flops_of_a_causal_mask_with_documents() -> None:
    """Documents of 5 and 7 tokens have 43 (query, key) pairs, with 4 heads and head dim 8."""
    mask, operands = Mask.causal(documents=[5, 7]), inputs()
    for call in (
        lambda q, k, v: ring_attention(q, k, v, layout=Layout.zigzag(12, 1), mask=mask),
        lambda q, k, v: ulysses_attention(q, k, v, layout=Layout.zigzag(12, 1), mask=mask),
        lambda q, k, v: flash_attention(q, k, v, mask=mask),
    ):
        with FlopCounterMode(display=False) as forward:
            out = call(*operands)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        pairs = (5 * 6 + 7 * 8) // 2
        assert (forward.get_total_flops(), backward.get_total_flops()) == (2 * 4 * 16 * pairs, 2 * 4 * 40 * pairs)


def test_flops_equal_those_of_torch() -> None:
    """Full attention is counted like torch's own attention."""
    q, k, v = (torch.randn(2, 16, heads, dim, requires_grad=True) for heads, dim in ((4, 8), (4, 8), (4, 6)))
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, k, v).sum().backward()
    shapes = [x.transpose(1, 2).shape for x in (q, k, v)]
    forward, backward = sdpa_flop_count(*shapes), sdpa_backward_flop_count(shapes[2], *shapes)
    assert counter.get_total_flops() == forward + backward


def test_flops_of_all_ranks_sum_to_those_of_the_whole() -> None:
    """Each rank of a ring counts an equal part of the pairs."""
    mask, layout = Mask.causal(documents=[5, 7]), Layout.contiguous(12, 3)

    def count(rank: int, group) -> int:
        q, k, v = (layout.shard(x.detach(), rank) for x in inputs())
        with FlopCounterMode(display=False) as counter:
            ring_attention(q, k, v, layout=layout, mask=mask, group=group)
        return counter.get_total_flops()

    assert sum(simulate(3, count)) == pytest.approx(2 * 4 * 16 * 43, abs=3)


@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
def test_flops_of_a_ulysses_group_sum_to_those_of_the_whole(recompute: bool) -> None:
    """The documents have 43 (query, key) pairs, with 4 heads and head dim 8, as on one rank."""
    mask, layout = Mask.causal(documents=[5, 7]), Layout.contiguous(12, 1).split(2)

    def count(rank: int, group) -> tuple[int, int]:
        q, k, v = (layout.shard(x.detach(), rank).requires_grad_() for x in inputs())
        options = dict(layout=layout, mask=mask, ulysses_group=group, recompute_all_to_all=recompute)
        with FlopCounterMode(display=False) as forward:
            out = ulysses_attention(q, k, v, **options)
        with FlopCounterMode(display=False) as backward, torch.autograd.set_multithreading_enabled(False):
            out.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()

    forward, backward = map(sum, zip(*simulate(2, count), strict=True))
    assert (forward, backward) == (2 * 4 * 16 * 43, 2 * 4 * 40 * 43)


def forward_flops(call: Callable[[], Tensor]) -> int:
    """Return the FLOPs that torch counts for a call."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize(("queries", "keys", "pairs"), [(2, 4, 3 + 4), (4, 2, 1 + 2)], ids=["fewer-queries", "more-queries"])
def test_flops_of_unequal_lengths(queries: int, keys: int, pairs: int) -> None:
    """The last query has the position of the last key."""
    q, k, v = torch.randn(1, queries, 2, 8), torch.randn(1, keys, 2, 8), torch.randn(1, keys, 2, 8)
    assert forward_flops(lambda: flash_attention(q, k, v, mask=Mask.causal())) == 2 * 2 * 16 * pairs


def test_flops_of_a_window() -> None:
    """Every query except the first two has three keys. Both batch entries count."""
    mask, operands = Mask.causal(window=3), [x.detach().expand(2, -1, -1, -1) for x in inputs()]
    for call in (
        lambda: flash_attention(*operands, mask=mask),
        lambda: ring_attention(*operands, layout=Layout.zigzag(12, 1), mask=mask),
    ):
        assert forward_flops(call) == 2 * 2 * 4 * 16 * (1 + 2 + 3 * 10)


def test_flops_of_a_block_mask() -> None:
    """Only the blocks that are kept count: three of four."""
    q, k, v = (torch.randn(1, 128, 2, 16) for _ in range(3))
    blocks = BlockMask(torch.tensor([[True, False], [True, True]])[None, None], 64)
    assert forward_flops(lambda: flash_attention(q, k, v, blocks=blocks)) == 2 * 2 * 32 * 128 * 128 * 3 // 4


def test_flops_of_fake_tensors() -> None:
    """Fake tensors have the same FLOPs as real ones, because masks are always real."""
    for documents in (None, [5, 7]):
        counts = []
        for mode in (FakeTensorMode(), torch.enable_grad()):
            with mode, FlopCounterMode(display=False) as counter:
                q, k, v = inputs()
                mask = Mask.causal(documents=documents)
                out = flash_attention(q, k, v, mask=mask) + ring_attention(q, k, v, layout=Layout.zigzag(12, 1), mask=mask)
                torch.autograd.grad(out.sum(), q)
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1] > 0


def test_an_unused_lse_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros in place of a missing gradient would cost an allocation, a kernel and a read."""
    gradients, backward = [], Ring.backward
    monkeypatch.setattr(Ring, "backward", lambda *args, **options: gradients.append(args[7]) or backward(*args, **options))
    attend(*inputs(), Mask.causal()).sum().backward()
    assert gradients == [None]


def test_a_call_without_gradients_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """autograd.Function takes as long on the host as a kernel for few queries."""
    q, k, v = inputs()
    expected = attend(q, k, v, Mask.causal()).detach()

    def apply(*_: object) -> None:
        raise AssertionError("the call was recorded")

    monkeypatch.setattr(torch.autograd.Function, "apply", apply)
    with torch.no_grad():
        assert torch.equal(attend(q, k, v, Mask.causal()), expected)
    assert torch.equal(attend(q.detach(), k.detach(), v.detach(), Mask.causal()), expected)
    with pytest.raises(AssertionError, match="recorded"):
        attend(q.detach(), k.detach(), v, Mask.causal())


def test_forward_mode_derivatives_raise_an_error() -> None:
    """Without the error, the derivative would be zero."""
    q, k, v = (x.detach() for x in inputs())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp"):
            attend(dual, k, v, Mask.causal())
    with pytest.raises(ValueError, match=r"torch\.func"):
        torch.func.jvp(lambda q: attend(q, k, v, Mask.causal()), (q,), (torch.ones_like(q),))


def test_a_flattened_spec_can_be_rebuilt() -> None:
    """A field of a spec may be a spec itself, and lists stay lists."""
    spec = Outer([1, 2], Inner(3, "four"), 0.5)
    assert custom_op.schema(Outer) == "SymInt[] sizes, SymInt count, str name, float scale"
    assert custom_op.flatten(spec) == ([1, 2], 3, "four", 0.5)
    assert custom_op.unflatten(Outer, custom_op.flatten(spec)) == spec


class Inner(NamedTuple):
    """A nested record of settings."""

    count: int
    name: str


class Outer(NamedTuple):
    """A record of settings."""

    sizes: list[int]
    inner: Inner
    scale: float
