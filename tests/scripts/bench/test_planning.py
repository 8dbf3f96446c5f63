"""Tests of the benchmark of planning."""

import json
from pathlib import Path

import pytest

from scripts.bench import planning


def test_rows_and_earlier_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every case has one row, and the times of an earlier commit appear in the same row."""
    earlier, output = tmp_path / "earlier.json", tmp_path / "new" / "rows.json"
    earlier.write_text(json.dumps([{"tokens": 2048, "documents": 3, "ranks": 2, "total": 1234.5}]))
    sizes = ["--tokens", "2048", "--documents", "1", "3", "--ranks", "1", "2", "--rounds", "1"]
    assert planning.main([*sizes, "--earlier", str(earlier), "--output", str(output)]) == 0
    rows, lines = json.loads(output.read_text()), capsys.readouterr().out.strip().splitlines()
    assert [(x["documents"], x["ranks"]) for x in rows] == [(1, 1), (1, 2), (3, 1), (3, 2)]
    assert all(0 < x["total"] < 1e4 and set(planning.PARTS) <= set(x) for x in rows)
    assert len(lines) == 2 + 2 + 4
    assert "torch" in lines[0]
    assert lines[-1].startswith("| 2,048 | 3 | 2 |")
    assert lines[-1].endswith("| 1,234.5 |")
    assert lines[-2].endswith("| - |")
