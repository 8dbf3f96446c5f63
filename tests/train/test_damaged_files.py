"""Every damaged file of a run or of a model is reported in one line that names the file, and nothing is changed."""

import shutil
from pathlib import Path

import pytest

from tests.train.hub_models import write_folder
from tests.train.launch import SMALL, write_corpus

STEP = "checkpoints/step_00000002"
# The content with which each file is replaced. None: the file loses its last bytes.
CONTENTS = {
    "meta.json": ["{", "[1]", "\xff", '{"step": 2, "files": {}}'],
    ".metadata": ["", "nonsense", None],
    "__0_0.distcp": ["", None],
    "model.safetensors.index.json": [
        "",
        "[]",
        '{"weight_map": 3}',
        '{"weight_map": {"model.norm.weight": 3}}',
        "\xff",
        "[" * 100_000,
    ],
    "model-0.safetensors": ["", "nonsense", None],
    "config.json": ["{", "[]", "\xff"],
    "summary.json": ["{", "[]", '{"steps": "two"}', "\xff"],
}
# How the damaged files are used: the arguments, and the files that the command then reads.
USES = {
    "init_from": (
        f"name=b trainer.init_from=run/{STEP} model.layers=1 model.dim=32",
        "run/" + STEP,
        ("meta.json", ".metadata", "__0_0.distcp"),
    ),
    "another run": (f"name=b trainer.resume=run/{STEP}", "run/" + STEP, ("meta.json", ".metadata", "__0_0.distcp")),
    "own run": ("hydra.run.dir=run trainer.steps=3", "run/" + STEP, ("meta.json", ".metadata", "__0_0.distcp")),
    "Hugging Face": (
        "name=b trainer.init_from=model data.tokenizer=bytes",
        "model",
        ("model.safetensors.index.json", "model-0.safetensors", "config.json"),
    ),
    "completed run": ("hydra.run.dir=run", "run", ("summary.json",)),
}
CASES = [
    pytest.param(arguments, f"{folder}/{file}", content, id=f"{use}: {file} {i}", marks=() if i == 0 else pytest.mark.slow)
    for use, (arguments, folder, files) in USES.items()
    for file in files
    for i, content in enumerate(CONTENTS[file])
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("undamaged")


@pytest.fixture
def undamaged(directory, run_command_line) -> Path:
    """A directory with a corpus, a completed run of two steps in run/, and a Hugging Face model in model/."""
    if not (directory / "model").exists():
        settings = [*SMALL, f"data.path={write_corpus(directory / 'corpus')}", "model.layers=1", "trainer.steps=2"]
        assert run_command_line(*settings, f"hydra.run.dir={directory}/run") == 0
        write_folder(directory / "model")
    return directory


def read_files(directory: Path) -> dict[Path, bytes]:
    """The contents of the files that must not change. Each launch may write to the log, and takes the lock."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name not in ("run.log", "lock")}


@pytest.mark.parametrize(("arguments", "file", "content"), CASES)
def test_damaged_file_is_reported_in_one_line(arguments, file, content, undamaged, tmp_path, run_command_line, only_error):
    for name in ("run", "model"):
        shutil.copytree(undamaged / name, tmp_path / name)
    path = tmp_path / file
    path.write_bytes(path.read_bytes()[:-7] if content is None else content.encode("latin-1"))
    before = read_files(tmp_path / "run")

    settings = [text for text in SMALL if not text.startswith("model.")]
    assert run_command_line(*settings, f"data.path={undamaged}/corpus/*.txt", *arguments.split()) == 1

    assert path.name in only_error()
    assert read_files(tmp_path / "run") == before
