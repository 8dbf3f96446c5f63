"""Tests of rings with FP8 inputs: what circulates, and outputs and gradients on every schedule and layout."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, Mask, flash_attention, ring_attention, simulate, ulysses_attention
from ringattn.comm.simulated import SimulatedRank
from ringattn.comm.transport import Addressed, Wait, take_rows
from ringattn.kernels import dispatch, fp8, reference
from ringattn.kernels.interval_mask import Intervals
from ringattn.layout import KINDS
from ringattn.operands import QuantizedOperands, _keys, _queries
from ringattn.planning import workload
from ringattn.planning.workload import forward_work
from tests.covering import every_value, pairs
from tests.distributed import run_ranks
from tests.ringattn.rings import MASK_NAMES, Case, assert_close, masks, relative_errors

SCHEDULES, ROUTES = ("state", "kv"), ("relayed", "direct")
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
# Values of the inputs are rounded by at most 1/16, and the rounding errors of different keys largely cancel.
FP8_ERRORS = {"out": 0.2, "lse": 0.1, "dq": 0.2, "dk": 0.2, "dv": 0.2}


def rounded(case: Case, layout: Layout) -> Case:
    """Round the inputs on every rank, in blocks of 128 rows of its shard, as an FP8 ring does. The result is fp64."""
    shards = [dispatch.round_to_fp8(*(layout.shard(x, r) for x in (case.q, case.k, case.v))) for r in range(layout.ranks)]
    q, k, v = (layout.unshard([shard[i] for shard in shards]) for i in range(3))
    return Case(q, k, v, case.dout, case.dlse).to(torch.float64)


def expected_results(case: Case, layout: Layout, mask: Mask) -> list[Tensor]:
    """Return (out, lse) and the gradients (dq, dk, dv) of attention on the rounded inputs, in fp64 on one rank."""
    exact, (_, seq_len, _, dim), device = rounded(case, layout), case.q.shape, case.q.device
    inputs, problem = (exact.q, exact.k, exact.v), (Intervals.of(*mask.intervals(seq_len), seq_len, device), dim**-0.5)
    out, lse = reference.forward(*inputs, *problem, final=True)
    delta = reference.row_delta(out, exact.dout, exact.dlse)
    dq, dk, dv = reference.backward(*inputs, exact.dout, lse, delta, *problem)
    # The gradients of the rotated queries and keys are rotated back.
    matrix = fp8.rotation(dim, device).double()
    return [out, lse, dq @ matrix.T, dk @ matrix.T, dv]


def check_ring(case: Case, mask: Mask, layout: Layout, schedule: str, route: str, dtype: torch.dtype, **options) -> None:
    """Compare a simulated ring with one rank in fp64. Dropping one key of 700 would change a row by about 1e-3."""
    got = case.to(dtype).on_ring(layout, mask, route == "direct", schedule=schedule, precision="fp8", **options)
    expected = expected_results(case.to(dtype), layout, mask)
    assert_close(got, expected, TOLERANCES[dtype])


@every_value(
    ranks=(1, 2, 3, 5),
    mask=MASK_NAMES,
    layout=KINDS,
    schedule=SCHEDULES,
    route=ROUTES,
    dtype=tuple(TOLERANCES),
    heads=("4/2", "3/3", "4/1"),
)
def test_ring_equals_attention_on_rounded_inputs(ranks, mask, layout, schedule, route, dtype, heads) -> None:
    """Every shard of 701 tokens has an incomplete block of 128 rows."""
    num_heads, key_heads = map(int, heads.split("/"))
    case = Case.random(701, heads=num_heads, key_heads=key_heads, dim=16, value_dim=8)
    check_ring(case, masks(701)[mask], Layout(layout, 701, ranks), schedule, route, dtype)


@every_value(layout=KINDS, schedule=SCHEDULES, route=ROUTES)
def test_batch_entries_with_their_own_documents(layout: str, schedule: str, route: str) -> None:
    """A document ends inside a block of 128 rows. With several batch entries, parts of a block are not contiguous."""
    case = Case.random(600, batch=2, dim=8, value_dim=16)
    mask = Mask.causal(documents=[[1] * 6 + [200, 394], [600]])
    check_ring(case, mask, Layout(layout, 600, 2), schedule, route, torch.float64)


@pytest.mark.parametrize(("schedule", "route", "mask"), pairs(schedule=SCHEDULES, route=ROUTES, mask=("causal", "documents")))
def test_ranks_without_tokens(schedule: str, route: str, mask: str) -> None:
    """9 tokens on 16 ranks."""
    check_ring(Case.random(9), masks(9)[mask], Layout.zigzag(9, 16), schedule, route, torch.float64, backend="reference")


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "kv"), (4, "state")])
def test_ring_equals_one_rank_where_the_blocks_are_the_same(ranks: int, schedule: str) -> None:
    """The chunks of this zigzag layout have 128 or 256 tokens, so the ring and one rank round the inputs in the same way."""
    case = Case.random(1024, dim=32, value_dim=32, dtype=torch.float32)
    layout, mask = Layout.zigzag(1024, ranks), Mask.causal()
    one_rank = case.unsharded(mask, "blockwise", precision="fp8")
    ring = case.on_ring(layout, mask, schedule=schedule, precision="fp8")
    assert_close(ring, one_rank, 1e-5)
    q, k, v = case.q, case.k, case.v
    assert torch.equal(one_rank[0], flash_attention(q, k, v, mask=mask, backend="blockwise", precision="fp8"))
    # The rounding of the inputs has an effect, but a small one.
    errors = relative_errors(ring, case.to(torch.float64).unsharded(mask))
    assert errors["out"] > 0.01, errors
    assert all(errors[name] < limit for name, limit in FP8_ERRORS.items()), errors


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_of_fp16_inputs_do_not_overflow(schedule: str) -> None:
    """The rotated queries are larger than the largest fp16 number."""
    case, layout, mask = Case.random(300, dtype=torch.float16), Layout.zigzag(300, 2), Mask.causal()
    case.q = 3e4 * case.q.sign() * fp8.rotation(8, case.q.device)[:, 0].sign().half()
    case.k, case.dout = 1e-5 * case.k, 0.1 * case.dout
    got, exact = (x.on_ring(layout, mask, schedule=schedule, precision="fp8") for x in (case, case.to(torch.float64)))
    errors = relative_errors(got, exact)
    assert all(error < 1e-2 for error in errors.values()), errors
    assert all(x.dtype == torch.float16 for x in got[2:])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_head_chunks_give_the_same_result(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long call processes its heads in chunks, and every head has its own scales."""
    case, layout = Case.random(300), Layout.zigzag(300, 2)
    whole = case.on_ring(layout, Mask.causal(), schedule=schedule, precision="fp8")
    monkeypatch.setattr(workload, "HEAD_CHUNK_FLOPS", 1.0)
    assert_close(case.on_ring(layout, Mask.causal(), schedule=schedule, precision="fp8"), whole, 1e-12)


def bytes_sent(precision: str, schedule: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the bytes that all ranks send in the forward pass and in the backward pass of a relaying ring of four."""
    sent: list[list[int]] = [[], []]
    exchange = SimulatedRank.exchange
    case, layout = Case.random(1024, dim=64, value_dim=64, dtype=dtype), Layout.zigzag(1024, 4)

    def on_rank(rank: int, group: SimulatedRank) -> None:
        q, k, v, dout = (layout.shard(x, rank) for x in (case.q, case.k, case.v, case.dout))
        out = ring_attention(
            *(x.requires_grad_() for x in (q, k, v)),
            layout=layout,
            mask=Mask.full(),
            group=group,
            schedule=schedule,
            precision=precision,
        )
        group.is_backward = True
        out.backward(dout)

    def record(self: SimulatedRank, sends: Addressed, receives: Addressed) -> Wait:
        sent[getattr(self, "is_backward", False)].extend(x.nbytes for x, _ in sends)
        return exchange(self, sends, receives)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedRank, "exchange", record)
        simulate(4, on_rank)
    return sum(sent[0]), sum(sent[1])


def test_fp8_halves_the_bytes_of_circulating_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with bf16, 65 of 128 bytes circulate per row and head: 64 numbers and a scale. The states remain fp32.

    The backward pass sends the same bytes as without FP8, because it sends the rounded inputs in bf16.
    """
    sent = {
        (precision, schedule): bytes_sent(precision, schedule, torch.bfloat16, monkeypatch)
        for precision in ("ieee", "fp8")
        for schedule in SCHEDULES
    }
    rows, heads, key_heads, dim = 3 * 1024, 4, 2, 64  # rows: every rank sends three blocks of 256 rows
    states = rows * heads * (dim + 2) * 4
    assert sent["ieee", "kv"][0] == rows * key_heads * 2 * dim * 2
    assert sent["fp8", "kv"][0] == rows * key_heads * 2 * (dim + 1)
    assert sent["ieee", "state"][0] - states == rows * heads * dim * 2
    assert sent["fp8", "state"][0] - states == rows * heads * (dim + 1)
    for schedule in SCHEDULES:
        assert sent["fp8", schedule][1] == sent["ieee", schedule][1] > 0
    q, k = (torch.empty(1, 1, n, dim, dtype=torch.bfloat16) for n in (heads, key_heads))
    work = forward_work(q, k, k, "fp8")
    assert work.row_bytes.kv == (key_heads * 2 * (dim + 1), 0)
    assert work.row_bytes.state == (heads * (dim + 1), states // rows)


def test_parts_of_a_circulating_block() -> None:
    """A part that starts at a multiple of 128 rows equals the FP8 format of its rows."""
    case = Case.random(300, batch=2, dim=16, value_dim=8)
    operands = QuantizedOperands(case.q, case.k, case.v)
    assert all(x.dtype == torch.uint8 and x.is_contiguous() for x in (*operands.queries, *operands.keys))
    assert [x.shape[1] for x in operands.queries] == [300] * 2
    assert [x.shape[1] for x in operands.keys] == [384] * 3
    for first, last in ((0, 300), (0, 128), (128, 256), (128, 300), (256, 300)):
        padded_last = -(-last // 128) * 128
        q = _queries(*take_rows(operands.queries, range(first, last)))
        k, v = _keys(*take_rows(operands.keys, range(first, padded_last)))
        expected = fp8.quantize(*(x[:, first:last] for x in (case.q, case.k, case.v)))
        for got, x in zip((q, k, v), expected, strict=True):
            assert torch.equal(got.scales, x.scales)
            assert got.scales.is_contiguous()
        for got, x in zip((q, k, v), expected, strict=True):
            dense = [fp8.dequantize(y, torch.float64, last - first)[:, : last - first] for y in (got, x)]
            assert torch.equal(*dense)
        assert not k.data.view(torch.uint8)[:, last - first :].any()


def test_a_skipped_local_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of these tests fails if a rank leaves out the last block of 128 keys of another rank."""
    attend, calls = QuantizedOperands.attend, []

    def skip_last_block(self, queries, keys, intervals, *rest, **options):
        calls.append(1)
        if len(calls) == 3:
            intervals = Intervals.of(intervals.host[0], intervals.host[1].clamp(max=256), intervals.num_keys)
        return attend(self, queries, keys, intervals, *rest, **options)

    case, layout = Case.random(701), Layout.zigzag(701, 2)
    with monkeypatch.context() as patch:
        patch.setattr(QuantizedOperands, "attend", skip_last_block)
        got = case.on_ring(layout, Mask.full(), schedule="kv", precision="fp8")
    assert relative_errors(got, expected_results(case, layout, Mask.full()))["out"] > 1e-3


def test_dropout_raises_an_error() -> None:
    """FP8 attention has no dropout."""
    case, layout = Case.random(8), Layout.zigzag(8, 2)
    with pytest.raises(ValueError, match="precision='fp8' with dropout"):
        case.on_ring(layout, Mask.causal(), precision="fp8", dropout_p=0.1)


@pytest.mark.parametrize(("ulysses", "ring"), [pytest.param(4, 1, marks=pytest.mark.slow), (2, 2)], ids=str)
def test_ulysses(ulysses: int, ring: int, tmp_path: Path) -> None:
    """The ranks of a Ulysses group round the tokens of the whole group, in blocks of 128."""
    run_ranks(check_ulysses, ulysses * ring, tmp_path / "ranks", ulysses)


def check_ulysses(ulysses: int) -> None:
    """On every rank of a job: an all-to-all inside groups, and a ring across them."""
    rank, ring = dist.get_rank(), dist.get_world_size() // ulysses
    mesh = dist.init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    groups = dict(ulysses_group=mesh.get_group("ulysses"), ring_group=mesh.get_group("ring"))
    case, mask = Case.random(301, batch=2, heads=8, key_heads=4, value_dim=4), Mask.causal(documents=[1, 200, 100])
    layout = Layout.zigzag(301, ring)
    split, expected = layout.split(ulysses), expected_results(case, layout, mask)
    for schedule in SCHEDULES:
        got = case.on_rank(split, mask, rank, None, ulysses_attention, schedule=schedule, precision="fp8", **groups)
        assert_close([split.unshard(x) for x in got], expected, 1e-10)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_processes_over_gloo(ranks: int, tmp_path: Path) -> None:
    """Every pair of mask, layout and schedule."""
    run_ranks(check_gloo, ranks, tmp_path / "ranks")


def check_gloo() -> None:
    """On every rank of a job: rings over all ranks, with batch entries, in fp64 and bf16."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    case = Case.random(300, batch=2, heads=2, key_heads=1)
    for mask, kind, schedule in pairs(mask=("causal", "documents", "full"), kind=KINDS, schedule=SCHEDULES):
        mask, layout = masks(300)[mask], Layout(kind, 300, ranks)
        shards = case.on_rank(layout, mask, rank, group, schedule=schedule, precision="fp8")
        got = [layout.unshard(shard, group=group) for shard in shards]
        assert_close(got, expected_results(case, layout, mask), 1e-10)
        shards = case.to(torch.bfloat16).on_rank(layout, mask, rank, group, schedule=schedule, precision="fp8")
        out = layout.unshard(shards[0], group=group)
        expected = expected_results(case.to(torch.bfloat16), layout, mask)[0]
        assert relative_errors([out] * 5, [expected] * 5)["out"] < 0.01


def check_ranks_that_differ() -> None:
    """Rank 0 uses FP8 and rank 1 does not."""
    case, layout = Case.random(256), Layout.zigzag(256, 2)
    with pytest.raises(ValueError, match="FP8 forward = True and rank 1 with False"):
        case.on_rank(layout, Mask.causal(), dist.get_rank(), dist.group.WORLD, precision=("fp8", "ieee")[dist.get_rank()])


def test_all_ranks_must_use_fp8_or_none(tmp_path: Path) -> None:
    """The messages have different sizes, so the first call of a group compares the ranks."""
    run_ranks(check_ranks_that_differ, 2, tmp_path / "ranks")
