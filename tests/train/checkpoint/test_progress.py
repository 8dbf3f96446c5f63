"""Tests of the messages during long saves and loads."""

import logging
import mmap
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ringattn.train import preemption
from ringattn.train.checkpoint import progress, storage
from ringattn.train.checkpoint.progress import show_allocation, show_progress


@pytest.fixture
def messages(monkeypatch, caplog) -> Callable[[], list[str]]:
    """A function that returns all messages. The intervals are short, so that a save of milliseconds counts as a long one."""
    monkeypatch.setattr(progress, "INTERVAL_S", 0.02)
    monkeypatch.setattr(progress, "POLL_S", 0.002)
    monkeypatch.setattr(preemption, "_received_signals", set())
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def slow(function: Callable, until: Callable[[], bool]) -> Callable:
    """A function that calls the replaced function, and returns as soon as a condition holds."""

    def run(*arguments, **options):
        result = function(*arguments, **options)
        deadline = time.monotonic() + 20
        while not until() and time.monotonic() < deadline:
            time.sleep(0.002)
        return result

    return run


def test_long_work_shows_its_size_time_and_rate(messages):
    """The progress never falls. A fraction above 1 counts as 1."""
    done = iter([0.25, 0.5, 2.0])
    with show_progress(("saving", "saved"), Path("a"), 4 << 30, lambda: next(done, 0.0)):
        slow(time.sleep, lambda: len(messages()) >= 4)(0)
    number = r"[\d,]+\.\d"
    for text, size in zip(messages(), ("1.0", "2.0", "4.0", "4.0"), strict=False):
        assert re.fullmatch(rf"saving      a: {size} GiB of 4.0 GiB after \d+ s, {number} GiB/s", text), text
    assert re.fullmatch(rf"saved       a: 4.0 GiB in {number} s, {number} GiB/s", messages()[-1])


def test_short_work_shows_nothing(messages, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL_S", 5.0)
    with show_progress(("saving", "saved"), Path("a"), 1, lambda: 0.5):
        time.sleep(0.02)
    assert messages() == []


def test_failed_work_does_not_claim_to_have_ended(messages):
    with pytest.raises(OSError, match="disk"), show_progress(("saving", "saved"), Path("a"), 1, lambda: 0.5):
        time.sleep(0.03)
        raise OSError("disk")
    assert not [text for text in messages() if text.startswith("saved")]


def test_allocation_shows_how_much_memory_the_process_occupies(messages):
    """The memory is mapped, because an allocator could return memory that the process already occupies."""

    def shown() -> float:
        found = [re.match(r"allocating  host memory: ([\d.]+) MiB of 64\.0 MiB after", text) for text in messages()]
        return max((float(match[1]) for match in found if match), default=0.0)

    with show_allocation(64 << 20):
        tensor = torch.frombuffer(mmap.mmap(-1, 32 << 20), dtype=torch.uint8)
        slow(tensor.zero_, lambda: shown() > 30)()
    assert 30 < shown() < 50


def test_save_and_load_show_their_progress(messages, monkeypatch, tmp_path):
    """At the end, both have written or read all bytes."""
    tensors = {"model.w": torch.ones(1 << 20)}

    def is_shown(verb: str) -> bool:
        return any(text.startswith(verb) and "4.0 MiB of 4.0 MiB" in text for text in messages())

    monkeypatch.setattr(storage, "_write_tensors", slow(storage._write_tensors, lambda: is_shown("saving")))
    path = storage.save(tmp_path, 1, tensors, {}, keep=1)
    saving, saved = messages()[-2:]
    assert saving.startswith(f"saving      {path}: 4.0 MiB of 4.0 MiB")
    assert saved.startswith(f"saved       {path}: 4.0 MiB in")
    monkeypatch.setattr(storage.dcp, "load", slow(storage.dcp.load, lambda: is_shown("loading")))
    storage.load(path, tensors)
    loading, loaded = messages()[-2:]
    assert loading.startswith(f"loading     {path}: 4.0 MiB of 4.0 MiB")
    assert loaded.startswith(f"loaded      {path}: 4.0 MiB in")


@pytest.mark.parametrize("has_earlier", [False, True])
def test_signal_during_a_save_tells_which_checkpoint_is_complete(has_earlier, messages, monkeypatch, tmp_path):
    """torchrun may kill the ranks before the save has ended."""
    if has_earlier:
        storage.save(tmp_path, 1, {"model.w": torch.ones(1)}, {}, keep=1)

    def has_warned() -> bool:
        preemption._received_signals.add(signal.SIGTERM)
        return any(text.startswith("signal") for text in messages())

    monkeypatch.setattr(storage, "_write_tensors", slow(storage._write_tensors, has_warned))
    storage.save(tmp_path, 2, {"model.w": torch.ones(1)}, {}, keep=1)
    (warning,) = [text for text in messages() if text.startswith("signal")]
    assert f"{tmp_path}/step_00000002 is incomplete" in warning
    assert "30 s" in warning
    expected = f"resumes from {tmp_path}/step_00000001" if has_earlier else "starts from the beginning"
    assert f"the next launch then {expected}" in warning
