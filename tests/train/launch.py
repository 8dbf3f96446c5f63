"""Run the training command as a user does, on a corpus and a model for which a run takes seconds.

There are three ways, from the cheapest to the most realistic. The fixture `run_command_line` uses this process as the only
rank, `launch_ranks` forks several processes, and `launch` starts torchrun.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import torch.distributed as dist

from ringattn.train import preemption
from ringattn.train.commands import run
from scripts.check.kills import write_corpus as write_corpus
from scripts.command import child_environment, rank_variables, serve_store
from tests.distributed import start_ranks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "train" / "run.py"
SMALL = [
    *("data=text", "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "data.seq_len=64"),
    *(
        "data.eval_fraction=0",
        "logger=off",
        "trainer.sample_tokens=0",
        "trainer.device=cpu",
        "trainer.batch_size=2",
        "trainer.log_every=1",
    ),
]


def launch_ranks(
    ranks: int, directory: Path, *arguments: str, prepare: Callable[[int], None] | None = None
) -> tuple[bool, str, str]:
    """Run the training command on several forked processes until all of them have exited.

    Args:
        ranks: the number of processes.
        directory: the working directory, in which the processes also write their output.
        arguments: the arguments of the command.
        prepare: a function at the top level of a module, which every process calls with its rank before the command starts.

    Returns:
        Whether all processes exited with status 0, and what all ranks wrote to stdout and to stderr.
    """
    store = serve_store()  # as torchrun does
    variables = [rank_variables(store, rank, ranks) for rank in range(ranks)]
    arguments = directory, variables, list(arguments), prepare
    processes = start_ranks(_run_as_rank, ranks, directory / "store", *arguments).processes
    try:
        # `run_ranks` would terminate the other ranks when one of them fails, and they could not report what they noticed.
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
            process.join()
    stdout, stderr = ("".join(path.read_text() for path in sorted(directory.glob(f"rank*.{end}"))) for end in ("out", "err"))
    return all(process.exitcode == 0 for process in processes), stdout, stderr


def _run_as_rank(
    directory: Path, variables: list[dict[str, str]], arguments: list[str], prepare: Callable[[int], None] | None
) -> None:
    """Run the training command in this process, with the environment variables that torchrun sets."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= variables[rank]
    for number, suffix in ((1, "out"), (2, "err")):
        os.dup2(os.open(directory / f"rank{rank}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(directory)
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    sys.argv = ["train/run.py", *arguments]
    if prepare is not None:
        prepare(rank)
    run.main()


def command(ranks: int, script: Path | str, *arguments: str, options: Iterable[str] = ()) -> list[str]:
    """The command line of a job under torchrun, which receives `options`. The script is a path, or the name of a module."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *options]
    return [*torchrun, *(["-m", script] if isinstance(script, str) else [str(script)]), *arguments]


def environment(directory: Path) -> dict[str, str]:
    """The environment of a job, with a cache of its own, so that the job does not use text that an earlier job has cached."""
    return child_environment(HF_HOME=str(directory / "cache"))


def launch(ranks: int, directory: Path, *arguments: str, script: Path | str = SCRIPT) -> subprocess.CompletedProcess:
    """Run a job under torchrun in a directory, and wait until it has finished."""
    return subprocess.run(
        command(ranks, script, *arguments),
        cwd=directory,
        env=environment(directory),
        capture_output=True,
        text=True,
        timeout=240,
    )


@contextmanager
def start(
    ranks: int, directory: Path, *arguments: str, options: Iterable[str] = (), script: Path = SCRIPT
) -> Iterator[subprocess.Popen]:
    """Start a job under torchrun whose output goes to output.log. All its processes are killed at the end of the context."""
    with open(directory / "output.log", "w") as output:
        process = subprocess.Popen(
            command(ranks, script, *arguments, options=options),
            cwd=directory,
            env=environment(directory),
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_tree(process.pid)
            process.wait()


def wait_until(condition: Callable[[], bool], process: subprocess.Popen, directory: Path) -> None:
    """Wait until a condition holds while the job is running."""
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None, (directory / "output.log").read_text()
        assert time.monotonic() < deadline, "the condition does not hold"
        time.sleep(0.02)


def receive_signal(number: int) -> None:
    """Send a stop signal to this process, and wait until the thread of `preemption.handle_stop_signals` has recorded it."""
    os.kill(os.getpid(), number)
    while number not in preemption._received_signals:
        time.sleep(0.001)


def launch_and_kill(ranks: int, directory: Path, *arguments: str, when: Path) -> None:
    """Start a job under torchrun, and kill all its processes with SIGKILL as soon as the file `when` exists."""
    with start(ranks, directory, *arguments) as process:
        wait_until(when.exists, process, directory)


def own_errors(stderr: str) -> str:
    """The ranks' output on stderr, without the report that torchrun adds if a rank exits with an error."""
    return stderr.split("torch/distributed/elastic/")[0]


def kill_tree(root: int) -> None:
    """Kill a process and all its descendants. Ranks of torchrun are not in its process group, so killing the group is not
    enough.
    """
    for pid in {root} | descendants(root):
        os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pids: Iterable[int]) -> None:
    """Wait until processes that need not be children of this process have ended."""
    deadline = time.monotonic() + 100
    while running := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"processes {running} are left"
        time.sleep(0.02)


def descendants(root: int) -> set[int]:
    """The process ids of the children of a process, of their children, and so on."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, added = set(), {root}
    while added:
        added = {pid for pid, parent in parents.items() if parent in added}
        found |= added
    return found
