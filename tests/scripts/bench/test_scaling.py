"""Tests of the benchmark of several GPUs: rates, medians, the table and the picture. No job is run."""

from pathlib import Path

import pytest

from scripts.bench import scaling


def record(seconds: float, mfu: float = 0.4) -> dict:
    """A step of 1,000 tokens on two ranks, on a device of 1,000 TFLOP/s."""
    rates = {"tokens_per_s_per_rank": 500 / seconds, "tflops_per_rank": 1e3 * mfu, "mfu": mfu}
    return {"seconds": seconds, "peak_memory_gib": 2.0, **rates}


def test_rates_count_the_tokens_of_the_second_half():
    """A slow step counts with its full time."""
    rates = scaling.rates([record(9.0)] * 2 + [record(0.1), record(0.3, mfu=0.2)], ranks=2)
    assert rates["seconds"] == pytest.approx(0.2)
    assert rates["tokens_per_s"] == pytest.approx(2000 / 0.4)
    assert rates["mfu"] == pytest.approx((0.1 * 0.4 + 0.3 * 0.2) / 0.4)


ROWS = [
    {
        "job": job,
        "ranks": ranks,
        "seconds": 0.1,
        "tokens_per_s": speed,
        "tflops_per_rank": 1.0,
        "mfu": 0.4,
        "peak_memory_gib": 2.0,
    }
    for job, ranks, speed in (
        ("ring", 1, 100.0),
        ("ring", 2, 150.0),
        ("ring", 2, 170.0),
        ("ring", 2, 190.0),
        ("ring-long", 2, 160.0),
    )
]


def test_the_table_contains_medians_relative_to_one_gpu():
    rows = scaling.median_rows([*ROWS, {"job": "ulysses", "ranks": 2, "failed": "no memory"}])
    lines = scaling.results_table("2026-01-01", rows).splitlines()
    assert lines[2] == "| one GPU | 1 | 0.1000 | 100 | 1.00 | 40.0% | 2.0 | 2026-01-01 |"
    assert lines[3] == "| ring | 2 | 0.1000 | 170 | 1.70 | 40.0% | 2.0 | 2026-01-01 |"
    assert "| ring-long | 2 | 0.1000 | 160 | - |" in lines[4]
    assert "failed: no memory" in lines[5]


def test_the_report_contains_the_picture(tmp_path: Path):
    header = {"date": "2026-01-01", "machine": "2 GPUs", "command": "python -m scripts.bench.scaling"}
    scaling.write(tmp_path, header, ROWS)
    assert (tmp_path / "scaling.png").stat().st_size > 1000
    assert "![speed](scaling.png)" in (tmp_path / "README.md").read_text()


def test_every_job_has_a_fixed_context():
    """The default context grows with the number of ranks, so every job must set its own."""
    assert all(any("seq_len=" in text for text in settings) for settings in scaling.JOBS.values())
