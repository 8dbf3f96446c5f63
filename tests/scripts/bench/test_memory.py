"""The benchmark of memory: the command of a job, and the table of estimates and measurements."""

from scripts.bench import memory as bench_memory

DATE = "2026-11-27"


def test_case_becomes_a_command(tmp_path):
    arguments = bench_memory.job_command("1.4b 65536 2 parallel.ulysses=2", 6, tmp_path)
    assert "--nproc_per_node=2" in arguments
    assert {"model=1.4b", "data.seq_len=65536", "parallel.ulysses=2", "trainer.steps=6"} <= set(arguments)


def test_table_has_the_ratios():
    measured = {"estimated_memory_gib": 3.0, "peak_memory_gib": 4.0, "seconds_per_step": 0.1, "predicted": 0.08}
    rows = [
        {"case": "52m 32768 1"} | measured,
        {"case": "52m 32768 1 parallel.ring=1"} | measured | {"predicted": None},
        {"case": "8b 16384 2", "failed": "out of memory"},
    ]
    first, second, third = bench_memory.results_table(DATE, rows).splitlines()[2:]
    assert first == "| 52m | 32,768 | 1 |  | 3.00 | 4.00 | 0.75 | 0.08 | 0.1 | 0.80 | 2026-11-27 |"
    assert second == "| 52m | 32,768 | 1 | `parallel.ring=1` | 3.00 | 4.00 | 0.75 | - | 0.1 | - | 2026-11-27 |"
    assert third.startswith("| 8b | 16,384 | 2 |  | failed: out of memory |")
    assert third.endswith("| 2026-11-27 |")
