"""The check of training on rings passes, and reports ignored documents, labels and tokens of other ranks."""

import pytest

pytest.importorskip("transformers")

from scripts.check import parity
from tests.train.launch import launch

PASSED = "every difference is within its limit"


def rows(output: str) -> dict[tuple[str, str], list[str]]:
    cells = [line.strip("| ").split(" | ") for line in output.splitlines() if line.startswith(("| 1 ", "| 2 "))]
    return {(ring, data): values for ring, data, *values in cells}


def test_ignored_documents_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ringattn.transformers import batch

    monkeypatch.setattr(parity, "CASES", {name: parity.CASES[name] for name in ("one document", "packed")})
    assert parity.main([]) == 0
    output = capsys.readouterr().out
    assert list(rows(output)) == [("1", "one document"), ("1", "packed")]
    assert output.endswith(f"{PASSED}\n")
    monkeypatch.setattr(batch, "documents_of", lambda _: None)
    assert parity.main([]) == 1
    output = capsys.readouterr().out
    assert [float(values[0]) > parity.LIMIT for values in rows(output).values()] == [False, True]
    assert output.endswith("1 rows exceed the limit\n")


def test_results_that_are_not_finite_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "CASES", {"one document": parity.CASES["one document"]})
    monkeypatch.setattr(parity, "average", lambda x, _: x * float("nan"))
    assert parity.main([]) == 1


def test_folder_without_a_model_is_rejected(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parity.main(["--model", str(tmp_path)])
    assert f"argument --model: {tmp_path} has no config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_rings_of_two_ranks_have_the_results_of_one_process(tmp_path) -> None:
    parity.tiny_model().save_pretrained(tmp_path / "model")
    for arguments in ([], ["--model", str(tmp_path / "model")]):
        finished = launch(2, tmp_path, *arguments, script="scripts.check.parity")
        assert finished.returncode == 0, finished.stderr
        assert PASSED in finished.stdout
        assert list(rows(finished.stdout)) == [(ring, name) for ring in "12" for name in parity.CASES]


@pytest.mark.slow
def test_labels_that_are_shifted_after_sharding_are_reported(tmp_path) -> None:
    """The last token of a piece would predict the first token of another piece."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys\n"
        "from ringattn.transformers import batch\n"
        "from scripts.check import parity\n"
        "correct = batch.next_labels\n"
        "batch.next_labels = lambda whole: None if correct(whole) is None else correct(whole).roll(1, 1)\n"
        "sys.exit(parity.main([]))\n"
    )
    finished = launch(2, tmp_path, script=script)
    assert finished.returncode != 0
    assert "14 rows exceed the limit" in finished.stdout
