"""Run train/run.py as a user does, on a corpus and a model that take seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "train" / "run.py"
SMALL = [
    *("data=text", "model.layers=2", "model.dim=32", "model.heads=4", "model.kv_heads=2", "data.seq_len=64"),
    *("logger=off", "trainer.sample_tokens=0", "trainer.device=cpu"),
]


def write_corpus(directory: Path) -> str:
    """Forty short documents; returns what data.path takes."""
    directory.mkdir(parents=True)
    for i in range(40):
        (directory / f"{i:02}.txt").write_text(
            " ".join(f"{n} is {n % (i + 2)} more than a multiple of {i + 2}." for n in range(30))
        )
    return f"{directory}/*.txt"


def command(ranks: int, script: Path | str, *arguments: str) -> list[str]:
    """The command line of a job under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    return [*torchrun, *(["-m", script] if isinstance(script, str) else [str(script)]), *arguments]


def environment(directory: Path) -> dict[str, str]:
    """A cache of its own, so that nothing is found that another test, or the user, has left."""
    return {**os.environ, "HF_HOME": str(directory / "cache"), "PYTHONPATH": str(ROOT)}


def launch(ranks: int, directory: Path, *arguments: str, script: Path | str = SCRIPT) -> subprocess.CompletedProcess:
    """Run a job in `directory` to its end."""
    return subprocess.run(
        command(ranks, script, *arguments),
        cwd=directory,
        env=environment(directory),
        capture_output=True,
        text=True,
        timeout=240,
    )


def launch_and_kill(ranks: int, directory: Path, *arguments: str, when: Path) -> None:
    """Start a job and kill -9 all its processes as soon as `when` exists."""
    with open(directory / "killed.log", "w") as output:
        process = subprocess.Popen(
            command(ranks, SCRIPT, *arguments),
            cwd=directory,
            env=environment(directory),
            stdout=output,
            stderr=output,
        )
        try:
            deadline = time.monotonic() + 240
            while not when.exists():
                assert process.poll() is None, (directory / "killed.log").read_text()
                assert time.monotonic() < deadline, f"{when} never came"
                time.sleep(0.02)
        finally:
            kill_tree(process.pid)
            process.wait()


def own_errors(stderr: str) -> str:
    """What the ranks wrote, without the report that torchrun adds when one of them ends with an error."""
    return stderr.split("torch/distributed/elastic/")[0]


def kill_tree(root: int) -> None:
    """kill -9 a process and all that descend from it: torchrun gives its ranks sessions of their own."""
    for pid in {root} | descendants(root):
        os.kill(pid, signal.SIGKILL)


def descendants(root: int) -> set[int]:
    """The processes that a process has begun, and those that they have."""
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
