"""The scripts and the notebook of docs/examples run, and the notebook shows what its code prints."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.command import ROOT, child_environment
from tests.distributed import run_script
from tests.train.hub_models import write_chat_folder
from tests.train.launch import write_corpus

EXAMPLES = ROOT / "docs" / "examples"
NOTEBOOK = json.loads((EXAMPLES / "state_ring.ipynb").read_text())
CPU = {"CUDA_VISIBLE_DEVICES": ""}


def run(command: list[str], directory: Path) -> str:
    done = subprocess.run(
        command, cwd=directory, env=child_environment(**CPU), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_scripts_are_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths.keys() == {"own_loop.py", "ring_trainer.py", "finetune.py", "decode.py"}
    assert max(lengths.values()) <= 40, lengths


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("script", ["own_loop.py", pytest.param("ring_trainer.py", marks=pytest.mark.slow)])
def test_the_loop_has_the_same_losses_on_any_number_of_ranks(script: str, tmp_path: Path) -> None:
    one, two = (run_script(EXAMPLES / script, ranks, tmp_path / f"{ranks}") for ranks in (1, 2))
    lines = [[line for line in text.splitlines() if line.startswith("step")] for text in (one, two)]
    assert lines[0] == lines[1]
    losses = [float(line.split("loss ")[1]) for line in lines[0]]
    assert len(losses) == 10
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.usefixtures("on_cpu")
def test_decoding_on_two_ranks_equals_one_rank(tmp_path: Path) -> None:
    text = run_script(EXAMPLES / "decode.py", 2, tmp_path / "ranks")
    results = re.findall(r"rank \d holds (\d+) of 1020 tokens; largest difference from one rank: (\S+)", text)
    assert sum(int(rows) for rows, _ in results) == 1020
    assert max(float(error) for _, error in results) < 1e-5


@pytest.mark.slow
def test_a_model_of_hugging_face_is_finetuned_and_exported(tmp_path: Path) -> None:
    """Each output has its own training."""
    folder = write_chat_folder(tmp_path / "model")
    settings = ["trainer.steps=2", "data.seq_len=64", "trainer.batch_size=2", "trainer.sample_tokens=0", "logger=off"]
    script = [sys.executable, str(EXAMPLES / "finetune.py"), str(folder)]
    for text, output in ((write_corpus(tmp_path / "corpus"), "new"), (EXAMPLES / "own_loop.py", "other")):
        assert "step 2/2" in run([*script, str(text), output, "--ranks", "2", *settings], tmp_path)
        assert (tmp_path / output / "config.json").exists()
        assert list((tmp_path / output).glob("*.safetensors"))


@pytest.mark.slow
def test_an_error_of_the_training_ends_the_script(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "finetune.py"), "missing", str(EXAMPLES), "new"]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_environment(**CPU), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1
    assert "error: trainer.init_from=" in done.stderr
    assert "CalledProcessError" not in done.stderr
    assert not (tmp_path / "new").exists()


def test_the_notebook_prints_what_it_shows() -> None:
    """Numbers may differ, because they depend on the machine and on the cost model."""
    names: dict = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), names)
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            assert re.sub(r"\d[\d,.]*", "0", printed.getvalue()) == re.sub(r"\d[\d,.]*", "0", shown)
            assert "False" not in shown
