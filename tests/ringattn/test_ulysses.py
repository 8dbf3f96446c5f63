"""Heads exchanged inside groups and a ring across them, against one rank in float64."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn import Layout, Mask, simulate, ulysses_attention
from ringattn import ulysses as ulysses_module
from ringattn.layout import KINDS
from ringattn.planning import ulysses_degree
from ringattn.planning.ulysses_degree import head_chunks_for_overlap, key_copies
from tests.distributed import run_ranks
from tests.ringattn.rings import MASK_NAMES, Case, masks

HEADS = {
    "multi-head": (8, 8),
    "grouped": (8, 4),
    "fewer key heads than ranks": (8, 2),
    "one key head": (4, 1),
    "key heads that straddle ranks": (12, 3),
}


def on_rank(case: Case, layout: Layout, mask: Mask, rank: int, **options) -> list[torch.Tensor]:
    """A rank's rows of (out, lse, dq, dk, dv), for the loss sum(out * dout) + sum(lse * dlse)."""
    q, k, v = (layout.shard(x, rank).requires_grad_() for x in (case.q, case.k, case.v))
    out, lse = ulysses_attention(q, k, v, layout=layout, mask=mask, return_lse=True, **options)
    upstream = layout.shard(case.dout, rank), layout.shard(case.dlse, rank).to(lse.dtype)
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), upstream)]


def exact(case: Case, mask: Mask) -> list[torch.Tensor]:
    """The same over the whole sequence, by one rank."""
    return on_rank(case, Layout.contiguous(case.q.shape[1], 1), mask, 0, backend="reference")


def random_case(seq_len: int, heads: str, dtype: torch.dtype = torch.float64) -> Case:
    num_heads, key_heads = HEADS[heads]
    return Case.random(seq_len, batch=2, heads=num_heads, key_heads=key_heads, value_dim=5, dtype=dtype)


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    """Row by row."""
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        error = (x.double() - y).flatten(2).norm(dim=2).max() / y.flatten(2).norm(dim=2).max()
        assert error <= tolerance, (name, float(error))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("mask", MASK_NAMES)
def test_heads_alone_in_float64(mask: str, heads: str) -> None:
    """U = 4, R = 1; 31 rows divide by no number of ranks."""
    case, layout, mask = random_case(31, heads), Layout.contiguous(31, 1).split(4), masks(31)[mask]
    ranks = simulate(4, lambda rank, group: on_rank(case, layout, mask, rank, ulysses_group=group))
    assert_close([layout.unshard([shards[i] for shards in ranks]) for i in range(5)], exact(case, mask), 1e-10)


@pytest.mark.parametrize("seq_len", (2, 5))
def test_ranks_without_a_row(seq_len: int) -> None:
    case, layout, mask = random_case(seq_len, "grouped"), Layout.contiguous(seq_len, 1).split(4), Mask.causal()
    ranks = simulate(4, lambda rank, group: on_rank(case, layout, mask, rank, ulysses_group=group))
    assert_close([layout.unshard([shards[i] for shards in ranks]) for i in range(5)], exact(case, mask), 1e-10)


@pytest.mark.parametrize("heads", HEADS)
def test_dropout_is_that_of_one_rank(heads: str) -> None:
    case, layout, mask = random_case(31, heads), Layout.contiguous(31, 1).split(4), Mask.causal()
    options = dict(dropout_p=0.3, seed=7)
    ranks = simulate(4, lambda rank, group: on_rank(case, layout, mask, rank, ulysses_group=group, **options))
    expected = on_rank(case, Layout.contiguous(31, 1), mask, 0, backend="reference", **options)
    assert_close([layout.unshard([shards[i] for shards in ranks]) for i in range(5)], expected, 1e-10)


def test_the_output_alone() -> None:
    case, layout, mask = random_case(12, "grouped"), Layout.contiguous(12, 1).split(4), Mask.causal()

    def outputs(rank: int, group) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (layout.shard(x, rank) for x in (case.q, case.k, case.v))
        call = partial(ulysses_attention, q, k, v, layout=layout, mask=mask, ulysses_group=group)
        return call(), call(return_lse=True)[0]

    for alone, beside_lse in simulate(4, outputs):
        assert torch.equal(alone, beside_lse)


def check_mesh(ulysses: int) -> None:
    """On every rank of four: every layout, mask and arrangement of heads on U x R ranks."""
    rank, ring = dist.get_rank(), dist.get_world_size() // ulysses
    mesh = dist.init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    groups = dict(ulysses_group=mesh.get_group("ulysses"), ring_group=mesh.get_group("ring"))
    for seq_len, kind in ((33, "zigzag"), (33, "striped"), (3, "contiguous")):
        layout = Layout(kind, seq_len, ring).split(ulysses)
        for heads in HEADS:
            for mask in masks(33).values() if seq_len == 33 else [Mask.causal()]:
                case = random_case(seq_len, heads)
                got = on_rank(case, layout, mask, rank, **groups)
                got = [layout.unshard(x) for x in got]
                assert_close(got, exact(case, mask), 1e-10)
    case, mask = random_case(33, "grouped", torch.float32), Mask.causal(documents=[1, 20, 12])
    layout = Layout.zigzag(33, ring).split(ulysses)
    expected = exact(case.to(torch.float64), mask)
    for schedule in ("state", "kv"):
        got = on_rank(case, layout, mask, rank, **groups, schedule=schedule)
        assert_close([layout.unshard(x) for x in got], expected, 1e-5)
    # half of the ring's ranks have the rows for two parts, if they were asked alone; this process ends here
    ulysses_degree.MIN_CHUNK_ROWS = 2 * HEADS["grouped"][0] // ulysses * (33 // ring + 1) // 2
    got = on_rank(case, layout, mask, rank, **groups)
    assert_close([layout.unshard(x) for x in got], expected, 1e-5)
    ulysses_degree.MIN_CHUNK_ROWS = 1  # as many parts as a rank has key heads, each with a ring of its own
    for again in (False, True):
        got = on_rank(case, layout, mask, rank, **groups, recompute_all_to_all=again)
        assert_close([layout.unshard(x) for x in got], expected, 1e-5)


@pytest.mark.parametrize("ulysses", (1, 2, 4), ids=lambda n: f"U{n}")
def test_gloo(ulysses: int, tmp_path: Path) -> None:
    run_ranks(check_mesh, 4, tmp_path / "ranks", ulysses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq_len", (1, 7, 40))
def test_a_group_holds_a_shard_of_the_ring_in_order(kind: str, seq_len: int) -> None:
    whole = Layout(kind, seq_len, 3)
    layout = whole.split(4)
    assert layout.ranks == 12 and layout.whole == whole and layout.parts == 4
    for rank in range(3):
        held = torch.cat([layout.positions(4 * rank + peer) for peer in range(4)])
        assert torch.equal(held, whole.positions(rank))


@pytest.mark.parametrize(
    "heads, key_heads, ulysses, copies", ((8, 8, 4, 1), (8, 4, 4, 1), (8, 2, 4, 2), (4, 1, 4, 4), (12, 3, 2, 2), (12, 3, 4, 4))
)
def test_every_query_head_finds_its_key_head(heads: int, key_heads: int, ulysses: int, copies: int) -> None:
    """By counting: local query head h of a rank reads its local key head h // (local group)."""
    assert key_copies(heads, key_heads, ulysses) == copies
    sent = torch.arange(key_heads).repeat_interleave(copies).view(ulysses, -1)
    for rank in range(ulysses):
        local = torch.arange(heads // ulysses) // (heads // ulysses // sent.shape[1])
        queries = rank * (heads // ulysses) + torch.arange(heads // ulysses)
        assert torch.equal(sent[rank][local], queries // (heads // key_heads))


@pytest.mark.parametrize("again", (False, True), ids=("kept", "exchanged-again"))
@pytest.mark.parametrize("heads", HEADS)
def test_heads_in_parts(heads: str, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many parts as a rank has key heads, with dropout, which counts the heads."""
    monkeypatch.setattr(ulysses_degree, "MIN_CHUNK_ROWS", 1)
    case, layout, mask = random_case(31, heads), Layout.contiguous(31, 1).split(2), Mask.causal(documents=[1, 20, 10])
    options = dict(dropout_p=0.3, seed=7)

    def attend(rank: int, group) -> list[torch.Tensor]:
        return on_rank(case, layout, mask, rank, ulysses_group=group, recompute_all_to_all=again, **options)

    expected = on_rank(case, Layout.contiguous(31, 1), mask, 0, backend="reference", **options)
    ranks = simulate(2, attend)
    assert_close([layout.unshard([shards[i] for shards in ranks]) for i in range(5)], expected, 1e-10)


@pytest.mark.parametrize("uses_sms", (False, True), ids=("copy-engines", "kernels"))
def test_attention_is_told_of_kernels_beside_it(uses_sms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    honest = ulysses_module.Ring.forward

    def forward(ring, *args, **options) -> tuple[torch.Tensor, torch.Tensor]:
        told.append(ring.shares_sms)
        return honest(ring, *args, **options)

    monkeypatch.setattr(ulysses_module.Ring, "forward", forward)
    case, layout = random_case(12, "grouped"), Layout.contiguous(12, 1).split(2)

    def attend(rank: int, group) -> None:
        group.interconnect = group.interconnect._replace(uses_sms=uses_sms)
        on_rank(case, layout, Mask.causal(), rank, ulysses_group=group)

    simulate(2, attend)
    assert told == [uses_sms] * 2


def test_parts_keep_processors_busy() -> None:
    assert head_chunks_for_overlap(2**14, 4, 4) == 2
    assert head_chunks_for_overlap(2**16, 4, 4) == 4
    assert head_chunks_for_overlap(2**16, 8, 2) == 2  # no part without a key head
    assert head_chunks_for_overlap(2**16, 6, 3) == 3
    assert head_chunks_for_overlap(2**10, 4, 4) == 1
    assert head_chunks_for_overlap(2**20, 64, 64) == 32  # as many as a call can send


@pytest.mark.parametrize("again", (False, True), ids=("kept", "exchanged-again"))
@pytest.mark.parametrize("with_lse", (False, True), ids=("out", "out-lse"))
def test_the_operator_is_well_formed(with_lse: bool, again: bool) -> None:
    """Schema, fake tensors and autograd as PyTorch checks them, on a group of one, in two parts."""

    def check(rank: int, group) -> None:
        shapes = (2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 5)
        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        settings = [6], group.group_name, with_lse, again, 2
        settings += Mask.causal().lengths, True, 0, "contiguous", 6, 1, "", "auto", "auto", 0.5, 0.0, 0, 0, "blockwise", "ieee"
        torch.library.opcheck(torch.ops.ringattn.ulysses_attention.default, (*inputs, *settings))

    simulate(1, check)


def test_the_output_without_gradient_of_lse_and_the_reverse() -> None:
    case, layout, mask = random_case(12, "grouped"), Layout.contiguous(12, 1), Mask.causal()

    def gradients(rank: int, group, which: int) -> tuple[torch.Tensor, ...]:
        inputs = [layout.split(2).shard(x, rank).requires_grad_() for x in (case.q, case.k, case.v)]
        options = dict(layout=layout.split(2), mask=mask, ulysses_group=group, return_lse=True)
        return torch.autograd.grad(ulysses_attention(*inputs, **options)[which].square().sum(), inputs, allow_unused=True)

    for which in (0, 1):
        ranks = simulate(2, partial(gradients, which=which))
        alone = exact_square(case, mask, which)
        got = [layout.split(2).unshard([grads[i] for grads in ranks]) for i in range(3)]
        for x, y in zip(got, alone, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


def test_a_gradient_of_lse_on_one_rank_alone() -> None:
    case, layout, mask = random_case(12, "grouped"), Layout.contiguous(12, 1).split(2), Mask.causal()

    def gradients(rank: int, group, layout: Layout = layout) -> tuple[torch.Tensor, ...]:
        inputs = [layout.shard(x, rank).requires_grad_() for x in (case.q, case.k, case.v)]
        options = dict(layout=layout, mask=mask, ulysses_group=group, return_lse=True)
        out, lse = ulysses_attention(*inputs, **options)
        rows = slice(0, 6 if group is None else len(lse[0]) if rank == 0 else 0)  # those of the first rank
        loss = out.square().sum() + (lse[:, rows].sum() if rank == 0 else 0)
        return torch.autograd.grad(loss, inputs)

    ranks, alone = simulate(2, gradients), gradients(0, None, Layout.contiguous(12, 1))
    for i, expected in enumerate(alone):
        torch.testing.assert_close(layout.unshard([grads[i] for grads in ranks]), expected, rtol=1e-9, atol=1e-10)


def test_selective_checkpointing_runs_attention_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the policy that saves this operator, and q, k and v recomputed and exchanged again."""
    runs = []
    honest = ulysses_module.Ring.forward
    monkeypatch.setattr(ulysses_module.Ring, "forward", lambda *args, **options: runs.append(1) or honest(*args, **options))
    case, layout, mask = random_case(12, "grouped"), Layout.contiguous(12, 1).split(2), Mask.causal()
    operator = torch.ops.ringattn.ulysses_attention.default

    def policy(_, op, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is operator else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(rank: int, group, saved: bool) -> tuple[torch.Tensor, ...]:
        inputs = [layout.shard(x, rank).requires_grad_() for x in (case.q, case.k, case.v)]

        def attend() -> torch.Tensor:
            q, k, v = (x.sin() for x in inputs)
            return ulysses_attention(q, k, v, layout=layout, mask=mask, ulysses_group=group, recompute_all_to_all=saved).sin()

        contexts = partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(attend, use_reentrant=False, context_fn=contexts) if saved else attend()
        return torch.autograd.grad(out.sum(), inputs)

    saved, plain = (simulate(2, partial(gradients, saved=saved)) for saved in (True, False))
    assert len(runs) == 2 + 2
    for x, y in zip(sum(saved, ()), sum(plain, ()), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def exact_square(case: Case, mask: Mask, which: int) -> tuple[torch.Tensor, ...]:
    """Gradients of the sum of squares of the output, or of lse, by one rank."""
    inputs = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    layout = Layout.contiguous(case.q.shape[1], 1)
    results = ulysses_attention(*inputs, layout=layout, mask=mask, return_lse=True, backend="reference")
    return torch.autograd.grad(results[which].square().sum(), inputs)


def test_what_is_refused() -> None:
    x = torch.zeros(1, 4, 6, 8)
    layout = Layout.contiguous(16, 1).split(4)
    call = partial(ulysses_attention, mask=Mask.causal())

    def refused(message: str, q=x, k=x, v=x, layout=layout) -> None:
        with pytest.raises(ValueError, match=message):
            simulate(4, lambda rank, group: call(q, k, v, layout=layout, ulysses_group=group))

    refused("6 query heads do not divide among the 4 ranks")
    y = torch.zeros(1, 4, 8, 8)
    refused("over 2 x 2 ranks but there are a ring of 1 and a Ulysses group of 4", y, y, y, Layout.contiguous(16, 2).split(2))
    refused("Hkv must divide Hq", y, y[:, :, :3], y[:, :, :3])
    refused("give one dtype", y, y, y.double())
    refused("have 4, 3, 4 dimensions", y, y[0], y)
    refused("q has 3 rows and k 3, but the shard of rank . has 4", y[:, :3], y[:, :3], y[:, :3])
    for choice in ({"schedule": "star"}, {"transport": "star"}):
        with pytest.raises(ValueError, match="unknown (schedule|transport) 'star'"):
            simulate(4, lambda rank, group, choice=choice: call(y, y, y, layout=layout, ulysses_group=group, **choice))
    with pytest.raises(ValueError, match="over 2 x 1 ranks but there are a ring of 1"):
        call(y, y, y, layout=Layout.contiguous(8, 2))
