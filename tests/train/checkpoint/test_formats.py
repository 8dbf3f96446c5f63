"""Runs resume from checkpoints of every format. The folder formats/ contains one checkpoint of two steps per format.

Format 1 was saved by the version 0.2.0. The command of the run was the same for all formats:

    train/run.py data=text data.path='corpus/*.txt' data.seq_len=16 model.layers=1 model.dim=2 model.heads=1 model.kv_heads=1
        model.head_dim=2 model.ffn_dim=2 logger=off trainer.sample_tokens=0 trainer.device=cpu trainer.batch_size=1
        trainer.steps=2 trainer.checkpoint_every=0
"""

import json
import tarfile
from pathlib import Path

import pytest

from ringattn.train.checkpoint import storage

FORMATS = Path(__file__).parent / "formats"
# The loss of step 3 in the version that saved the checkpoint.
LOSSES = {1: 5.538954, 2: 5.550609}
DATA = ("data=text", "data.path='corpus/*.txt'", "data.seq_len=16")


def unpack(version: int, directory: Path) -> Path:
    """Unpack the checkpoint of a format to the checkpoints of a run, and return its path."""
    with tarfile.open(FORMATS / f"{version}.tar.xz") as archive:
        archive.extractall(directory / "checkpoints", filter="data")
    return directory / "checkpoints" / "step_00000002"


def test_every_format_has_a_checkpoint():
    assert sorted(path.name for path in FORMATS.iterdir()) == [f"{version}.tar.xz" for version in LOSSES]
    assert max(LOSSES) == storage.FORMAT


@pytest.mark.parametrize("settings", [(), DATA], ids=["by its name", "by its command"])
@pytest.mark.parametrize("version", LOSSES)
def test_a_run_resumes_from_a_checkpoint_of_every_format(version, settings, tmp_path, corpus, run_command_line, capfd):
    run = tmp_path / "run"
    saved = unpack(version, run)
    assert run_command_line(*settings, f"hydra.run.dir={run}", "trainer.steps=3") == 0
    output = capfd.readouterr().out
    assert f"resumed     {saved}" in output
    assert ("checksums " in output) == (version == 1)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # The weights and the position in the corpus determine this loss.
    assert [record["step"] for record in records] == [3]
    assert abs(records[0]["loss"] - LOSSES[version]) < 1e-5
    # A checkpoint of the current format is saved, and it has kept the earlier settings.
    meta = storage.read_meta(storage.latest(run / "checkpoints"))
    assert (meta["format"], meta["step"], meta["config"]["data"]["eval_fraction"]) == (storage.FORMAT, 3, 0.01 * (version > 1))


@pytest.mark.parametrize("entries", [{"format": 3}, {"format": 99, "checksum": None, "files": "new", "step": {}}], ids=str)
def test_a_newer_format_is_reported_in_one_line(entries, tmp_path, corpus, run_command_line, only_error):
    saved = unpack(2, tmp_path / "run")
    meta = json.loads((saved / "meta.json").read_text())
    (saved / "meta.json").write_text(json.dumps(meta | entries))
    assert run_command_line(f"hydra.run.dir={tmp_path}/run", "trainer.steps=3") == 1
    assert f"step_00000002 has the format {entries['format']} of a newer version of ringattn" in only_error()


@pytest.mark.parametrize(
    ("version", "entries", "message"),
    [
        (1, {"step": 1}, "the file belongs to step 1"),
        (1, {"step": "2"}, "step and the sizes of files must be integers"),
        (1, {"consumed": "x"}, "consumed='x'"),
        (1, {"consumed": -7}, "consumed=-7"),
        (1, {"consumed": None}, "consumed=None"),
        (2, {"step": 1}, "the checksum is wrong"),
        (2, {"consumed": 3}, "the checksum is wrong"),
    ],
    ids=str,
)
def test_an_edited_meta_is_reported_in_one_line(version, entries, message, tmp_path, corpus, run_command_line, only_error):
    """The checkpoint, whose meta.json may claim to belong to an earlier step, is not removed."""
    saved = unpack(version, tmp_path / "run")
    meta = json.loads((saved / "meta.json").read_text())
    (saved / "meta.json").write_text(json.dumps(meta | entries))
    files = {path: path.read_bytes() for path in saved.iterdir()}
    assert run_command_line(*DATA, f"hydra.run.dir={tmp_path}/run", "trainer.steps=3") == 1
    assert message in only_error()
    assert {path: path.read_bytes() for path in saved.iterdir()} == files


@pytest.mark.parametrize("entries", [{"checksum": None}, {"format": None}, {"format": "2"}, {"format": 1}], ids=str)
def test_the_checksum_of_the_current_format_is_required(entries, tmp_path):
    saved = unpack(2, tmp_path)
    meta = json.loads((saved / "meta.json").read_text())
    (saved / "meta.json").write_text(json.dumps(meta | entries))
    with pytest.raises(storage.CheckpointError, match=r"meta\.json: .*checksum is wrong"):
        storage.read_meta(saved)
