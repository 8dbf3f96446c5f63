"""Tests of the messages of errors, and of the exit after an error."""

import errno
import logging
import os
import signal
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from omegaconf.errors import OmegaConfBaseException
from torch._inductor.exc import CppCompileError, InductorError
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ringattn.comm import watchdog
from ringattn.train.commands import errors, messages
from ringattn.train.settings.config import ConfigError
from scripts.command import child_environment
from tests.train.launch import ROOT, launch


def test_error_that_has_no_option_names_none():
    assert messages.describe_error(OmegaConfBaseException("the reason\nand more")) == "the reason"


EXTERNAL = {
    "full disk": (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    "read-only disk": (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
    "limit of a file": (OSError(errno.EFBIG, "File too large"), "File too large"),
    "folder of another user": (OSError(errno.EACCES, "Permission denied"), "check the disk and its permissions"),
    "rank of a ring": (watchdog.RingFault("ringattn: rank 1 gives no sign of life"), "rank 1 gives no sign of life"),
    "transport": (watchdog.TransportError("RINGATTN_TRANSPORT=x: it must be one of auto"), "RINGATTN_TRANSPORT=x: it must"),
    "rank, reported by gloo": (RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error\nmore"), "another rank"),
    "rank, reported by NCCL": (dist.DistBackendError("NCCL error"), "another rank"),
}


@pytest.mark.parametrize(("error", "reason"), EXTERNAL.values(), ids=EXTERNAL.keys())
def test_external_error_is_reported_without_a_traceback(error, reason, monkeypatch):
    """An error of a disk or of another rank needs no traceback."""
    terminate = Mock()
    monkeypatch.setattr(errors, "terminate", terminate)
    monkeypatch.setattr(errors.dist, "get_rank", lambda: 1)
    errors.terminate_on_error(None, error)
    _, text, status = terminate.call_args.args
    assert text.startswith("rank 1 failed: ")
    assert reason in text
    assert status == 1
    assert "\n" not in text


def test_internal_error_is_reported_with_a_traceback(monkeypatch):
    terminate = Mock()
    monkeypatch.setattr(errors, "terminate", terminate)
    monkeypatch.setattr(errors.dist, "get_rank", lambda: 1)
    errors.terminate_on_error(None, OSError(errno.ENOENT, "No such file"))
    assert "Traceback" in terminate.call_args.args[1] or "FileNotFoundError" in terminate.call_args.args[1]


def test_second_failure_exits_without_a_message(monkeypatch, capfd):
    exit_process = Mock()
    monkeypatch.setattr(os, "_exit", exit_process)
    store = dist.HashStore()
    for text in ("rank 1 failed", "rank 0 failed"):
        errors.terminate(store, text, 3)
    assert capfd.readouterr().err == "rank 1 failed\n"
    assert exit_process.call_args_list == [((3,),), ((3,),)]


def test_failure_after_the_end_of_the_store_is_reported(monkeypatch, capfd):
    exit_process = Mock()
    monkeypatch.setattr(os, "_exit", exit_process)
    errors.terminate(Mock(add=Mock(side_effect=dist.DistNetworkError("Connection reset"))), "rank 1 failed", 3)
    assert capfd.readouterr().err == "rank 1 failed\n"
    exit_process.assert_called_once_with(3)


def report_invalid_value() -> None:
    messages.report_error(ConfigError("a=1\nb: must be\x1b 2"))


def fail_on_two_ranks() -> None:
    store = dist.HashStore()
    for text in ("rank 1 failed:\nthe first error", "rank 0 failed: a later error"):
        errors.terminate(store, text, 3)


@pytest.mark.parametrize(
    ("fail", "message"),
    [(report_invalid_value, r"a=1 b: must be\x1b 2"), (fail_on_two_ranks, "rank 1 failed:\n  the first error")],
)
def test_torchrun_shows_the_first_error_in_its_summary(fail, message, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "_exit", Mock())
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    fail()
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert f"traceback : {message}\n" in str(ChildFailedError("run.py", {0: failure}))


def test_error_file_that_cannot_be_written_is_not_an_error(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "missing" / "error.json"))
    report_invalid_value()
    assert capfd.readouterr().err.startswith("error: a=1")


def test_a_command_may_start_with_closed_output(monkeypatch):
    monkeypatch.setattr(logging, "shutdown", Mock())  # It would close the log of pytest.
    monkeypatch.setattr(os, "_exit", exit_now := Mock())
    monkeypatch.setattr(sys, "stdout", None)
    messages.exit_process(0)
    assert exit_now.call_args.args == (0,)


@pytest.mark.slow
def test_last_lines_of_torchrun_contain_the_error(tmp_path):
    result = launch(1, tmp_path, "model.window=0", "trainer.device=cpu")
    assert result.returncode == 1
    assert "model.window=0: must be" in "".join(result.stderr.splitlines()[-3:])
    assert "To enable traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("lr", "optim.lr"),
        ("trainer.learning_rate", "optim.lr"),
        ("trainer.max_steps", "trainer.steps"),
        ("trainer.lr", "optim.lr"),
        ("trainer.step", "trainer.steps"),
        ("data.seqlen", "data.seq_len"),
        ("optim.learning_rat", "optim.lr"),
        ("trainer.gradient_accumulation_steps", "trainer.accumulate"),
        ("trainer.total_steps", "trainer.steps"),
        ("trainer.save_every", "trainer.checkpoint_every"),
        ("block_size", "data.seq_len"),
        ("trainer.max_grad_norm", "optim.clip"),
        ("model.width", None),
        ("nonsense", None),
    ],
)
def test_unknown_option_names_the_nearest_setting(name, setting):
    assert messages.nearest_setting(name) == setting


@pytest.mark.parametrize(
    ("cause", "is_one_line"),
    [
        (ImportError("/cache/wu/a.main.so: file too short"), True),
        (OSError("/cache/wu/a.so: invalid ELF header"), True),
        (CppCompileError(["g++"], "error: at::vec has not been declared"), False),
        (RuntimeError("Failed to import /cache/3z/a.py"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_error_of_a_compilation_names_the_cache_to_remove(cause, is_one_line, monkeypatch):
    """A killed compiler leaves an incomplete library, and every later launch fails."""
    printed = Mock()
    monkeypatch.setattr(errors, "terminate", printed)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    errors.terminate_on_error(None, InductorError(cause, None))
    text = printed.call_args.args[1]
    assert text.startswith("rank 0 failed: ")
    assert str(cause).splitlines()[0] in text
    assert f"remove {cache_dir()}" in text.splitlines()[-1]
    assert (len(text.splitlines()) == 1) == is_one_line


@pytest.mark.parametrize("command", ["train/run.py", "train/export.py", "-mscripts.tools.plan_ring", "-mscripts.check.ring"])
def test_interrupt_during_an_import_prints_one_line(command, tmp_path):
    """Ctrl-C during the import of torch shows no traceback, and ends the process with SIGINT."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = child_environment(tmp_path)
    done = subprocess.run([sys.executable, command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "interrupted\n")
