"""Report errors of the commands in train/, and exit on all ranks."""

import errno
import json
import logging
import os
import re
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationResolutionError, OmegaConfBaseException
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ringattn.comm.watchdog import RingFault
from ringattn.train.checkpoint.storage import FULL_DISK
from ringattn.train.data.loader import LoaderError
from ringattn.train.parallel.memory.capacity import InsufficientMemory
from ringattn.train.settings.config import SETTINGS, ConfigError
from ringattn.train.step import Diverged

DISK_ERRORS = (*FULL_DISK, errno.EROFS, errno.EIO)
# Maps the names of settings in other programs to our names.
OTHER_NAMES = {
    **dict.fromkeys(("learning_rate", "max_lr"), "optim.lr"),
    **dict.fromkeys(("max_steps", "total_steps", "train_steps", "num_train_steps"), "trainer.steps"),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "trainer.accumulate"),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size"), "trainer.batch_size"),
    **dict.fromkeys(("block_size", "context_length", "max_seq_length", "max_length", "sequence_length"), "data.seq_len"),
    **dict.fromkeys(("max_grad_norm", "gradient_clip_val"), "optim.clip"),
    **dict.fromkeys(("save_steps", "save_every"), "trainer.checkpoint_every"),
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), "memory.activations"),
    **{"eval_steps": "trainer.eval_every", "logging_steps": "trainer.log_every"},
}
# Errors of these types are mistakes of the user, which a command reports in one line. After a user error, a sweep continues
# with its next job.
USER_ERRORS = (ConfigError, Diverged, HydraException, OmegaConfBaseException)


def exit_process(status: int) -> NoReturn:
    """Exit after the ranks have disconnected. Skip Python's cleanup, in which threads of gloo sometimes abort."""
    logging.shutdown()
    with suppress(BrokenPipeError):  # The reader of the output may have exited.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def report_error(error: Exception) -> None:
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in describe_error(error))
    print("error:", text, file=sys.stderr, flush=True)
    write_error_file(text)


def write_error_file(text: str) -> None:
    """Write the reason for a failure to the error file that torchrun reads, if there is one."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(content))


def describe_error(error: Exception) -> str:
    """Describe a user error in one line. Hydra's messages have several lines, or are hidden in `__cause__`."""
    if isinstance(error, InterpolationResolutionError) and isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and is_dataclass(cause.object_type):
        if nearest := nearest_setting(cause.full_key):
            return f"unknown option {cause.full_key}: did you mean {nearest}?"
        known = ", ".join(field.name for field in fields(cause.object_type))
        return f"unknown option {cause.full_key}: choose one of {known}"
    if isinstance(error, OverrideParseException):
        parts = [part for part in error.message.splitlines() if part.strip(" ^") and not part.startswith("See https")]
        reason = "Hydra cannot read the value" if parts[-1].startswith("Lexer") else parts[-1]
        return f"{error.override}: {reason}; quote a value with brackets, ~ or the like for Hydra as well: 'key=\"value\"'"
    if isinstance(cause, OmegaConfBaseException):
        prefix = f"{cause.full_key}: " if cause.full_key else ""
        return prefix + str(cause).splitlines()[0]
    text = " ".join(re.split("Config search path|See https", str(error))[0].split())
    return text + ("; start the file with # @package _global_" if text.startswith("In 'experiment/") else "")


def nearest_setting(name: str | None) -> str | None:
    """Return the setting that a user probably meant by an unknown name, or None."""
    group, _, option = (name or "").rpartition(".")
    if other := get_close_matches(option, OTHER_NAMES, 1, cutoff=0.85):
        return OTHER_NAMES[other[0]]
    exact = [each for each in SETTINGS if each.endswith(f".{option}")]
    own = [each for each in SETTINGS if each.startswith(f"{group}.")]
    return next(iter(exact or get_close_matches(name or "", own, 1, cutoff=0.8)), None)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, InsufficientMemory | torch.OutOfMemoryError | MemoryError):
        return True
    # If memory is exhausted, Triton and PyTorch's CPU allocator raise a RuntimeError.
    return isinstance(error, RuntimeError) and ("out of memory" in str(error) or "DefaultCPUAllocator" in str(error))


def terminate_on_error(store: dist.Store, error: Exception) -> NoReturn:
    """Exit at once after an error that is not a user error. torchrun then terminates the other ranks."""
    described = describe_compile_error(error) if isinstance(error, BackendCompilerFailed) else describe_external_error(error)
    reason = described or "".join(traceback.format_exception(error))
    terminate(store, f"rank {dist.get_rank()} failed: {reason}", 1)


def describe_external_error(error: Exception) -> str | None:
    """Describe an error of a disk or of another rank in one line. Return None for all other errors."""
    if isinstance(error, RingFault | LoaderError):
        return str(error)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"{error}: check the disk, then launch the same name again to resume"
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        return f"another rank has exited; see the output of that rank for the reason: {str(error).splitlines()[0]}"
    return None


def describe_compile_error(error: BackendCompilerFailed) -> str:
    """Describe an error of torch.compile: in one line if its cache is damaged, and otherwise with a traceback."""
    advice = f"if an earlier launch was killed while it compiled, remove {cache_dir()}; otherwise set trainer.compile=false"
    cause = error.inner_exception
    if isinstance(cause, ImportError | OSError):
        return f"torch.compile failed: {cause}; {advice}"
    return "".join(traceback.format_exception(error)) + advice


def terminate(store: dist.Store, text: str, status: int) -> NoReturn:
    """Exit at once. Only the first rank that fails prints `text`."""
    if store.add("failures", 1) == 1:
        print(text, file=sys.stderr, flush=True)
        write_error_file(text)
    os._exit(status)
