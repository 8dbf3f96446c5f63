"""Tests of the check that flips bits of a checkpoint."""

import random
from pathlib import Path

import pytest

from scripts.check import bit_flips


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_flips_are_reported_or_have_no_effect(capfd: pytest.CaptureFixture) -> None:
    assert bit_flips.main(["--flips", "3"]) == 0
    assert "meta.json: 1 reported" in (output := capfd.readouterr().out)
    assert "3 flips, 0 failures" in output


@pytest.fixture
def original(tmp_path) -> Path:
    checkpoint = tmp_path / "original" / "step_00000002"
    checkpoint.mkdir(parents=True)
    for name in ("meta.json", ".metadata", "__0_0.distcp", "__1_0.distcp"):
        (checkpoint / name).write_bytes(bytes(9))
    return checkpoint


@pytest.mark.parametrize("kind", bit_flips.KINDS)
def test_one_bit_of_one_file_is_flipped(kind, original):
    before = bit_flips.checksums(original)
    position = bit_flips.flip(original, kind, random.Random(0))
    changed = [name for name, checksum in bit_flips.checksums(original).items() if checksum != before[name]]
    assert len(changed) == 1
    assert position.endswith(changed[0])
    assert sum((original / changed[0]).read_bytes()).bit_count() == 1


@pytest.mark.parametrize(
    ("status", "error", "losses", "expected"),
    [
        (1, "error: {} is damaged", [], "reported"),
        (0, "", [1.0], "without effect"),
        (0, "", [2.0], "silent change"),
        (1, "error: something", [], "without a message of one line"),
        (1, "Traceback\nerror: {}", [], "without a message of one line"),
        (-11, "", [], "without a message of one line"),
    ],
)
def test_every_effect_of_a_flip_is_noticed(status, error, losses, expected, original, tmp_path, monkeypatch):
    monkeypatch.setattr(bit_flips, "resume", lambda checkpoint, directory: (status, error.format(checkpoint)))
    monkeypatch.setattr(bit_flips, "results", lambda directory: (losses, {}))
    arguments = original, tmp_path / "run", "index", random.Random(0), ([1.0], {})
    if expected in ("reported", "without effect"):
        assert bit_flips.effect(*arguments) == expected
    else:
        with pytest.raises(AssertionError, match=expected):
            bit_flips.effect(*arguments)


def test_a_launch_that_removes_the_checkpoint_is_noticed(original, tmp_path, monkeypatch):
    def remove(checkpoint: Path, directory: Path) -> tuple[int, str]:
        (checkpoint / ".metadata").unlink()
        return 1, f"error: {checkpoint} is damaged"

    monkeypatch.setattr(bit_flips, "resume", remove)
    with pytest.raises(AssertionError, match="has changed"):
        bit_flips.effect(original, tmp_path / "run", "index", random.Random(0), ([], {}))
