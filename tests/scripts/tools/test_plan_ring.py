"""The planner: bytes are the schedules' own, times follow by hand, and nothing gets faster for being slower."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn import Layout, Mask
from ringattn.layout import KINDS
from ringattn.planning.cost_model import EXCHANGE_TIMES
from ringattn.planning.rank_plan import plan
from ringattn.planning.ulysses_degree import bytes_per_row
from scripts.tools import plan_ring
from scripts.tools.plan_ring import Cluster, Layer, closed_form, exchange, planned, predict, with_ulysses

SLOW = Cluster(
    1e12, 1e12, nvlink=1e9, nvlink_latency=1e-4, node=4, network=1e8, forward_launch=1e-4, backward_launch=1e-4, forward_ends=0
)
SLOW = replace(SLOW, backward_ends=0, forward_sums=math.inf, backward_sums=math.inf)
MASKS = (("causal", None), ("full", None), ("causal", 100), ("full", 100))
REFUSED = {
    "--heads 32 --kv-heads 5": "5 key heads must divide the 32 query heads",
    "--heads 4 --kv-heads 0": "kv_heads = 0: must be at least 1",
    "--batch 0": "batch = 0: must be at least 1",
    "--ranks 0": "ranks = 0: must be at least 1",
    "--window 0": "window = 0: must be at least 1",
    "--length 3 --ranks 8": "3 tokens are too few for 8 ranks",
    "--ulysses 3 --ranks 4": "--ulysses 3 must divide the 4 ranks and the 32 heads",
    "--ulysses 0": "ulysses = 0: must be at least 1",
    "--ulysses x": "--ulysses x: give a number of ranks, or 'auto'",
    "--forward-tflops 0": "forward_flops = 0: must be above 0",
    "--network-gbs nan": "network = nan: must be above 0",
    "--nvlink-us -1": "nvlink_latency = -1e-06: must be at least 0",
    "--node 0": "node = 0: must be above 0",
    "--layout spiral": "invalid choice: 'spiral'",
    "--measured /nope.json": "No such file or directory: '/nope.json'",
    "--plot x.png --measured rows.json": "give one of them",
}


@pytest.mark.parametrize("name", ("kv", "state"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask, window", MASKS)
@pytest.mark.parametrize("ranks", (2, 3, 8))
def test_bytes_are_those_of_the_schedules(ranks: int, mask: str, window: int | None, kind: str, name: str) -> None:
    """Of its busiest rank, relayed and direct; by hand under a full mask."""
    layer = Layer(1024, 8, 2, 64, ranks, batch=2, mask=mask, window=window, layout=kind)
    own = plan(Mask(mask == "causal", window), Layout(kind, 1024, ranks), 0, torch.device("cpu"))
    for node in (1, 8):
        for work in layer.works():
            fabric = Cluster(node=node).fabric(ranks, 1e12)
            traveller, result = getattr(work.row_bytes, name)
            sent = own.schedule(name, result > 0, fabric.all_pairs).bytes_sent(traveller, result)
            assert planned(layer, name, work, fabric).bytes == 2 * max(sent)
            if mask == "full" and window is None and 1024 % ranks == 0:
                assert max(sent) == (ranks - 1) * (1024 // ranks) * (traveller + result)


@pytest.mark.parametrize("name", ("kv", "state"))
@pytest.mark.parametrize(
    "kind, mask, window",
    (
        *(("zigzag", "causal", None), ("striped", "causal", None), ("contiguous", "full", None)),
        *(("striped", "causal", 100), ("contiguous", "causal", 100)),
    ),
)
def test_the_closed_form_takes_over_without_a_jump(kind: str, mask: str, window: int | None, name: str) -> None:
    """Where a ring is relayed. The closed form knows no row that some hop could leave out: never less, and little more."""
    for ranks in (4, 16):
        layer = Layer(2048, 8, 2, 64, ranks, mask=mask, window=window, layout=kind)
        for work in layer.works():
            fabric = Cluster(node=1).fabric(ranks, 5e14)
            exact, closed = (steps(layer, name, work, fabric) for steps in (planned, closed_form))
            assert closed.compute == pytest.approx(exact.compute, rel=0.01 if window is None else 0.25)
            assert exact.bytes <= closed.bytes <= 1.1 * exact.bytes
            assert closed.seconds == pytest.approx(exact.seconds, rel=0.01)


@pytest.mark.parametrize("steps", (planned, closed_form))
def test_by_hand(steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 ranks, 4,096 tokens, one head of 128, full mask, keys travel, 1 TFLOP/s, 1 GB/s, 0.1 ms a message.

    A block is 1,024 x 1,024 pairs of 512 FLOPs: 0.537 ms. A hop is 1,024 rows of 512 bytes: 0.624 ms. Three hops, then a block.
    """
    monkeypatch.setattr(plan_ring, "EXACT_RANKS", 16 if steps is planned else 0)
    layer = Layer(4096, 1, 1, 128, 4, mask="full", schedule="kv")
    forward, backward = predict(layer, SLOW)
    assert forward.compute == pytest.approx(4 * 0.536871e-3, rel=1e-5)
    assert forward.seconds == pytest.approx(3 * 0.624288e-3 + 0.536871e-3, rel=1e-5)
    assert forward.exposed == pytest.approx(3 * (0.624288 - 0.536871) * 1e-3, rel=1e-4)
    assert forward.bytes == 3 * 1024 * 512
    # five products for two, and dk and dv in fp32 travel behind k and v, for one hop longer
    assert backward.compute == pytest.approx(2.5 * forward.compute)
    assert backward.bytes == 3 * 1024 * 1536


@pytest.mark.parametrize("steps", (planned, closed_form))
def test_a_late_host(steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above: four steps, 2.41 ms. A host that takes 0.6 ms for each is on time, one that takes 2 ms is not."""
    monkeypatch.setattr(plan_ring, "EXACT_RANKS", 16 if steps is planned else 0)
    layer = Layer(4096, 1, 1, 128, 4, mask="full", schedule="kv")
    prompt, late = (predict(layer, replace(SLOW, forward_launch=launch))[0] for launch in (0.6e-3, 2e-3))
    assert prompt == predict(layer, SLOW)[0]
    assert late.seconds == pytest.approx(8e-3) and late.compute == prompt.compute
    ended = predict(layer, replace(SLOW, forward_ends=1e-4))[0]
    assert ended.compute == pytest.approx(prompt.compute + 4e-4) and ended.exposed == pytest.approx(prompt.exposed)
    # m, l and the output, 130 numbers of 4 bytes a row, three times
    summed = predict(layer, replace(SLOW, forward_sums=1e9))[0]
    assert summed.compute == pytest.approx(prompt.compute + 3 * 1024 * 520e-9)
    assert summed.exposed == pytest.approx(prompt.exposed)


def test_exchange_by_hand() -> None:
    """Half of 2 GPUs' heads cross in one part: the bytes of `bytes_per_row`, and two latencies a direction."""
    layer = Layer(4096, 4, 4, 128, 2, ulysses=2)
    cost = exchange(layer, SLOW, attention=1.0)
    assert layer.parts == 1 and 2 * cost.bytes == 2048 * bytes_per_row(2, 1, 4, 4, 128, 128)
    assert cost.compute == 0 and cost.seconds == cost.exposed == pytest.approx(EXCHANGE_TIMES * cost.bytes / 1e9 + 2e-4)
    across = exchange(replace(layer, ranks=16, ulysses=4, heads=16), replace(SLOW, node=2), attention=1.0)
    to_each = 256 * (2 * 16 + 2 * 4) * 128 * 2 / 4
    assert across.seconds == pytest.approx(2 * (to_each / 1e8 + 2 * SLOW.network_latency))


def test_all_but_one_part_hide_behind_attention() -> None:
    """Four parts: a quarter of the time is left, unless attention is shorter."""
    layer = Layer(65536, 16, 16, 128, 4, ulysses=4)
    assert layer.parts == 4
    hidden, late = (exchange(layer, Cluster(nvlink_latency=0), attention) for attention in (1.0, 0.0))
    assert late.seconds == pytest.approx(4 * hidden.seconds) and late.bytes == hidden.bytes
    assert hidden.seconds == pytest.approx(EXCHANGE_TIMES * hidden.bytes / 4 / Cluster().nvlink)
    alone, exchanged = (predict(x, Cluster())[0] for x in (replace(layer, ranks=1, ulysses=1, heads=4, kv_heads=4), layer))
    assert exchanged.compute == pytest.approx(alone.compute + 3 * Cluster().forward_ends)


def test_measured_runs_are_predicted() -> None:
    rows = json.loads((Path(__file__).parents[3] / "benchmarks" / "2026-11-22-ring" / "measured.json").read_text())
    assert {row.get("ulysses", 1) for row in rows} == {1, 4}
    for row in rows:
        shape = (row[name] for name in ("seq_len", "heads", "kv_heads", "dim", "ranks"))
        forward, backward = predict(Layer(*shape, row.get("ulysses", 1)), Cluster())
        assert row["forward_ms"] == pytest.approx(1e3 * forward.seconds, rel=0.1)
        assert row["forward_backward_ms"] == pytest.approx(1e3 * (forward + backward).seconds, rel=0.1)


def test_auto_is_the_forecast_of_the_cluster() -> None:
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
@settings(max_examples=25)
def test_monotone(ranks: int, ulysses: int, kind: str, mask: tuple[str, int | None], schedule: str) -> None:
    """More work takes no less time, and slower clusters take no less."""
    layer = Layer(8192, 8, 4, 64, ranks, ulysses, mask=mask[0], window=mask[1], layout=kind, schedule=schedule)
    cluster = Cluster()
    seconds = sum(cost.seconds for cost in predict(layer, cluster))
    assert all(cost.seconds >= cost.compute > 0 for cost in predict(layer, cluster))

    def takes(layer: Layer = layer, **changes) -> float:
        return sum(cost.seconds for cost in predict(layer, replace(cluster, **changes)))

    if layer.window is None:  # which may span fewer of longer shards
        assert takes(replace(layer, seq_len=2 * layer.seq_len)) >= seconds
    assert takes(replace(layer, batch=2)) >= seconds
    assert takes(forward_flops=cluster.forward_flops / 2) >= seconds
    assert takes(nvlink=cluster.nvlink / 4, network=cluster.network / 4) >= seconds
    assert takes(network_latency=1e-3, nvlink_latency=1e-3) >= seconds
    assert takes(forward_launch=1e-3, backward_launch=3e-3) >= seconds


@given(st.integers(1, 60), st.none() | st.integers(1, 70), st.booleans())
def test_pairs(seq_len: int, window: int | None, is_causal: bool) -> None:
    layer = Layer(seq_len, 1, 1, 8, 1, mask="causal" if is_causal else "full", window=window)
    lo, hi = Mask(is_causal, window).intervals(seq_len)
    for queries in range(seq_len + 1):
        assert layer.pairs(queries) == int((hi.clamp(max=seq_len) - lo)[0, :queries].sum())


def test_the_table(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    plan_ring.main(["--length", "65536", "--ranks", "2", "16", "4096", "--ulysses", "auto", "--plot", str(tmp_path / "x.png")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["2", "16", "4,096"]
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_measured_rows_are_compared(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    forward, backward = predict(Layer(8192, 8, 2, 64, 4, ulysses=2), Cluster())
    row = dict(ranks=4, ulysses=2, seq_len=8192, heads=8, kv_heads=2, dim=64)
    times = dict(forward_ms=2e3 * forward.seconds, forward_backward_ms=500 * (forward.seconds + backward.seconds))
    (tmp_path / "rows.json").write_text(json.dumps([row | times]))
    plan_ring.main(["--measured", str(tmp_path / "rows.json")])
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].split("|")]
    assert (cells[1], cells[6], cells[9]) == ("2 x 2", "2.00", "0.50")


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_is_refused(arguments: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        plan_ring.main(arguments.split())
    told = capsys.readouterr()
    assert ended.value.code == 2 and not told.out
    assert REFUSED[arguments] in told.err.splitlines()[-1]


@pytest.mark.parametrize("text", ("{", "3", '{"ranks": 4}', "[4]", '[{"ranks": 4}]'))
def test_what_was_not_measured_is_refused(text: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(SystemExit):
        plan_ring.main(["--measured", str(tmp_path / "rows.json")])
    assert "rows.json is no JSON list of objects with the numbers seq_len," in capsys.readouterr().err
