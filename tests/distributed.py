"""Run a function on several ranks: processes on this machine that are connected by gloo or NCCL.

A new Python process needs more than a second to import torch. The ranks are therefore forked from a server process that has
already imported torch and ringattn. A fork takes about 20 ms. Every call gets new processes and a new process group, so
a test that fails, hangs or crashes cannot affect the tests after it.
"""

import faulthandler
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# The server imports these modules before it forks the first rank.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["torch.distributed.fsdp", "pytest", "ringattn", "ringattn.train.run"]
)

# A rank that runs for longer than this, in seconds, writes down where it is and exits. pytest's own timeout is longer.
TIMEOUT = 240


def run_ranks(function: Callable, ranks: int, directory: Path, *args: object, backend: str = "gloo") -> None:
    """Call `function(*args)` on every rank and wait until all ranks have returned.

    Args:
        function: a function at the top level of a module. The ranks import that module.
        ranks: the number of processes.
        directory: a new or empty directory for the file with which the ranks find each other.
        args: arguments that pickle can copy to the ranks.
        backend: "gloo", or "nccl" with one GPU per rank.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised an exception; the message contains its traceback.
        torch.multiprocessing.ProcessExitedException: a rank crashed or exceeded TIMEOUT; a note contains its stacks.
    """
    context = start_ranks(function, ranks, directory, *args, backend=backend)
    try:
        while not context.join():
            pass
    except mp.ProcessExitedException as error:
        for stacks in sorted(directory.glob("stacks_of_rank_*")):
            error.add_note(f"{stacks.name}:\n{stacks.read_text()}")
        raise
    finally:
        # If pytest's timeout or Ctrl-C interrupts the loop, ranks may still be running.
        for process in context.processes:
            process.kill()
            process.join()


def start_ranks(function: Callable, ranks: int, directory: Path, *args: object, backend: str = "gloo") -> mp.ProcessContext:
    """Start the ranks of `run_ranks` and return their processes. The caller must wait for them."""
    directory.mkdir(parents=True, exist_ok=True)
    arguments = ranks, directory, TIMEOUT, backend, dict(os.environ), function, args
    return mp.start_processes(_rank, arguments, nprocs=ranks, join=False, start_method="forkserver")


def _rank(
    rank: int,
    ranks: int,
    directory: Path,
    timeout: float,
    backend: str,
    environment: dict[str, str],
    function: Callable,
    args: tuple,
) -> None:
    """Join the process group as one rank and call the function."""
    stacks = open(directory / f"stacks_of_rank_{rank}", "w")
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
    # The server was started by an earlier test, so the variables that the current test has set must be copied.
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{directory / 'store'}", rank=rank, world_size=ranks)
    # If the function fails, the process group is not destroyed first. Otherwise the other ranks would fail as well, before
    # this rank could report its exception.
    function(*args)
    dist.destroy_process_group()
    os._exit(0)  # The threads of gloo sometimes abort a process that exits in the usual way.
