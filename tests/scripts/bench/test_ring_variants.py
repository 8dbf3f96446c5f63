"""The variants of the ring benchmark, as far as they run without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from ringattn.planning.cost_model import interconnect
from ringattn.planning.rank_plan import get_plan
from ringattn.ring import Ring
from ringattn.spec import AttentionSpec
from scripts.bench import ring_variants
from scripts.bench.cases import Case
from scripts.bench.ring_variants import LocalTransport, choose_variants, ring_layout, ulysses_degree


@pytest.mark.parametrize("schedule", ["kv", "state"])
@pytest.mark.parametrize(("kind", "ranks"), [("causal", 4), ("documents", 3)])
def test_rank_without_communication_computes_with_as_many_rows(kind: str, ranks: int, schedule: str) -> None:
    """Every rank runs alone. The blocks that it computes with have as many rows as those that would arrive."""
    case = Case(kind, 1024, heads=2, head_dim=32, key_heads=2)
    layout = ring_layout(case, ranks)
    for rank in range(ranks):
        q, k, v, dout = (torch.randn(1, layout.rows(rank), 2, 32) for _ in range(4))
        transport = LocalTransport(SimpleNamespace(rank=rank, size=ranks, interconnect=interconnect("nvlink")))
        spec = AttentionSpec.create(case.mask, layout, scale=32**-0.5, schedule=schedule)
        ring = Ring(get_plan(case.mask, layout, rank, q.device), transport, spec)
        out, lse = ring.forward(q, k, v)
        grads = ring.backward(q, k, v, out, lse, dout)
        assert all(x.shape == y.shape and x.isfinite().all() for x, y in zip((out, *grads), (q, q, k, v), strict=True))


@pytest.mark.parametrize(("variant", "degree"), [("ulysses-8", 8), ("ulysses-2-local", 2), ("nvlink-auto", 1), ("local", 1)])
def test_variant_names_its_ulysses_degree(variant: str, degree: int) -> None:
    assert ulysses_degree(variant) == degree


def test_variants_whose_degree_does_not_divide_the_ranks_are_left_out_or_rejected() -> None:
    assert {ulysses_degree(variant) for variant in choose_variants(None, 6)} == {1, 2}
    assert {ulysses_degree(variant) for variant in choose_variants(None, 8)} == {1, 2, 4, 8}
    assert choose_variants(["ulysses-4"], 8) == ["ulysses-4"]
    with pytest.raises(SystemExit, match="--variants ulysses-4: the Ulysses degree must divide the 6 ranks"):
        choose_variants(["local", "ulysses-4"], 6)


def test_only_communication_of_this_project_is_checked() -> None:
    checked = {variant for variant in ring_variants.VARIANTS if ring_variants.communicates(variant)}
    assert {"nvlink-auto-graph", "p2p-kv", "ulysses-4"} <= checked
    assert not checked & {"local", "ulysses-4-local-graph", "context_parallel"}
