"""The ring is one operator: checked by torch's own tests of operators, traced whole, and never recomputed."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn import Layout, Mask, ring_attention
from ringattn import attention as attention_module

OPERATOR = torch.ops.ringattn.ring_attention.default


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 12, 4, 8), (1, 12, 2, 8), (1, 12, 2, 8)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    return ring_attention(q, k, v, layout=Layout.contiguous(12, 1), mask=mask)


def test_torch_checks_the_operator() -> None:
    settings = (
        Mask.causal(documents=[5, 7]).lengths,
        True,
        4,
        "contiguous",
        12,
        1,
        "",
        "auto",
        "auto",
        0.5,
        0.2,
        7,
        2,
        "tiled",
        "ieee",
    )
    torch.library.opcheck(OPERATOR, (*inputs(), *settings))


def test_gradients_by_finite_differences() -> None:
    mask = Mask.causal(window=5, documents=[1, 4, 7])

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return ring_attention(q, k, v, layout=Layout.contiguous(12, 1), mask=mask, return_lse=True)

    assert torch.autograd.gradcheck(both, inputs(), fast_mode=True)


def test_second_derivatives_are_refused() -> None:
    """Even of a sum, whose gradient does not depend on the output."""
    q, k, v = inputs()
    out = ring_attention(q, k, v, layout=Layout.contiguous(12, 1), mask=Mask.causal())
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        grad.square().sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):  # not left out beside what does have a derivative
        torch.autograd.grad(grad.square().sum() + q.sum(), q)


def test_compile_sees_one_node_and_honours_every_mask() -> None:
    """Traced once with no graph break; documents that change from batch to batch change the result."""
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


@pytest.mark.parametrize("saved", (True, False), ids=("saved", "recomputed"))
def test_selective_checkpointing_saves_the_output(saved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the policy that saves this operator, the backward does not run the forward ring again."""
    runs = []
    honest = attention_module.Ring.forward
    monkeypatch.setattr(attention_module.Ring, "forward", lambda *args, **options: runs.append(1) or honest(*args, **options))

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
    assert len(runs) == (1 if saved else 2) + 1
