"""The planner: bytes equal the schedules', times are computed by hand, and more work or slower hardware takes no less time."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import Layout, Mask
from ringattn.layout import KINDS
from ringattn.planning.cost_model import ALL_TO_ALL_FACTOR
from ringattn.planning.rank_plan import get_plan
from ringattn.planning.ulysses_degree import bytes_per_row
from scripts.bench.cases import Case
from scripts.tools import plan_ring
from scripts.tools.plan_ring import Cluster, Layer, all_to_all, bytes_sent, predict, ring_pass, with_ulysses

# 1 TFLOP/s, 1 GB/s and 0.1 ms per message, and nothing else takes time except launches of at most 0.1 ms.
SLOW = Cluster(
    forward_flops=1e12,
    backward_flops=1e12,
    forward_merge=math.inf,
    backward_merge=math.inf,
    nvlink=1e9,
    nvlink_latency=1e-4,
    node=4,
    network=1e8,
    forward_launch=1e-4,
    backward_launch=1e-4,
    forward_overhead=0,
    backward_overhead=0,
)
MASKS = (("causal", None), ("full", None), ("causal", 100), ("full", 100))
# Measured on two and four H200s on 2026-11-22: (tokens, query heads, key heads, ranks, Ulysses degree, ms of a forward, ms of a
# forward and backward); causal, zigzag, head dim 128.
MEASURED = (
    (16384, 16, 16, 4, 1, 1.005, 3.333),
    (65536, 16, 16, 4, 1, 7.366, 27.732),
    (262144, 16, 16, 4, 1, 108.83, 419.473),
    (1048576, 16, 16, 4, 1, 1785.4, 6663.6),
    (65536, 32, 8, 4, 1, 14.516, 55.153),
    (16384, 32, 8, 4, 1, 1.034, 4.082),
    (16384, 16, 16, 2, 1, 0.966, 3.871),
    (65536, 16, 16, 2, 1, 13.601, 52.637),
    (262144, 16, 16, 2, 1, 210.202, 799.62),
    (65536, 16, 16, 4, 4, 7.375, 26.727),
    (262144, 16, 16, 4, 4, 108.9, 409.1),
    (65536, 32, 8, 4, 4, 13.572, 53.15),
)
INVALID = {
    "--heads 32 --kv-heads 5": "5 key heads: the number must divide the 32 query heads",
    "--heads 4 --kv-heads 0": "kv_heads = 0: must be at least 1",
    "--batch 0": "batch = 0: must be at least 1",
    f"--batch {10**12}": "batch = 1000000000000: must be at least 1 and below 2**31",
    f"--dim {10**30}": f"dim = {10**30}: must be at least 1 and below 2**31",
    "--ranks 0": "ranks = 0: must be at least 1",
    "--window 0": "window = 0: must be at least 1",
    "--length 3 --ranks 8": "3 tokens are too few for 8 ranks",
    "--ulysses 3 --ranks 4": "--ulysses 3: must divide the 4 ranks and the 32 heads",
    "--ulysses 0": "ulysses = 0: must be at least 1",
    "--ulysses x": "--ulysses x: must be a number of ranks or 'auto'",
    "--forward-tflops 0": "forward_flops = 0: must be above 0",
    "--network-gbs nan": "network = nan: must be above 0",
    "--nvlink-us -1": "nvlink_latency = -1e-06: must be at least 0",
    "--node 0": "node = 0: must be above 0",
    "--layout spiral": "invalid choice: 'spiral'",
    "--measured /nope.json": "No such file or directory: '/nope.json'",
    "--plot x.png --measured ring.json": "--plot and --measured cannot be combined",
    "--kv-heads 4 --measured ring.json": "--kv-heads and --measured cannot be combined",
}


@pytest.mark.parametrize("name", ["kv", "state"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mask", "window"), MASKS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_are_those_of_the_schedule(ranks: int, mask: str, window: int | None, kind: str, name: str) -> None:
    """The bytes of the busiest rank, with and without relaying. For a full mask, they are also computed by hand."""
    if kind == "contiguous" and mask == "causal" and window:
        ranks = 2  # Longer rings with these settings are planned as shorter ones.
    layer = Layer(1024, 8, 2, 64, ranks, batch=2, mask=mask, window=window, layout=kind, schedule=name)
    plan = get_plan(Mask(mask == "causal", window), Layout(kind, 1024, ranks), 0, torch.device("cpu"))
    chunks, works = layer.memory_chunks_and_work()
    assert chunks == 1
    for node in (1, 8):
        for work in works:
            all_pairs = Cluster(node=node).ring_interconnect(ranks, 1e12).all_pairs
            block, result = getattr(work.row_bytes, name)
            sent = bytes_sent(plan.schedule(name, result > 0, all_pairs), block, result)
            assert ring_pass(layer, work, Cluster(node=node)).bytes == 2 * max(sent)
            if mask == "full" and window is None and 1024 % ranks == 0:
                assert max(sent) == (ranks - 1) * (1024 // ranks) * (block + result)


@pytest.mark.parametrize("name", ["kv", "state"])
@pytest.mark.parametrize(
    ("kind", "mask", "window"),
    [("zigzag", "causal", None), ("striped", "causal", None), ("contiguous", "full", None), ("striped", "causal", 100)],
)
def test_groups_of_ranks_cost_about_as_much_as_the_ranks(
    kind: str, mask: str, window: int | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer(4096, 8, 2, 64, 64, mask=mask, window=window, layout=kind, schedule=name)
    exact = predict(layer, SLOW)
    monkeypatch.setattr(plan_ring, "MAX_PLANNED_RANKS", 16)
    for grouped, cost in zip(predict(layer, SLOW), exact, strict=True):
        assert grouped.seconds == pytest.approx(cost.seconds, rel=0.05)
        assert grouped.bytes == pytest.approx(cost.bytes, rel=0.08)


def test_ring_is_no_longer_than_the_window() -> None:
    """With a window of three shards, ranks that are farther away never communicate."""
    layer = Layer(65536, 8, 2, 64, 32, window=3 * 2048, layout="contiguous", schedule="kv")
    plan, scale, group = plan_ring.planned_ring(layer)
    assert (plan.layout.ranks, plan.layout.seq_len, scale, group) == (5, 5 * 2048, 1.0, 1.0)
    assert predict(layer, SLOW) == predict(replace(layer, seq_len=2 * 65536, ranks=64), SLOW)


def test_times_computed_by_hand() -> None:
    """4 ranks, 4,096 tokens, one head of 128, full mask, KV ring.

    A block has 1,024 x 1,024 pairs of 512 FLOPs, which take 0.537 ms. A hop has 1,024 rows of 512 bytes, which take 0.624 ms.
    There are three hops, and the last block is computed after them.
    """
    layer = Layer(4096, 1, 1, 128, 4, mask="full", schedule="kv")
    forward, backward = predict(layer, SLOW)
    assert forward.compute == pytest.approx(4 * 0.536871e-3, rel=1e-5)
    assert forward.seconds == pytest.approx(3 * 0.624288e-3 + 0.536871e-3, rel=1e-5)
    assert forward.exposed == pytest.approx(3 * (0.624288 - 0.536871) * 1e-3, rel=1e-4)
    assert forward.bytes == 3 * 1024 * 512
    # The backward has five matrix products instead of two. dk and dv in fp32 follow k and v, and take one hop more.
    assert backward.compute == pytest.approx(2.5 * forward.compute)
    assert backward.bytes == 3 * 1024 * 1536


def test_slow_host_delays_the_ring() -> None:
    """The same layer has four steps that take 2.41 ms. A host that takes 0.6 ms per step keeps up, but 2 ms are too much."""
    layer = Layer(4096, 1, 1, 128, 4, mask="full", schedule="kv")
    fast, slow = (predict(layer, replace(SLOW, forward_launch=launch))[0] for launch in (0.6e-3, 2e-3))
    assert fast == predict(layer, SLOW)[0]
    assert slow.seconds == pytest.approx(8e-3)
    assert slow.compute == fast.compute
    overhead = predict(layer, replace(SLOW, forward_overhead=1e-4))[0]
    assert overhead.compute == pytest.approx(fast.compute + 4e-4)
    assert overhead.exposed == pytest.approx(fast.exposed)
    # Three states of m, l and o are merged: 130 numbers of 4 bytes per row.
    merging = predict(layer, replace(SLOW, forward_merge=1e9))[0]
    assert merging.compute == pytest.approx(fast.compute + 3 * 1024 * 520e-9)
    assert merging.exposed == pytest.approx(fast.exposed)


def test_all_to_all_by_hand() -> None:
    """Each of 2 GPUs sends half of its heads in one chunk: the bytes of `bytes_per_row`, and two latencies per direction."""
    layer = Layer(4096, 4, 4, 128, 2, ulysses=2)
    cost = all_to_all(layer, SLOW, attention=1.0)
    x = torch.empty(1, 1, 4, 128, dtype=torch.bfloat16, device="meta")
    assert layer.overlap_chunks == 1
    assert 2 * cost.bytes == 2048 * bytes_per_row(x, x, x, ulysses=2, ring=1)
    assert cost.compute == 0
    assert cost.seconds == cost.exposed == pytest.approx(ALL_TO_ALL_FACTOR * cost.bytes / 1e9 + 2e-4)
    across = all_to_all(replace(layer, ranks=16, ulysses=4, heads=16), replace(SLOW, node=2), attention=1.0)
    to_each = 256 * (2 * 16 + 2 * 4) * 128 * 2 / 4
    assert across.seconds == pytest.approx(2 * (to_each / 1e8 + 2 * SLOW.network_latency))


def test_attention_hides_all_chunks_but_one() -> None:
    """With four chunks, a quarter of the time is exposed, unless attention is shorter than the all-to-all."""
    layer = Layer(65536, 16, 16, 128, 4, ulysses=4)
    assert layer.overlap_chunks == 4
    hidden, exposed = (all_to_all(layer, Cluster(nvlink_latency=0), attention) for attention in (1.0, 0.0))
    assert exposed.seconds == pytest.approx(4 * hidden.seconds)
    assert exposed.bytes == hidden.bytes
    assert hidden.seconds == pytest.approx(ALL_TO_ALL_FACTOR * hidden.bytes / 4 / Cluster().nvlink)
    local = predict(replace(layer, ranks=1, ulysses=1, heads=4, kv_heads=4), Cluster())[0]
    assert predict(layer, Cluster())[0].compute == pytest.approx(local.compute + 3 * Cluster().forward_overhead, rel=1e-4)


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row[0]}-{row[1]}x{row[2]}-{row[3]}ranks-ulysses{row[4]}")
def test_prediction_is_within_10_percent_of_measured_times(row: tuple) -> None:
    seq_len, heads, kv_heads, ranks, ulysses, forward_ms, both_ms = row
    forward, backward = predict(Layer(seq_len, heads, kv_heads, 128, ranks, ulysses), Cluster())
    assert forward_ms == pytest.approx(1e3 * forward.seconds, rel=0.1)
    assert both_ms == pytest.approx(1e3 * (forward + backward).seconds, rel=0.1)


def test_automatic_ulysses_degree_is_the_best_one_of_the_cluster() -> None:
    layer = Layer(65536, 16, 16, 128, 16)
    assert with_ulysses(layer, "auto", Cluster()) == replace(layer, ulysses=8)
    longer = replace(layer, seq_len=262144)
    assert with_ulysses(longer, "auto", Cluster(node=4)) == replace(longer, ulysses=4)
    assert with_ulysses(replace(layer, ranks=8), "4", Cluster()) == replace(layer, ranks=8, ulysses=4)


@given(
    st.sampled_from((2, 4, 8, 64, 4096)),
    st.sampled_from((1, 2)),
    st.sampled_from(KINDS),
    st.sampled_from(MASKS),
    st.sampled_from(("auto", "kv", "state")),
)
@settings(max_examples=20, deadline=None)
def test_more_work_or_slower_hardware_takes_no_less_time(
    ranks: int, ulysses: int, kind: str, mask: tuple[str, int | None], schedule: str
) -> None:
    layer = Layer(8192, 8, 4, 64, ranks, ulysses, mask=mask[0], window=mask[1], layout=kind, schedule=schedule)
    cluster = Cluster()

    def costs_of(layer: Layer = layer, **changes) -> tuple[plan_ring.Cost, plan_ring.Cost]:
        with patch.object(plan_ring, "MAX_PLANNED_RANKS", 8):
            return predict(layer, replace(cluster, **changes))

    def seconds(layer: Layer = layer, **changes) -> float:
        return sum(cost.seconds for cost in costs_of(layer, **changes))

    # "auto" chooses among schedules whose times are within 1%.
    least = 0.99 * seconds()
    assert all(cost.seconds >= cost.compute > 0 for cost in costs_of())
    if layer.window is None:  # A window may span fewer shards if they are longer.
        assert seconds(replace(layer, seq_len=2 * layer.seq_len)) >= least
    assert seconds(replace(layer, batch=2)) >= least
    assert seconds(forward_flops=cluster.forward_flops / 2) >= least
    assert seconds(nvlink=cluster.nvlink / 4, network=cluster.network / 4) >= least
    assert seconds(network_latency=1e-3, nvlink_latency=1e-3) >= least
    assert seconds(forward_launch=1e-3, backward_launch=3e-3) >= least


def test_table_has_one_row_per_number_of_ranks(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    plan_ring.main(["--length", "65536", "--ranks", "2", "16", "4096", "--ulysses", "auto", "--plot", str(tmp_path / "x.png")])
    lines = capsys.readouterr().out.splitlines()
    assert [text.split("|")[1].strip() for text in lines[2:]] == ["2", "16", "4,096"]
    assert all(text.count("|") == lines[0].count("|") for text in lines)
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_measured_rows_are_compared_with_the_prediction(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """Calls without a prediction are left out: without communication, in a CUDA graph, over NCCL, and with documents."""

    def times(layer: Layer) -> dict:
        forward, backward = (1e3 * cost.seconds for cost in predict(layer, Cluster()))
        return {"forward": {"ms": 2 * forward}, "both": {"ms": 0.5 * (forward + backward)}}

    hybrid, ring = Layer(8192, 8, 2, 64, 4, ulysses=2), Layer(8192, 8, 2, 64, 4, schedule="state", window=1024)
    others = dict.fromkeys(("local", "nvlink-auto-graph", "p2p-auto", "ulysses-2-local", "context_parallel"), times(ring))
    cases = {
        "hybrid": {"ulysses-2": times(hybrid), "nvlink-kv": {"errors": {"out": 1.0}}, **others},
        "ring": {"nvlink-state": times(ring), **others},
        "documents-8k": {"nvlink-auto": times(ring)},
    }
    kinds = zip(("causal", "window", "documents"), (None, 1024, None), strict=True)
    problems = [asdict(Case(kind, 8192, 8, 64, key_heads=2, window_size=size)) for kind, size in kinds]
    rows = {name: {"case": problem, **found} for (name, found), problem in zip(cases.items(), problems, strict=True)}
    (tmp_path / "ring.json").write_text(json.dumps({"ranks": 4, "rows": rows}))
    plan_ring.main(["--measured", str(tmp_path / "ring.json")])
    cells = [[cell.strip() for cell in text.split("|")] for text in capsys.readouterr().out.splitlines()[2:]]
    assert [(row[1], row[4], row[7]) for row in cells] == [
        ("hybrid, ulysses-2", "2.00", "0.50"),
        ("ring, nvlink-state", "2.00", "0.50"),
    ]


@pytest.mark.parametrize("arguments", INVALID)
def test_invalid_arguments_are_rejected(arguments: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exited:
        plan_ring.main(arguments.split())
    printed = capsys.readouterr()
    assert exited.value.code == 2
    assert not printed.out
    assert INVALID[arguments] in printed.err.splitlines()[-1]


NO_CALLS = json.dumps({"ranks": 2, "rows": {"x": {"case": asdict(Case("causal", 8192, 8, 64)), "local": {"both": {"ms": 1}}}}})


@pytest.mark.parametrize("text", ["{", "3", "[4]", '{"ranks": 4}', '{"ranks": 4, "rows": {"x": {}}}', NO_CALLS])
def test_file_without_measured_calls_is_rejected(text: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "ring.json").write_text(text)
    with pytest.raises(SystemExit):
        plan_ring.main(["--measured", str(tmp_path / "ring.json")])
    assert "ring.json must be a file ring.json of scripts.bench.ring" in capsys.readouterr().err
