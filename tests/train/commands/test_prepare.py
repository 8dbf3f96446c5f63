"""The command that prepares a text: it survives kills, and training on its folder equals training on the source."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from omegaconf.errors import ConfigAttributeError

from ringattn.train.commands import prepare
from ringattn.train.commands.messages import describe_error
from ringattn.train.settings.config import ConfigError
from tests.train.jobs import one_rank
from tests.train.launch import ROOT, SMALL, environment, wait_for_end

ARGUMENTS = "output=shards", "data=jsonl", "data.path=lines.jsonl"


def write_lines(count: int = 300) -> None:
    lines = [{"text": f"line {number} " + "abc" * (number % 50)} for number in range(count)]
    Path("lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_prepare(*arguments: str) -> None:
    with one_rank():
        prepare.run_command_line(list(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("data=jsonl",), r"output=\.\.\. is required"),
        (("output=x", "data.seq_len=5"), r"data\.seq_len=5 has no effect on a preparation: set it in the training"),
        (("output=x", "data=recall"), "data.source=recall needs no preparation"),
        (("output=x", "data=mix"), "data.source=mix"),
        (("output=x", "data=jsonl"), r"requires data\.path"),
        (("output=x", "data=jsonl", "data.path=none"), "matches no file"),
        (("output=x", "data=jsonl", "data.subset=y"), r"data\.subset=y has no effect"),
    ],
)
def test_settings_that_cannot_be_honoured_are_an_error(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        run_prepare(*arguments)
    assert not Path("x", "index.json").exists()


def test_a_mistyped_setting_names_the_nearest_one():
    with pytest.raises(ConfigAttributeError) as caught:
        run_prepare("output=x", "data=jsonl", "data.tokenizr=x")
    assert describe_error(caught.value) == "unknown option data.tokenizr: did you mean data.tokenizer?"


@pytest.mark.parametrize(
    ("content", "on_error", "message"),
    [("\n", "raise", "contains no text: provide"), ("{\n", "skip", "contains no text, and its first fault is: .*line 1")],
)
def test_a_text_without_documents_is_an_error(content, on_error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lines.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        run_prepare(*ARGUMENTS, f"data.on_error={on_error}")


def losses(name: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path("outputs", name, "metrics.jsonl").read_text().splitlines()]


def test_training_on_a_folder_equals_training_on_the_source(run_command_line, tmp_path, monkeypatch, capfd):
    """The tokenizer comes from the folder. A run on the source continues on the folder, which has the same sequences."""
    monkeypatch.chdir(tmp_path)
    write_lines()
    run_prepare(*ARGUMENTS)
    small = [each for each in SMALL if each != "data=text"] + ["data.eval_fraction=0.1", "trainer.eval_every=3"]
    for name, source in (("source", ARGUMENTS[1:]), ("prepared", ("data=prepared", "data.path=shards"))):
        assert run_command_line(*small, *source, f"name={name}", "trainer.steps=3") == 0
    expected = losses("source")
    assert len(expected) == 3
    assert losses("prepared") == expected
    assert "data.source=prepared data.path=shards" in capfd.readouterr().out
    assert run_command_line(*small, "data=prepared", "data.path=shards", "name=source", "trainer.steps=4") == 0
    assert losses("source")[:3] == expected
    assert len(losses("source")) == 4


@pytest.mark.slow
def test_a_preparation_that_is_killed_at_random_moments_continues(tmp_path, monkeypatch):
    """Two processes tokenise 26 pieces. After every kill, no process is left, and only temporary files are incomplete."""
    monkeypatch.chdir(tmp_path)
    Path("small.py").write_text(
        "from ringattn.train.data import sources, tokenisation, workers\n"
        "from ringattn.train.commands import prepare\n"
        "sources.PIECE_BYTES, tokenisation.SHARD_TOKENS, workers.MIN_BYTES = 2**18, 2**17, 1\n"
        "if __name__ == '__main__':\n    prepare.main()\n"
    )
    write_lines(70_000)
    expected = tmp_path / "expected"
    command = [sys.executable, "small.py", *ARGUMENTS[1:]]
    subprocess.run([*command, f"output={expected}", "data.num_proc=1"], env=environment(tmp_path), check=True)
    generator, kills, folder = random.Random(5), 0, tmp_path / "shards"
    while kills < 2:
        process = subprocess.Popen([*command, "output=shards", "data.num_proc=2"], env=environment(tmp_path), process_group=0)
        deadline = time.monotonic() + 60
        done = len(list(folder.glob("*-*.json")))
        while process.poll() is None and len(list(folder.glob("*-*.json"))) <= done and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 0.3))
        if process.poll() is not None:  # This process had to wait for a core for so long that the preparation has ended.
            assert process.returncode == 0
            shutil.rmtree(folder)
            continue
        members = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _group_of(path) == process.pid]
        process.kill()  # Only the first process is killed. The others must notice it.
        process.wait()
        wait_for_end(members)
        kills += 1
        for path in folder.glob("*-*.json"):
            shard = json.loads(path.read_text())
            if shard["documents"]:
                assert (folder / path.with_suffix(".tokens").name).stat().st_size == 2 * shard["tokens"]
    subprocess.run([*command, "output=shards", "data.num_proc=2"], env=environment(tmp_path), check=True)
    names = sorted(path.name for path in expected.iterdir())
    assert names == sorted(path.name for path in folder.iterdir())
    for name in names:
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


def _group_of(process: Path) -> int | None:
    try:
        return os.getpgid(int(process.name))
    except ProcessLookupError:
        return None


def test_the_script_is_the_command():
    text = (ROOT / "train" / "prepare.py").read_text()
    assert "from ringattn.train.commands.prepare import main" in text
