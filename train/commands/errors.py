"""End a command on all ranks after an error."""

import errno
import os
import sys
import traceback
from typing import NoReturn

import torch
import torch.distributed as dist
from hydra.errors import HydraException
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.runtime.cache_dir_utils import cache_dir

from ringattn.comm.watchdog import RingFault, TransportError
from ringattn.train.commands.messages import SETTING_ERRORS, write_error_file
from ringattn.train.data.loader import LoaderError
from ringattn.train.data.shards import UNWRITABLE
from ringattn.train.parallel.memory.capacity import InsufficientMemory
from ringattn.train.step import Diverged

DISK_ERRORS = (*UNWRITABLE, errno.EIO, errno.ESTALE, errno.EACCES, errno.EPERM)
# The types of user errors, which a command reports in one line. After a user error, a sweep continues with its next job.
USER_ERRORS = (*SETTING_ERRORS, Diverged, HydraException)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, InsufficientMemory | torch.OutOfMemoryError | MemoryError):
        return True
    # If memory runs out, Triton and PyTorch's CPU allocator raise a RuntimeError.
    return isinstance(error, RuntimeError) and ("out of memory" in str(error) or "DefaultCPUAllocator" in str(error))


def terminate_on_error(store: dist.Store, error: Exception) -> NoReturn:
    """Exit at once after an error that is not a user error. Then torchrun terminates the other ranks."""
    described = describe_compile_error(error) if isinstance(error, BackendCompilerFailed) else describe_external_error(error)
    reason = described or "".join(traceback.format_exception(error))
    terminate(store, f"rank {dist.get_rank()} failed: {reason}", 1)


def describe_external_error(error: Exception) -> str | None:
    """Describe an error of a disk, a transport or another rank in one line. Return None for all other errors."""
    if isinstance(error, RingFault | TransportError | LoaderError):
        return str(error)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"{error}: check the disk and its permissions, then launch the same name again to resume"
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        return f"another rank has exited; see the output of that rank for the reason: {str(error).splitlines()[0]}"
    return None


def describe_compile_error(error: BackendCompilerFailed) -> str:
    """Describe an error of torch.compile: one line if its cache is damaged, or else a traceback."""
    advice = f"if an earlier launch was killed while it compiled, remove {cache_dir()}; otherwise set trainer.compile=false"
    cause = error.inner_exception
    if isinstance(cause, ImportError | OSError):
        return f"torch.compile failed: {cause}; {advice}"
    return "".join(traceback.format_exception(error)) + advice


def terminate(store: dist.Store, text: str, status: int) -> NoReturn:
    """Exit at once. Only the first rank that fails prints `text`."""
    try:
        is_first = store.add("failures", 1) == 1
    except dist.DistError:  # The process that hosts the key-value store has exited. Without torchrun, rank 0 hosts it.
        is_first = True
    if is_first:
        print(text, file=sys.stderr, flush=True)
        write_error_file(text)
    os._exit(status)
