"""Tests of the command that traces the softmax state of one query."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ringattn import Layout, Mask, ring_attention, simulate
from scripts.labs import trace
from scripts.labs.trace import Problem, trace_ring, trace_tiles

ROW = Problem.of_scores([1, 3, 2, 5])
LONG = Problem.of_scores([0.5, -2, 3, 3, 1, -1, 4, 0, 2.5, -0.5, 1.5])


def test_a_row_of_four_scores_on_one_rank() -> None:
    """The states after both tiles are those of docs/maths.md."""
    first, second = trace_tiles(ROW, 2).events
    assert (first.m, second.m) == (3, 5)
    assert first.alpha == (0,)
    assert second.alpha == pytest.approx((math.exp(3 - 5),), rel=1e-14)
    assert (first.l, second.l) == pytest.approx((1 + math.exp(-2), sum(math.exp(s - 5) for s in (1, 3, 2, 5))), rel=1e-14)
    assert first.o == pytest.approx((2 + math.exp(-2),), rel=1e-14)


def test_a_row_of_four_scores_on_two_ranks() -> None:
    """The query's states are merged on its owner, after one hop to the other rank and one hop back."""
    events = trace_ring(ROW, 2, 2).events
    assert [(event.hop, event.rank, list(event.tile)) for event in events] == [(0, 0, [0, 1]), (1, 1, [2, 3]), (2, 0, [])]
    assert events[2].alpha == pytest.approx((math.exp(-2), 1), rel=1e-14)
    assert events[1].l == pytest.approx(1 + math.exp(-3), rel=1e-14)
    assert events[2].l == pytest.approx(trace_tiles(ROW, 2).events[-1].l, rel=1e-14)


def test_the_five_tokens() -> None:
    """The second tile raises the maximum of "on" from 0.5 to 1, so the old sums are multiplied by exp(-0.5) = 0.6065."""
    problem = Problem.five_tokens()
    events = trace_tiles(problem, 2).events
    assert events[1].alpha[0] == pytest.approx(0.6065, abs=5e-5)
    assert (events[-1].m, events[-1].l) == pytest.approx((1, 3.1875), abs=5e-5)
    assert trace_ring(problem, 2, 2).out == pytest.approx((0.2854, 0.2854, 0.2106, 0.4089), abs=5e-5)
    assert 0.6065 in [round(alpha, 4) for event in trace_ring(problem, 2, 2).events for alpha in event.alpha]


@pytest.mark.parametrize("problem", [ROW, LONG, Problem.five_tokens()], ids=("row", "long", "five-tokens"))
@pytest.mark.parametrize("tile", [1, 2, 3, 100])
def test_every_state_is_the_state_of_its_keys(problem: Problem, tile: int) -> None:
    """On every ring, each event has the state of exactly the keys that it names. Each event occurs once."""
    scores = problem.scores
    for ranks in range(1, min(len(scores), 5) + 1):
        found = trace_ring(problem, tile, ranks)
        for event in found.events:
            seen = list(event.seen)
            p = torch.exp(scores[seen] - event.m)
            assert event.m == scores[seen].max()
            assert event.l == pytest.approx(p.sum().item(), rel=1e-13)
            assert event.o == pytest.approx((p @ problem.v[seen]).tolist(), rel=1e-13)
        assert sorted(i for event in found.events for i in event.tile) == list(range(len(scores)))
        assert sum(not event.tile for event in found.events) == ranks - 1
        assert found.events[-1].seen == tuple(range(len(scores)))
        assert found.out == pytest.approx(problem.direct().tolist(), rel=1e-13)
        assert found.lse == pytest.approx(torch.logsumexp(scores, 0).item(), rel=1e-13)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_result_is_that_of_ring_attention(ranks: int) -> None:
    """The observed ring computes the same numbers as the public call."""
    problem = Problem.five_tokens()
    layout = Layout.contiguous(5, ranks)

    def attend(rank: int, group) -> torch.Tensor:
        q, k, v = (layout.shard(x[None, :, None], rank) for x in problem[:3])
        options = {"layout": layout, "mask": Mask.full(), "scale": problem.scale, "schedule": "state", "group": group}
        return ring_attention(q, k, v, **options)

    out = layout.unshard(simulate(ranks, attend))[0, problem.position, 0]
    assert trace_ring(problem, 2, ranks).out == pytest.approx(out.tolist(), rel=1e-14)


def test_the_command_prints_both_tables_and_draws_the_picture(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    trace.main(["--tile", "2", "--ranks", "3", "--output", str(tmp_path / "x.png")])
    text = capsys.readouterr().out
    assert text.count("| hop | rank |") == 2
    assert "| 0.6065 |" in text
    assert "1 and 0.6065" in text
    assert (tmp_path / "x.png").stat().st_size > 5_000


INVALID = {
    "no-scores": (["--scores"], "0 scores"),
    "too-many-scores": (["--scores", *["1"] * 65], "65 scores"),
    "text": (["--scores", "1", "x"], "'x'"),
    "infinite": (["--scores", "1", "inf"], "infinite"),
    "values-without-scores": (["--values", "1"], "--values"),
    "too-few-values": (["--scores", "1", "2", "--values", "1"], "1 values"),
    "tile-of-zero": (["--tile", "0"], "tile=0"),
    "no-ranks": (["--ranks", "0"], "ranks=0"),
    "more-ranks-than-tokens": (["--scores", "1", "2", "--ranks", "3"], "ranks=3"),
    "folder-is-missing": (["--output", "/nope/x.png"], "/nope/x.png"),
    "unknown-format": (["--output", "x.nope"], "x.nope"),
}


@pytest.mark.parametrize(("arguments", "named"), INVALID.values(), ids=INVALID)
def test_an_error_is_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as exited:
        trace.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert exited.value.code == 2
    assert line.startswith("error: ")
    assert named in line


@pytest.mark.slow
def test_the_module_runs_without_warnings_and_imports_matplotlib_only_to_draw() -> None:
    """`python -m scripts.labs.trace --help` is the first thing that a learner runs."""
    command = [sys.executable, "-W", "error", "-m", "scripts.labs.trace", "--help"]
    assert "--scores 1 3 2 5" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout
    code = "import sys, scripts.labs.trace; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0
