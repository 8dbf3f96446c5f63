"""Run a function on several ranks: processes on this machine that are connected by gloo or NCCL.

A new Python process needs more than a second to import torch. The ranks are therefore forked from a server process that has
already imported torch and ringattn. A fork takes about 20 ms. Every call of `run_ranks` gets new processes and a new process
group, so a test that fails, hangs or crashes cannot affect the tests after it.

On a GPU, a new process also needs seconds to initialise CUDA and to load kernels. The ranks of a `RankPool` therefore run one
function after another. If a function fails, the pool starts new ranks for the next function.
"""

import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from io import TextIOWrapper
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.figure import Figure

from ringattn.comm.shared_gpus import SHARE_GPUS
from ringattn.comm.watchdog import TIMEOUT as HOP_TIMEOUT
from scripts.command import rank_variables, serve_store
from tests.processes import freeze_objects, save_blank_picture, use_one_thread

# The server imports these modules before it forks the first rank.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        *("torch.distributed.fsdp", "datasets", "hypothesis", "matplotlib.figure", "pytest", "ringattn"),
        "ringattn.train.commands.run",
    ]
)

# After this many seconds, a rank writes its stacks to a file and exits. pytest's own timeout is longer.
TIMEOUT = 240

# The time in which gloo must connect all ranks. While a rank waits for connections, its timeout is five times as long.
# Afterwards, the ranks have torch's default timeout.
CONNECT_TIMEOUT = datetime.timedelta(seconds=9)

# A function of a pool may run for this long by default, in seconds.
POOL_TIMEOUT = 120
GRACE = 3  # seconds in which the other ranks of a pool may report after a rank has failed
WRITING = 10  # seconds in which a rank must write down its stacks

# The backends of the process group. "nccl" requires one GPU per rank. With "shared", several ranks use the same GPU.
BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl", "shared": "cpu:gloo,cuda:gloo"}
GPU_RANKS = (2, 4, 8)  # the numbers of ranks with which tests on GPUs run


def gpu_backend(ranks: int) -> str:
    """Return the backend for ranks on GPUs: "nccl" if every rank has its own GPU, and "shared" otherwise."""
    return "nccl" if torch.cuda.device_count() >= ranks else "shared"


def run_ranks(function: Callable, ranks: int, directory: Path, *args: object, backend: str = "gloo") -> None:
    """Call `function(*args)` on every rank and wait until all ranks have returned.

    Args:
        function: a function at the top level of a module. The ranks import that module.
        ranks: the number of processes.
        directory: a directory, possibly new, for the file with which the ranks find each other.
        args: arguments that pickle can copy to the ranks.
        backend: a key of BACKENDS.

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
    # Ranks that exited without a destructor leave the file, and the new ranks would connect to their addresses.
    (directory / "store").unlink(missing_ok=True)
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
    _join(rank, ranks, directory, timeout, backend, environment)
    # If the function fails, the process group is not destroyed first. Otherwise, the other ranks would fail as well, before
    # this rank could report its exception.
    function(*args)
    dist.destroy_process_group()
    os._exit(0)  # The threads of gloo sometimes abort a process that exits in the usual way.


def _join(rank: int, ranks: int, directory: Path, timeout: float, backend: str, environment: dict[str, str]) -> TextIOWrapper:
    """Join the process group as one rank. Return the file to which the rank writes its stacks after the timeout."""
    stacks = open(directory / f"stacks_of_rank_{rank}", "w")  # noqa: SIM115 - the file stays open for faulthandler
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(timeout, exit=True, file=stacks)
    # The server was started by an earlier test, so the variables that the current test has set must be copied.
    os.environ.clear()
    os.environ.update(environment)
    use_one_thread()
    freeze_objects()
    Figure.savefig = save_blank_picture
    if backend == "shared":
        os.environ[SHARE_GPUS] = "1"
    if backend != "gloo":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    _connect(BACKENDS[backend], dist.FileStore(str(directory / "store"), ranks), rank, ranks)
    return stacks


def _connect(backend: str, store: dist.Store, rank: int, ranks: int) -> None:
    """Create the process group.

    If other jobs start and end on the machine, gloo sometimes accepts the connection of another job. One rank then fails when
    that job ends, and the other ranks wait until the timeout. All ranks therefore try again, with new addresses.
    """
    for attempt in range(3):
        dist.distributed_c10d._world.group_count = 0  # names the keys of the group, and a failed attempt changes it
        prefixed = dist.PrefixStore(f"group {attempt}", store)
        try:
            dist.init_process_group(backend, store=prefixed, rank=rank, world_size=ranks, timeout=CONNECT_TIMEOUT)
        except RuntimeError as error:
            print(f"attempt {attempt} to connect rank {rank}: {error}", file=sys.stderr)
        store.set(f"{attempt}/{rank}", str(dist.is_initialized()))
        connected = [store.get(f"{attempt}/{other}") for other in range(ranks)]  # waits for every rank
        if connected == [b"True"] * ranks:
            dist.distributed_c10d._set_pg_timeout(dist.default_pg_timeout)
            return
        if dist.is_initialized():
            dist.destroy_process_group()
    raise RuntimeError("the ranks could not be connected; stderr contains the reasons")


def run_script(script: Path, ranks: int, directory: Path, *arguments: str) -> str:
    """Run a script as torchrun does, on forked ranks, and return what all ranks have written to stdout.

    The exceptions are those of `run_ranks`, also if the script exits with another status than 0.
    """
    store = serve_store()
    variables = [rank_variables(store, rank, ranks) for rank in range(ranks)]
    run_ranks(_run_script, ranks, directory, [str(script), *arguments], variables, directory)
    return "".join(path.read_text() for path in sorted(directory.glob("rank_*.out")))


def _run_script(argv: list[str], variables: list[dict[str, str]], directory: Path) -> None:
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= variables[rank]
    sys.argv = argv
    with open(directory / f"rank_{rank}.out", "w") as output, redirect_stdout(output):
        runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)


class RankPool:
    """Ranks that stay alive and run one function after another. The first call of `run` starts them.

    Args:
        ranks: the number of processes.
        directory: a directory for the files of the ranks.
        backend: a key of BACKENDS.
        timeout: how long a function may run, in seconds. A hop of a ring may take half of this time.
    """

    def __init__(self, ranks: int, directory: Path, backend: str, timeout: int = POOL_TIMEOUT) -> None:
        self.ranks, self.directory, self.backend, self.timeout = ranks, directory, backend, timeout
        self.starts = 0  # how often the pool has started ranks
        self._processes: list[multiprocessing.Process] = []
        self._connections: list[multiprocessing.connection.Connection] = []

    def run(self, function: Callable, *args: object) -> None:
        """Call `function(*args)` on every rank and wait until all ranks have returned.

        Args:
            function: a function at the top level of a module. The ranks import that module.
            args: arguments that pickle can copy to the ranks.

        Raises:
            AssertionError: a rank raised an exception, exited, or did not return within `timeout`. The message contains the
                traceback of each such rank, or its stacks and its output. All ranks have been killed.
        """
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                with suppress(BrokenPipeError):  # the rank has exited, which `_collect` reports
                    connection.send((function, args))
            reports = self._collect()
        except BaseException:  # such as pytest's timeout or Ctrl-C
            self.close()
            raise
        if reports:
            self.close()
            raise AssertionError(f"{function.__name__}{args} on {self.ranks} ranks:\n" + "\n".join(reports))

    def close(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        directory = self.directory / str(self.starts)
        directory.mkdir(parents=True)
        self.starts += 1
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.ranks):
            own, other = context.Pipe()
            environment = {HOP_TIMEOUT: str(self.timeout // 2)} | os.environ
            arguments = other, rank, self.ranks, directory, self.backend, self.timeout, environment
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            other.close()  # otherwise this process would not notice that the rank has exited
            self._processes.append(process)
            self._connections.append(own)

    def _collect(self) -> list[str]:
        """Wait until all ranks have returned. If a rank fails, return one report per rank that has not returned normally."""
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        reports: list[str] = []
        deadline = time.monotonic() + self.timeout
        while waiting and (ready := multiprocessing.connection.wait(waiting, max(0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    report = connection.recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    report = f"exited with status {self._processes[rank].exitcode}\n{self._output(rank)}"
                if report is not None:
                    reports.append(f"rank {rank}: {report}")
                    # The other ranks may wait forever for a rank that has failed.
                    deadline = min(deadline, time.monotonic() + GRACE)
        for rank in waiting.values():
            # The handler that faulthandler has registered for this signal writes the stacks of all threads.
            with suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        deadline = time.monotonic() + WRITING
        while time.monotonic() < deadline and not all("most recent call first" in self._output(x) for x in waiting.values()):
            time.sleep(0.02)
        return reports + [f"rank {rank} did not return\n{self._output(rank)}" for rank in waiting.values()]

    def _output(self, rank: int) -> str:
        """Return the end of what a rank has written to stderr, which includes its stacks."""
        path = self.directory / str(self.starts - 1) / f"stacks_of_rank_{rank}"
        return path.read_text()[-4000:] if path.exists() else ""


def _serve(
    connection: multiprocessing.connection.Connection,
    rank: int,
    ranks: int,
    directory: Path,
    backend: str,
    timeout: float,
    environment: dict[str, str],
) -> None:
    """Join the process group as one rank of a pool, and call the functions that arrive over `connection`."""
    try:
        stacks = _join(rank, ranks, directory, timeout, backend, environment)
    except BaseException:
        connection.send(traceback.format_exc())
        os._exit(1)
    os.dup2(stacks.fileno(), sys.stderr.fileno())  # the watchdog and CUDA write messages to stderr
    faulthandler.register(signal.SIGUSR1, file=stacks)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:  # the caller has closed the pool or is gone
            os._exit(0)
        try:
            function(*args)
        except BaseException:
            connection.send(traceback.format_exc())
        else:
            connection.send(None)
        faulthandler.cancel_dump_traceback_later()  # the caller has a timeout of its own


@pytest.fixture(scope="module", params=GPU_RANKS, ids=lambda n: f"P{n}")
def gpu_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """A pool of 2, 4 and 8 ranks on GPUs, which all tests of a module use. If there are too few GPUs, ranks share a GPU."""
    ranks = request.param
    pool = RankPool(ranks, tmp_path_factory.mktemp(f"ranks_{ranks}"), gpu_backend(ranks))
    yield pool
    pool.close()
