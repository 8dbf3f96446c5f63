"""Tests of the times of a start."""

import pytest

from ringattn.train.reports import startup


@pytest.fixture
def clock(monkeypatch) -> dict[str, float]:
    """The time, and the seconds that torch.compile has taken so far. The process was launched at 100."""
    clock = {"now": 100.0, "compiled": 0.0}
    monkeypatch.setattr(startup.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(startup, "calculate_time_spent", lambda: {"total_wall_time": clock["compiled"]})
    for name, value in {"_parts": {}, "_latest": 100.0, "_num_jobs": 0, "_compiled_before": 0.0}.items():
        monkeypatch.setattr(startup, name, value)
    return clock


def test_first_job_begins_with_the_launch(clock):
    clock["now"] = 106.5
    startup.end_part("imports")
    startup.begin_job()
    clock |= {"now": 110.0, "compiled": 2.0}
    startup.end_part("first step")
    assert startup.seconds() == {"imports": 6.5, "first step": 3.5, "torch.compile": 2.0}
    assert startup.describe() == "10.0 s: imports 6.5, first step 3.5, of which torch.compile 2.0"


def test_later_jobs_of_a_sweep_begin_by_themselves(clock):
    startup.begin_job()
    startup.end_part("data")
    clock |= {"now": 500.0, "compiled": 7.0}
    startup.begin_job()
    clock["now"] = 501.0
    startup.end_part("first step")
    assert startup.seconds() == {"first step": 1.0}
    assert startup.describe() == "1.0 s: first step 1.0"
