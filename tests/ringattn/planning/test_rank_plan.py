"""Tests of the plan of one rank: local intervals, the choice of a schedule, and preparation for another mask."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringattn import Layout, Mask, balanced_layout
from ringattn.kernels import interval_mask
from ringattn.layout import KINDS
from ringattn.planning import rank_plan as planning
from ringattn.planning import workload
from ringattn.planning.cost_model import FLOPS_PER_HBM_BYTE, interconnect
from ringattn.planning.rank_plan import FIRST_SHARE, BlockPair, get_plan, overlaps, split_points
from ringattn.planning.schedule import LocalStep, LocalSteps
from ringattn.planning.workload import (
    HEAD_CHUNK_FLOPS,
    backward_work,
    forward_work,
    head_chunks_for_memory,
)

CPU = torch.device("cpu")


def dense_mask(pair: BlockPair) -> torch.Tensor:
    """The mask of the first batch entry: bool (query rows, key rows)."""
    return interval_mask.dense(pair.intervals.lo, pair.intervals.hi, pair.intervals.num_keys)[0]


def span(indices: torch.Tensor) -> list[int]:
    """All integers from the smallest to the largest index."""
    return list(range(int(indices.min()), int(indices.max()) + 1)) if len(indices) else []


@given(st.sampled_from(KINDS), st.integers(1, 5), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 9))
def test_local_intervals_equal_the_mask(kind: str, ranks: int, documents: list[int], window: int) -> None:
    """Every pair of shards gets its part of the whole mask."""
    seq_len = sum(documents)
    layout, mask = Layout(kind, seq_len, ranks), Mask.causal(window, documents)
    lo, hi = mask.intervals(seq_len)
    allowed = interval_mask.dense(lo, hi, seq_len)[0]
    for rank in range(ranks):
        plan = get_plan(mask, layout, rank, CPU)
        for other in range(ranks):
            for query_rank, key_rank in ((rank, other), (other, rank)):
                rows = range(layout.rows(query_rank))
                local = dense_mask(plan._block_pair("state", LocalStep(key_rank, query_rank, rows)))
                expected = allowed[layout.positions(query_rank)][:, layout.positions(key_rank)]
                assert torch.equal(local, expected)
                found, (rows, columns) = overlaps(mask, layout), expected.nonzero().T
                assert found.pairs[query_rank, key_rank] == expected.sum()
                ranges = [range(*x[:, query_rank, key_rank].tolist()) for x in (found.queries, found.keys)]
                assert list(map(list, ranges)) == [span(rows), span(columns)]


@pytest.mark.parametrize(
    ("heads", "key_heads", "forward", "backward"),
    [(16, 16, "kv", "state"), (32, 8, "kv", "kv"), (16, 4, "kv", "kv"), (2, 2, "kv", "state")],
    ids=("multi-head", "grouped-32-8", "grouped-16-4", "two-heads"),
)
def test_auto_chooses_the_fewest_bytes_on_slow_links(heads: int, key_heads: int, forward: str, backward: str) -> None:
    """Per row and head, the KV ring sends 4d bytes in the forward and 12d in the backward, for key heads only.

    The state ring sends 6d + 8 bytes in the forward and 8d + 8 in the backward.
    """
    q, k = torch.empty(1, 4, heads, 128, dtype=torch.bfloat16), torch.empty(1, 4, key_heads, 128, dtype=torch.bfloat16)
    plan = get_plan(Mask.causal(), Layout.zigzag(64, 4), 0, CPU)
    assert forward_work(q, k, k).row_bytes.state == (heads * 2 * 128, heads * (4 * 128 + 8))
    assert sum(forward_work(q, k, k).row_bytes.kv) == key_heads * 4 * 128
    assert sum(backward_work(q, k, k).row_bytes.state) == heads * (8 * 128 + 8)
    assert sum(backward_work(q, k, k).row_bytes.kv) == key_heads * 12 * 128
    slow = interconnect("nccl", one_host=False)._replace(latency=0.0)
    assert plan.choose_schedule("auto", forward_work(q, k, k), slow) == forward
    assert plan.choose_schedule("auto", backward_work(q, k, k), slow) == backward
    assert plan.choose_schedule("state", backward_work(q, k, k), slow) == "state"


@pytest.mark.parametrize(("difference", "expected"), [(0.97, "kv"), (1.0, "kv"), (1.029, "kv"), (1.031, "state")])
def test_auto_chooses_the_kv_ring_unless_the_state_ring_is_clearly_faster(
    difference: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.empty(1, 4, 2, 8)
    seconds = {"state": 1.0, "kv": difference}
    monkeypatch.setattr(planning.Plan, "total_cost", lambda self, name, *_: (seconds[name], 0))
    plan = planning.Plan(Mask.causal(), Layout.zigzag(16, 4), 0, CPU)
    assert plan.choose_schedule("auto", forward_work(q, q, q), interconnect("nvlink")) == expected


def test_auto_chooses_the_state_ring_on_cpus_and_no_ring_for_one_rank() -> None:
    q = torch.empty(1, 4, 32, 8)
    work, gloo = forward_work(q, q[:, :, :1], q[:, :, :1]), interconnect("gloo")
    plan = get_plan(Mask.causal(), Layout.zigzag(16, 4), 0, CPU)
    assert plan.total_cost("kv", work, gloo)[0] < 0.9 * plan.total_cost("state", work, gloo)[0]
    assert plan.choose_schedule("auto", work, gloo) == "state"
    assert get_plan(Mask.causal(), Layout.zigzag(16, 1), 0, CPU).choose_schedule("auto", work, interconnect("alone")) == "kv"


def test_the_choice_is_described_in_one_line() -> None:
    q = torch.empty(1, 4, 2, 8)
    plan, work = get_plan(Mask.causal(), Layout.zigzag(16, 4), 0, CPU), forward_work(q, q, q)
    line = plan.describe_choice("state", work, interconnect("gloo")._replace(all_pairs=False))
    assert line.startswith("forward: state ring of 4 ranks over gloo; (q) and the results (m, l, o) are relayed by neighbours")
    assert "as requested" in line
    assert "kv " in line
    assert "\n" not in line
    assert "(k, v) go directly" in plan.describe_choice("kv", work, interconnect("gloo"))


@pytest.mark.parametrize("rows", [4096, 16384])
def test_auto_chooses_the_kv_ring_on_fast_links(rows: int) -> None:
    """The links hide all messages, and the state ring also merges states."""
    q = torch.empty(1, rows, 16, 128, dtype=torch.bfloat16, device="meta")
    plan = get_plan(Mask.causal(), Layout.zigzag(4 * rows, 4), 0, CPU)
    for work in (forward_work(q, q, q), backward_work(q, q, q)):
        assert plan.choose_schedule("auto", work, interconnect("nvlink")) == "kv"


@pytest.mark.parametrize("circulating", ["queries", "keys"])
def test_the_own_block_is_split_by_work(circulating: str) -> None:
    """The first x N queries of a causal block have x^2 of its pairs, and the first x N keys have 1 - (1 - x)^2."""
    (row,) = split_points(Mask.causal(), Layout.zigzag(8192, 1), circulating)
    part = row / 8192
    assert row % 128 == 0
    assert (part**2 if circulating == "queries" else 1 - (1 - part) ** 2) == pytest.approx(FIRST_SHARE, abs=0.03)


def test_rows_of_fp8_blocks_start_at_multiples_of_128() -> None:
    """Rank 1 needs the last 100 keys of rank 0. Ranges of keys may end beyond the last key."""
    plan = planning.Plan(Mask.causal(window=101), Layout.contiguous(600, 2), 0, CPU)
    keys = plan.schedule("kv", results=False, all_pairs=True, row_multiple=128)
    assert [message.rows for step in keys.steps for message in step.messages] == [range(128, 384)]
    queries = plan.schedule("state", results=True, all_pairs=True, row_multiple=128)
    assert [(x.kind, x.owner, x.rows) for step in queries.steps for x in step.messages] == [
        ("block", 1, range(0, 128)),
        ("result", 1, range(0, 128)),
    ]
    own = [x.rows for step in queries.steps for x in step.local_steps if x.rank == x.owner == 0]
    assert own == [range(0, 128), range(128, 300)]
    # Local steps beyond the last key have intervals for the missing keys, to which no query attends.
    pair = plan._block_pair("kv", LocalStep(0, 0, range(256, 384)))
    assert pair.intervals.num_keys == 128
    assert pair.intervals.hi.max() == 44
    # The cost model counts the messages of the same schedule.
    q = torch.empty(1, 300, 2, 64, dtype=torch.bfloat16)
    _, count = plan.total_cost("kv", forward_work(q, q, q, "fp8"), interconnect("nvlink"))
    assert count == 256 * 2 * 2 * (64 + 1)


def test_split_points_by_hand() -> None:
    """The 10 queries of a causal block have 55 pairs. The first 7 queries, or the first 3 keys, have at least 22 of these
    pairs.
    """
    layout = Layout.contiguous(10, 1)
    assert split_points(Mask.causal(), layout, "queries") == (7,)
    assert split_points(Mask.causal(), layout, "keys") == (3,)
    assert split_points(Mask.causal(), Layout.contiguous(1, 2), "queries") == (0, 1)  # rank 0 holds no token


def test_flops_of_a_local_step_by_hand() -> None:
    """Two ranks with 4 tokens each under full attention: 16 pairs per block pair. Merges of states cost HBM traffic."""
    plan = get_plan(Mask.full(), Layout.contiguous(8, 2), 0, CPU)
    work = workload.Work("forward", 3, workload.RowBytes(state=(0, 7), kv=(0, 0)), pair_flops=5)
    traffic = FLOPS_PER_HBM_BYTE * 7  # of a state, per row of circulating queries
    # Rank 0 computes with the block of rank 1. Rank 1 computes with its own block, at once and then in two parts, which count
    # as 40% and 60% of its pairs.
    steps = LocalSteps(*np.array([[0, 0, 1, 0, 4], [0, 1, 1, 0, 4], [0, 1, 1, 0, 3], [1, 1, 1, 3, 4]]).T)
    assert plan.flops(work, "kv", steps).tolist() == pytest.approx([3 * 5 * 16 * share for share in (1, 1, 0.4, 0.6)])
    assert plan.flops(work, "state", steps)[:2].tolist() == [3 * (5 * 16 + 4 * traffic), 3 * 5 * 16]
    assert plan.flops(work, "state", steps, relays=True)[0] == 3 * (5 * 16 + 4 * 3 * traffic)


def test_a_local_step_gets_the_mask_of_its_rows() -> None:
    """A local step with some rows of a block gets the intervals and the positions of those rows."""
    mask, layout = Mask.causal(window=9), Layout.zigzag(40, 2)
    plan = get_plan(mask, layout, 0, CPU)
    for name in ("state", "kv"):
        for local_step, block in plan.block_pairs(name, plan.schedule(name, True, all_pairs=True)).items():
            sides = (
                (local_step.owner, local_step.rows, 0, range(20))
                if name == "state"
                else (0, range(20), local_step.owner, local_step.rows)
            )
            query_rank, queries, key_rank, keys = sides
            lo, hi = mask.intervals(40)
            allowed = interval_mask.dense(lo, hi, 40)[0][layout.positions(query_rank)][:, layout.positions(key_rank)]
            got = dense_mask(block)
            assert torch.equal(got, allowed[queries.start : queries.stop, keys.start : keys.stop])
            assert torch.equal(block.positions[0], layout.positions(query_rank)[queries.start : queries.stop].int())
            assert torch.equal(block.positions[1], layout.positions(key_rank)[keys.start : keys.stop].int())


def test_every_job_logs_its_choices_once(caplog: pytest.LogCaptureFixture) -> None:
    """The layers of a model, and the masks of later steps, make the same choices. The next job may have the same plan."""
    caplog.set_level("INFO")
    x = torch.empty(1, 32, 2, 8, device="meta")
    for _ in range(2):
        planning.free_plans()
        caplog.clear()
        for mask in (Mask.causal(), Mask.causal(), Mask.causal(window=5)):
            plan = get_plan(mask, Layout.zigzag(64, 2), 0, CPU)
            for work in (forward_work(x, x, x), backward_work(x, x, x)):
                plan.choose_schedule("state", work, interconnect("gloo"))
        assert [message.split(" over ")[0] for message in caplog.messages] == [
            "forward: state ring of 2 ranks",
            "backward: state ring of 2 ranks",
        ]


def test_heads_are_processed_in_chunks_if_a_call_is_long() -> None:
    """The number of chunks grows with the FLOPs of the call and divides the number of key heads."""

    def count(tenths: float, heads: int) -> int:
        q = torch.empty(1, 1, heads, 128, device="meta")
        return head_chunks_for_memory(q, q, q, tenths * HEAD_CHUNK_FLOPS / (2 * heads * 256))

    assert [count(n, 16) for n in (0.0, 1.9, 2.0, 3.9, 7.0, 1000.0)] == [1, 1, 2, 2, 4, 16]
    assert count(5.0, 6) == 3
    q, k = (torch.empty(2, 32, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (8, 4))
    plan = get_plan(Mask.full(), Layout.contiguous(64, 2), 0, CPU)
    flops = 2 * 4 * 8 * 128 * 32 * 64  # two batch entries on one of two ranks
    with pytest.MonkeyPatch.context() as patch:
        for limit, wanted in ((flops, 1), (flops / 2, 2), (flops / 3.9, 2), (flops / 4, 4), (flops / 100, 4)):
            patch.setattr(workload, "HEAD_CHUNK_FLOPS", limit)
            assert plan.head_chunks_for_memory(q, k, k) == wanted


def test_prepare_computes_everything_in_advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """After prepare, a plan answers the requests of the earlier plan without computing anything."""
    q, k, v = (torch.empty(1, 1024, 4, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    plans = []
    for documents in ([700, 1348], [100, 1900, 48]):
        mask = Mask.causal(documents=documents)
        plans.append(planning.Plan(mask, balanced_layout(mask, 2048, 2), 1, CPU))

    def request(plan: planning.Plan) -> list[torch.Tensor]:
        plan.choose_schedule("auto", forward_work(q, k, v), interconnect("nvlink"))
        forward = plan.block_pairs("kv", plan.schedule("kv", results=False, all_pairs=True)).values()
        backward = plan.block_pairs("kv", plan.schedule("kv", results=True, all_pairs=True)).values()
        tables = [block.intervals.work_tiles(128, 64, 1, 4, 1, 8) for block in forward]
        tables += [block.intervals.tiles(128, 64) for block in forward]
        return tables + [block.intervals.transposed.work_tiles(128, 64, 1, 4, 1, 8, True, 1) for block in backward]

    request(plans[0])
    plans[1].prepare(plans[0].requests())
    plans[0].prepare(plans[0].requests())
    for module, name in (
        (planning, "hop_costs"),
        (planning, "build_schedule"),
        (interval_mask.tile_scheduler, "assign_work_tiles"),
        (interval_mask.tile_scheduler, "split_into_tiles"),
    ):
        monkeypatch.setattr(module, name, None)
    monkeypatch.setattr(planning.Intervals, "of", None)
    found = request(plans[1])
    monkeypatch.undo()
    expected = request(planning.Plan(plans[1].mask, plans[1].layout, 1, CPU))
    assert len(found) == len(expected) > 4
    assert all(map(torch.equal, found, expected))


def test_work_depends_on_the_value_dim() -> None:
    """Three of the five products of the backward have the head dim, and two have the value dim."""
    q, k, v = (torch.empty(3, 4, heads, dim, device="meta") for heads, dim in ((8, 192), (2, 192), (2, 128)))
    assert backward_work(q, k, v).pair_flops == 2 * 8 * (3 * 192 + 2 * 128)


def test_a_rank_merges_only_results_of_other_ranks() -> None:
    """Results for a rank's own block do not count as merged bytes."""
    q, k = (torch.empty(2, 32, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 4))
    plan = get_plan(Mask.full(), Layout.contiguous(64, 2), 0, torch.device("cpu"))
    assert plan.merge_bytes(backward_work(q, k, k)) == 2 * 32 * 4 * 64 * (8 + 4 + 4)
