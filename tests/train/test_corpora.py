"""Tests of whole runs on mixtures of several sources and on streams."""

import hashlib
import json
import os
import random
import signal
import threading
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ringattn.train.data import stream as streams
from ringattn.train.data.packing import PackedDataset
from ringattn.train.data.shards import Documents
from ringattn.train.data.stream import StreamDataset, open_stream
from ringattn.train.data.tokenisation import tokenise
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.settings.config import DataConfig
from ringattn.train.trainer import report_sources
from tests.train.data.rows import Rows
from tests.train.launch import SMALL, launch_ranks

WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}


def train(run_command_line, *arguments: str) -> int:
    """Train on three files of JSON lines, each with 200 documents of 64 tokens."""
    for name in WEIGHTS:
        Path(f"{name}.jsonl").write_text(f'{{"text": "{name * 63}"}}\n' * 200)
    sources = [f"{{name:{name},source:jsonl,path:{name}.jsonl,weight:{weight}}}" for name, weight in WEIGHTS.items()]
    small = [each for each in SMALL if each != "data=text"]
    return run_command_line(*small, "data=mix", f"data.mix=[{','.join(sources)}]", "name=a", *arguments)


def test_a_run_records_the_sources_and_repeats_or_ends(run_command_line, tmp_path, monkeypatch, capfd):
    """Source a has 199 sequences and a share of 60%, so it runs out after 331 sequences. A step has 30 sequences."""
    monkeypatch.chdir(tmp_path)
    arguments = "trainer.steps=12", "trainer.batch_size=30"
    assert train(run_command_line, *arguments, "data.exhausted=end") == 0
    assert "11 instead of 12, because then the source a of data.mix runs out" in capfd.readouterr().out
    records = [json.loads(line) for line in Path("outputs/a/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 11
    assert [records[-1][f"tokens/{name}"] for name in WEIGHTS] == [64 * count for count in (198, 99, 33)]
    assert records[-1]["epochs/a"] == pytest.approx(198 / 199)
    assert train(run_command_line, *arguments, "data.exhausted=end") == 0
    assert "all 11 steps were completed by an earlier launch" in capfd.readouterr().out
    # The same command without `end` continues the run, and reports the repetition.
    assert train(run_command_line, *arguments) == 0
    output = capfd.readouterr().out
    assert "the source a ran out, and step 12 began to read it again (epoch 2)" in output
    assert "a 13,824 tokens (1.09 epochs)" in output


def test_a_text_that_repeats_is_reported(caplog):
    caplog.set_level("INFO")
    data = PackedDataset(Documents.of(Rows([[1] * 50] * 2)), seq_len=9, seed=0)
    run = SimpleNamespace(data=data, sequences_per_step=4)
    assert [report_sources(run, step, 4 * (step - 1)) for step in range(1, 7)] == [{}] * 6
    repeats = [message.split(maxsplit=1)[1] for message in caplog.messages]
    assert repeats == [f"the text ran out, and step {step} began to read it again (epoch {step // 3 + 1})" for step in (3, 6)]


STEPS, PER_STEP = 40, 8  # sequences per step
PIECE_BYTES = 8000  # Each file is one piece.
TRAINING = [
    *(each for each in SMALL if each not in ("data=text", "data.eval_fraction=0", "trainer.batch_size=2")),
    *("parallel.ring=1", f"trainer.tokens_per_step={64 * PER_STEP}", f"trainer.steps={STEPS}", "optim.warmup_steps=2"),
    *("trainer.checkpoint_every=3", "trainer.eval_every=10", "name=a"),
]
STREAM = [
    *TRAINING,
    *("data=jsonl", "data.path=text", "data.streaming=true", "data.shuffle_buffer=30", "data.eval_path=held_out.jsonl"),
]
PREPARED = [*TRAINING, "data=prepared", "data.path=shards"]


def write_text(folder: Path) -> None:
    """Write eight files of documents with up to 200 characters, and held-out text. Prepare the files in the folder shards."""
    generator = random.Random(0)
    (folder / "text").mkdir()
    for name in [*(f"text/{number}" for number in range(8)), "held_out"]:
        lines = [json.dumps({"text": f"{name}:{i}" + "x" * generator.randint(0, 200)}) + "\n" for i in range(60)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    tokenise(DataConfig("jsonl", path=str(folder / "text")), BytesTokenizer(), folder=folder / "shards")


def digest(sequence: tuple) -> str:
    tokens, labels, documents = sequence
    return hashlib.sha256(tokens.tobytes() + labels.tobytes() + repr(documents).encode()).hexdigest()


def observe(rank: int) -> None:
    """Write to a file the digest of each sequence that this process trains on. Kill the process at a random moment.

    The variable KILL contains the rank to kill, and the number of sequences after which its last second begins.
    """
    streams.MIN_PIECE_BYTES = PIECE_BYTES
    count = 0
    victim, after = json.loads(os.environ["KILL"])
    file = open(f"read-{rank}.jsonl", "a")  # noqa: SIM115  # the process is killed

    def read_and_write(data: Any, index: int, read: Callable[[Any, int], tuple]) -> tuple:
        nonlocal count
        sequence, count = read(data, index), count + 1
        file.write(json.dumps([index, digest(sequence)]) + "\n")
        file.flush()
        if rank == victim and count == after:
            threading.Timer(random.random(), os.kill, (os.getpid(), signal.SIGKILL)).start()
        return sequence

    for kind in (StreamDataset, PackedDataset):
        kind.sequence = partialmethod(read_and_write, read=kind.sequence)


def launch_observed(
    ranks: int, folder: Path, monkeypatch: pytest.MonkeyPatch, victim: int, after: int, arguments: list[str] = STREAM
) -> tuple[bool, str]:
    monkeypatch.setenv("KILL", json.dumps([victim, after]))
    succeeded, stdout, stderr = launch_ranks(ranks, folder, *arguments, prepare=observe)
    assert "Traceback" not in stderr, stderr
    return succeeded, stdout


def expected_sequences(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Return the digests of the sequences of an uninterrupted stream."""
    monkeypatch.setattr(streams, "MIN_PIECE_BYTES", PIECE_BYTES)
    config = DataConfig("jsonl", path=str(folder / "text"), streaming=True, shuffle_buffer=30, seq_len=64)
    data = open_stream(config, BytesTokenizer())
    return {index: digest(data.sequence(index)) for index in range(STEPS * PER_STEP)}


def read_sequences(folder: Path) -> list[tuple[int, str]]:
    """Return the numbers and the digests of the sequences that all launches have read for training, not for evaluation."""
    return [tuple(json.loads(line)) for file in folder.glob("read-*.jsonl") for line in file.read_text().splitlines()]


def check_sequences(folder: Path, expected: dict[int, str]) -> None:
    """Check that all launches have read the expected sequences, and every sequence at least once."""
    found = read_sequences(folder)
    assert {index for index, _ in found} == expected.keys()
    assert [index for index, each in found if each != expected[index]] == []


def losses(folder: Path) -> list[tuple[int, float, float | None]]:
    records = [json.loads(line) for line in (folder / "outputs/a/metrics.jsonl").read_text().splitlines()]
    return [(each["step"], each["loss"], each.get("eval_loss")) for each in records]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "ranks"), [("stream", 1), ("stream", 4), ("prepared", 2)])
def test_a_killed_run_continues_with_the_same_batches(source, ranks, tmp_path, monkeypatch):
    """The batches are the same token for token, and the losses of all steps and evaluations are the same bit for bit."""
    arguments, (reference, killed) = (
        {"stream": STREAM, "prepared": PREPARED}[source],
        (tmp_path / "reference", tmp_path / "killed"),
    )
    for folder in (reference, killed):
        folder.mkdir()
        write_text(folder)
    assert launch_observed(ranks, reference, monkeypatch, -1, 0, arguments)[0]
    generator = random.Random(ranks)
    kills = [(generator.randrange(ranks), generator.randint(1, 60 // ranks)) for _ in range(int(os.environ.get("KILLS", "2")))]
    results = [launch_observed(ranks, killed, monkeypatch, *kill, arguments)[0] for kill in kills]
    print(f"{source}, {ranks} ranks: {results.count(False)} of {len(kills)} launches were killed")
    assert False in results  # A launch that ends before it is killed succeeds.
    assert launch_observed(ranks, killed, monkeypatch, -1, 0, arguments)[0]
    expected = expected_sequences(killed, monkeypatch) if source == "stream" else dict(read_sequences(reference))
    check_sequences(killed, expected)
    assert len(expected) == STEPS * PER_STEP
    assert losses(killed) == losses(reference)
    assert len(losses(reference)) == STEPS


@pytest.mark.slow
def test_a_stream_continues_on_another_number_of_ranks(tmp_path, monkeypatch):
    write_text(tmp_path)
    resumed = 0
    for ranks in (4, 1, 2):
        _, output = launch_observed(ranks, tmp_path, monkeypatch, 0 if ranks != 2 else -1, 90 // ranks)
        resumed += "on another number of ranks" in output
    assert resumed == 2
    check_sequences(tmp_path, expected_sequences(tmp_path, monkeypatch))


def test_a_stream_is_described_and_evaluated(run_command_line, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(streams, "MIN_PIECE_BYTES", PIECE_BYTES)
    write_text(tmp_path)
    assert run_command_line(*STREAM, "trainer.steps=3") == 0
    output = capfd.readouterr().out
    assert "streamed by 8 readers, which shuffle 30 documents" in output
    assert "eval loss" in output
    # The same command continues the run. A changed text is an error.
    assert run_command_line(*STREAM, "trainer.steps=4") == 0
    assert "step_00000003" in capfd.readouterr().out
    (tmp_path / "text" / "0.jsonl").write_text('{"text": "other"}\n')
    assert run_command_line(*STREAM, "trainer.steps=5") == 1
    assert "was trained on another corpus" in capfd.readouterr().err


def test_a_run_reports_the_packing_and_keeps_it(run_command_line, tmp_path, monkeypatch, capfd):
    """A resumed run with another packing would read other sequences."""
    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    for index in range(40):
        Path(f"text/{index}").write_text("word " * (1 + index % 11))
    arguments = *SMALL, "data.path=text", "trainer.steps=2", "name=a"
    assert run_command_line(*arguments, "data.packing=best-fit") == 0
    output = capfd.readouterr().out
    assert "documents   40, with a median of 28 tokens and a maximum of 56; 0.0% are cut; 0.0% of the tokens" in output
    assert "% padding" in output
    assert Path("outputs/a/documents.png").exists()
    assert run_command_line(*arguments, "data.packing=best-fit", "trainer.steps=3") == 0
    assert run_command_line(*arguments, "data.packing=stream", "trainer.steps=4") == 1
    assert "was trained on another corpus: data.packing=best-fit (now stream)" in capfd.readouterr().err
