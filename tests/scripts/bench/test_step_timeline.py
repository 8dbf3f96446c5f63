"""Tests of the picture of one training step."""

import gzip
import json
from pathlib import Path

import pytest

from scripts.bench import step_timeline


def event(name: str, category: str, start: float, duration: float, thread: int = 1) -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": 1000 + start, "dur": duration, "tid": thread}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A step of 10 ms. The GPU works for 4 ms, in two kernels that overlap and one that follows later."""
    events = [
        event("step 7", "user_annotation", 0, 10_000),
        event("Attention", "cpu_op", 1000, 2000),
        event("aten::empty", "cpu_op", 1500, 100),
        event("aten::empty", "cpu_op", 4000, 500, thread=2),
        event("kernel", "kernel", 2000, 2000, thread=9),
        event("copy", "gpu_memcpy", 3000, 2000, thread=9),
        event("kernel", "kernel", 6000, 1000, thread=9),
        event("kernel", "kernel", 11_000, 1000, thread=9),
    ]
    path = tmp_path / "profiled" / "profile" / "trace.json.gz"
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)
    return path


def test_a_step_consists_of_the_outermost_operations_and_the_work_of_the_gpu(trace: Path):
    length, host, gpu = step_timeline.read_step(trace, 7)
    assert (length, host, gpu) == (10.0, [(1.0, 3.0, "Attention")], [(2.0, 5.0), (6.0, 7.0)])
    assert step_timeline.busy_share(length, gpu) == pytest.approx(0.4)


def test_the_picture_and_the_shares_are_written(trace: Path, capsys: pytest.CaptureFixture):
    output = trace.parent / "timeline.png"
    arguments = [str(trace), str(trace), "--steps=7", f"--output={output}"]
    assert step_timeline.main([*arguments, "--labels", "before", "after"]) == 0
    assert "before: 10.0 ms, GPU busy for 40.0%" in capsys.readouterr().out
    assert output.stat().st_size > 1000


def test_a_missing_step_is_an_error(trace: Path):
    with pytest.raises(SystemExit, match="contains no step 8"):
        step_timeline.main([str(trace), "--steps=8"])


@pytest.mark.parametrize("option", ["labels", "steps"])
def test_every_trace_needs_a_label_and_a_step(trace: Path, option: str):
    with pytest.raises(SystemExit, match=f"--{option} has 2 values for 3 traces"):
        step_timeline.main([*[str(trace)] * 3, "--steps=7", f"--{option}", "7", "7"])
