"""One job at a time trains in a directory: two would overwrite each other's metrics and checkpoints."""

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from ringattn.train.config import ConfigError
from ringattn.train.parallel import mesh as parallel


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold `directory` for this job; the lock ends with the process, however that ends.

    Raises:
        ConfigError: on every rank: another process holds it.
    """
    with ExitStack() as held:
        with parallel.sync_errors():
            if dist.get_rank() == 0:
                _lock(directory, held)
        yield


def _lock(directory: Path, held: ExitStack) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    file = held.enter_context(open(directory / ".lock", "w"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another process trains in {directory}: wait until it is done, or give this run another name"
        ) from None
    except OSError:  # a file system without locks
        pass
