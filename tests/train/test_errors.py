"""Tests of the messages of errors, and of the exit after an error."""

import errno
import os
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from omegaconf.errors import OmegaConfBaseException

from ringattn.comm import watchdog
from ringattn.train import errors


def test_error_that_has_no_option_names_none():
    assert errors.describe_error(OmegaConfBaseException("the reason\nand more")) == "the reason"


EXTERNAL = {
    "full disk": (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    "read-only disk": (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
    "rank of a ring": (watchdog.RingFault("ringattn: rank 1 gives no sign of life"), "rank 1 gives no sign of life"),
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
    assert text.startswith("rank 1 failed: ") and reason in text and status == 1 and "\n" not in text


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
    assert capfd.readouterr().err == "rank 1 failed\n" and exit_process.call_args_list == [((3,),), ((3,),)]
