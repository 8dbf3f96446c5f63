"""Tests of the benchmark of preparations."""

import json
import os
from pathlib import Path

import pytest

from scripts.bench import preparation


@pytest.mark.slow
def test_every_case_has_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "SAMPLE_BYTES", 300_000)
    # The measured size is smaller if other processes share the libraries. This text is not shared.
    monkeypatch.setattr(preparation, "PREPARE", "text = 'x' * 50_000_000\n" + preparation.PREPARE)
    arguments = ["--gb", "0.002", "--processes", "1", "--vocabulary", "400", "--folder", str(tmp_path)]
    assert preparation.main(arguments) == 0
    rows, lines = json.loads((tmp_path / "rows.json").read_text()), capsys.readouterr().out.strip().splitlines()
    assert [(row["tokenizer"], row["program"]) for row in rows] == [
        ("bytes", "ours"),
        ("bytes", "map"),
        ("bpe", "ours"),
        ("bpe", "map"),
    ]
    assert all(row["memory"] > 5e7 and row["MB/s"] > 0 for row in rows)
    assert all((row["opened"] is None) == (row["program"] == "map") for row in rows)
    assert len(lines) == 2 + 4


def test_a_generated_text_has_the_given_size(tmp_path: Path) -> None:
    preparation.write_lines(tmp_path / "a.jsonl", 100_000, "sample " * 9000)
    texts = [json.loads(line)["text"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert 100_000 <= (tmp_path / "a.jsonl").stat().st_size < 200_000
    assert len({len(text) for text in texts}) > 5


def test_the_memory_of_this_process() -> None:
    assert 5e7 < preparation.memory_of(os.getpid()) < 1e11
