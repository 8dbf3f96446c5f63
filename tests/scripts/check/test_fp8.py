"""Tests of the table of the errors of FP8 attention."""

from pathlib import Path

import pytest

from scripts.check import fp8 as check_fp8

SMALL = ("--device", "cpu", "--queries", "8", "--keys", "300", "--dim", "32", "--seeds", "2")


def test_tables_are_printed_and_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """FP8 has the error of its rounded inputs, which exceeds the error of bf16."""
    assert check_fp8.main([*SMALL, "--output", str(tmp_path)]) == 0
    text = (tmp_path / "check_fp8.md").read_text()
    assert capsys.readouterr().out.startswith(text)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    columns, cells = lines[0][1:], {line[0]: list(map(float, line[1:])) for line in lines[2:5]}
    assert tuple(cells) == check_fp8.INPUTS
    errors = {kind: dict(zip(columns, values, strict=True)) for kind, values in cells.items()}
    for found in errors.values():
        assert found["bf16"] < 0.01 < 0.02 < found["FP8"] < check_fp8.LIMIT
        assert found["FP8"] == pytest.approx(found["rounded inputs"], abs=0.005)
        assert found["no rotation"] != found["rounded inputs"]
    assert len(lines) == 10
    assert lines[5][1:3] == ["dq, bf16", "dq, FP8"]


def test_an_error_above_the_limit_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every error, and also a NaN, is compared with the limit."""
    monkeypatch.setattr(check_fp8, "measure", lambda kind, args: dict.fromkeys(COLUMNS, 0.3 if kind == "outlier" else 0.1))
    assert check_fp8.main([*SMALL]) == 1
    assert capsys.readouterr().out.endswith("errors above 0.2: outlier\n")
    monkeypatch.setattr(check_fp8, "measure", lambda kind, args: dict.fromkeys(COLUMNS, float("nan")))
    assert check_fp8.main([*SMALL]) == 1


def test_too_many_keys_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """The inputs would have hundreds of terabytes."""
    with pytest.raises(SystemExit):
        check_fp8.main([*SMALL, "--keys", str(2**31 - 1), "--dim", "100000"])
    assert capsys.readouterr().err.startswith("error: the memory is too small, use shorter lengths: ")


COLUMNS = ("bf16", "FP8", *check_fp8.VARIANTS, *(f"{x}, {name}" for x in check_fp8.GRADIENTS for name in ("bf16", "FP8")))
