"""The check of training on rings passes, and reports rings that ignore documents, labels or tokens of other ranks."""

import os
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

pytest.importorskip("transformers")

from ringattn.train.settings.config import ConfigError
from scripts.check import parity
from scripts.command import rank_variables, serve_store
from tests.distributed import run_ranks
from tests.ringattn.transformers.small_models import new_model

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


def test_too_few_gpus_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(parity, "pick_device", Mock(side_effect=ConfigError("this machine has 0 usable GPUs")))
    assert parity.main([]) == 1
    assert capsys.readouterr().err.endswith("error: this machine has 0 usable GPUs\n")


def test_folder_without_a_model_is_rejected(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parity.main(["--model", str(tmp_path)])
    assert f"argument --model: {tmp_path} has no config.json" in capsys.readouterr().err


def test_model_that_cannot_be_checked_is_reported_in_one_line(tmp_path) -> None:
    new_model("gemma2").save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match=r"^rank 0: .* cannot be checked: Gemma2Attention passes softcap, .*support$"):
        parity.main(["--model", str(tmp_path)])
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    with pytest.raises(SystemExit, match=r"^transformers cannot load .*: ValueError: .*`unknown`.*$"):
        parity.main(["--model", str(tmp_path)])


@pytest.mark.parametrize("kind", ["gpt2", "opt", "llama"])
def test_few_learned_positions_are_an_error(kind, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings have no limit."""
    monkeypatch.setattr(parity, "CASES", {"packed": parity.CASES["packed"]})
    settings = dict(word_embed_proj_dim=32, ffn_dim=64, dropout=0.0) if kind == "opt" else {}
    for positions in (102, 103):
        model = new_model(kind, max_position_embeddings=positions, **settings)
        model.save_pretrained(tmp_path)
        is_few = positions == 102 and kind != "llama"
        message = f"{tmp_path} has 102 learned positions: this check needs a model with at least 103"
        with pytest.raises(SystemExit, match=message) if is_few else nullcontext():
            assert parity.main(["--model", str(tmp_path)]) == 0


# The exit status and the number of rows that exceed the limit, by the name of the model.
EXPECTED = {"tiny": (0, PASSED), "of a folder": (0, PASSED), "with shifted labels": (1, "14 rows exceed the limit")}


def check_models(variables: list[dict[str, str]], directory: Path) -> None:
    """On every rank: check the models of EXPECTED one after the other, because the imports take longer than a check."""
    from ringattn.transformers import batch

    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= variables[rank]
    correct = batch.next_labels
    for name, (status, _) in EXPECTED.items():
        arguments = ["--model", str(directory / "model")] if name == "of a folder" else []
        if name == "with shifted labels":
            batch.next_labels = lambda whole: None if correct(whole) is None else correct(whole).roll(1, 1)
        with open(directory / f"{name} {rank}", "w") as output, redirect_stdout(output):
            assert parity.main(arguments) == status
    os._exit(0)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory, store = tmp_path_factory.mktemp("parity"), serve_store()
    parity.tiny_model().save_pretrained(directory / "model")
    run_ranks(check_models, 2, directory / "ranks", [rank_variables(store, rank, 2) for rank in range(2)], directory)
    return {name: (directory / f"{name} 0").read_text() for name in EXPECTED}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_rings_of_two_ranks_are_compared_with_one_process(name: str, outputs: dict[str, str]) -> None:
    """If labels are shifted after sharding, the last token of a piece predicts the first token of another piece."""
    assert EXPECTED[name][1] in outputs[name]
    assert list(rows(outputs[name])) == [(ring, case) for ring in "12" for case in parity.CASES]
