"""The report of the kernel benchmark: tables that are checked by hand, and a report that is written again from its rows."""

import json

import pytest

from scripts.bench import kernels_report
from scripts.bench.cases import Case

HEADER = {"date": "2026-11-24", "machine": "a GPU", "command": "python -m scripts.bench.kernels", "rounds": 3}
CASES = [Case("causal", length, 16, 128) for length in (1024, 2048)]


def direction(ms: float) -> dict:
    return {"status": "ok", "errors": {"out": 1e-3}, "extra_bytes": 2**20, "ms": ms, "tflops": 100 / ms, "gb_per_s": 10 / ms}


def make_rows() -> kernels_report.Rows:
    rows = {}
    for case in CASES:
        ours = {"implementation": "ringattn", "case": case, "forward": direction(1.0), "backward": direction(2.0)}
        failure = {"status": "failed", "error": "x"}
        peer = {"implementation": "peer", "case": case, "forward": direction(4.0), "backward": failure}
        rows[case] = [ours, peer]
    return rows


def test_every_row_of_a_table_has_its_date():
    report = kernels_report.Report(HEADER, make_rows())
    lines = report.figures(CASES, "tflops", "{:.0f}".format).splitlines()
    assert lines[0] == "| D | mask | S | H | ringattn | peer | date |"
    assert lines[2] == "| 128 | causal | 1,024 | 16 | 100 / 50 | 25 / failed | 2026-11-24 |"


def test_ratio_is_relative_to_the_causal_mask():
    rows = make_rows()
    window = Case("window", 1024, 16, 128)
    rows[window] = [
        {"implementation": "ringattn", "case": window, "forward": direction(2.0), "backward": direction(2.0)},
        {"implementation": "peer", "case": window, "forward": {"status": "unsupported"}, "backward": {"status": "unsupported"}},
    ]
    table = kernels_report.Report(HEADER, rows).masks([CASES[0], window])
    assert "50 / 50 (0.50 / 1.00) | - |" in table.splitlines()[-1]


def test_ratio_of_the_backward_is_relative_to_the_causal_mask_of_the_same_length():
    rows = make_rows()
    for found in rows[CASES[1]]:
        found["forward"] = direction(10.0)
    table = kernels_report.Report(HEADER, rows).backward(CASES)
    assert all("(1.00 / 1.00)" in line for line in table.splitlines()[-2:])


def test_report_can_be_rewritten_from_its_rows(tmp_path):
    kernels_report.save_rows(tmp_path, HEADER, {"speed": CASES, "masks": CASES}, make_rows())
    kernels_report.write(tmp_path, HEADER, {"speed": CASES, "masks": CASES}, make_rows())
    first = (tmp_path / "README.md").read_text()
    for name in ("README.md", "speed.png"):
        (tmp_path / name).unlink()
    kernels_report.main([str(tmp_path)])
    assert (tmp_path / "README.md").read_text() == first
    assert (tmp_path / "speed.png").stat().st_size > 5_000


def test_cases_that_were_not_measured_are_left_out(tmp_path):
    rows = make_rows()
    del rows[CASES[1]]
    kernels_report.save_rows(tmp_path, HEADER, {"speed": CASES}, rows)
    _, suites, loaded = kernels_report.load_rows(tmp_path / "rows.json")
    assert suites == {"speed": CASES[:1]}
    assert list(loaded) == CASES[:1]
    assert json.loads((tmp_path / "rows.json").read_text())["date"] == "2026-11-24"


def test_missing_file_is_rejected(tmp_path, capsys):
    with pytest.raises(SystemExit):
        kernels_report.main([str(tmp_path)])
    assert f"{tmp_path / 'rows.json'}: no such file" in capsys.readouterr().err
