"""Functions for the command lines of all scripts, and for the headers of their results.

The header of a result states the date, the machine, the versions and the command of the measurement.
"""

import argparse
import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
# The folder for the results of benchmarks, which git ignores
RESULTS = ROOT / "outputs" / "benchmarks"
# Settings of train/run.py for benchmarks of steps: no evaluation, checkpoint or sample.
ONLY_STEPS = (
    "logger=off",
    "data.eval_split=null",
    "data.eval_fraction=0",
    "trainer.checkpoint_every=0",
    "trainer.save_final=false",
    "trainer.sample_tokens=0",
)


def new_parser(doc: str) -> argparse.ArgumentParser:
    """Create the parser of a script, whose docstring `doc` becomes the help text."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def at_least(minimum: int) -> Callable[[str], int]:
    """Create an argparse type that accepts integers of at least `minimum` and below 2**31."""

    def parse(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,10}", text) or not minimum <= int(text) < 2**31:
            raise argparse.ArgumentTypeError(f"{text!r:.60} must be an integer of at least {minimum} and below 2**31")
        return int(text)

    return parse


def png_file(text: str) -> Path:
    """An argparse type for the path of a picture, which must be a PNG file."""
    if Path(text).suffix != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} must end with .png")
    return Path(text)


@contextmanager
def exit_without_memory() -> Generator[None]:
    """Exit with one line if the memory runs out inside the context. Of several ranks, only one prints the line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        from ringattn.train.commands.errors import is_out_of_memory, terminate  # this import is slow

        if not is_out_of_memory(error):
            raise
        text = f"error: the memory is too small, use shorter lengths: {''.join(str(error).splitlines()[:1])}"
        if dist.is_initialized():
            terminate(dist.distributed_c10d._get_default_store(), text, 1)
        print(text, file=sys.stderr)
        sys.exit(1)


def torchrun(ranks: int, *arguments: str) -> list[str]:
    """Return the command line that starts `ranks` processes on this machine, for `subprocess.run`.

    Args:
        ranks: the number of processes.
        arguments: a script, or "-m" and a module, followed by its own arguments.
    """
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *arguments]


def child_environment(root: Path = ROOT, **variables: str) -> dict[str, str]:
    """Return the environment of a child process that imports the packages in `root`.

    The folder `root` is prepended to PYTHONPATH.

    Args:
        root: the folder.
        variables: further environment variables of the child process.
    """
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": paths} | variables


def serve_store() -> dist.TCPStore:
    """Serve a key-value store at a free port until the returned object is deleted."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def rank_variables(store: dist.TCPStore, rank: int, ranks: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for one process."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in variables.items()}


def describe_run(
    module: str, argv: list[str], gpus: int, ranks: int | None = None, packages: list[str] | None = None
) -> dict[str, Any]:
    """Describe a measurement on CUDA devices: the date, the machine, the versions, and the command.

    Args:
        module: the name of the benchmark module, such as "scripts.bench.ring".
        argv: the command-line arguments of the module.
        gpus: the number of GPUs on which the benchmark ran.
        ranks: the number of ranks, or None if the module was started without torchrun.
        packages: the names of further installed packages whose versions are included.
    """
    launcher = ["python"] if ranks is None else ["torchrun", f"--nproc_per_node={ranks}"]
    versions = [f"torch {torch.__version__}", f"triton {version_of('triton')}", f"cuDNN {torch.backends.cudnn.version()}"]
    versions += [f"{package} {version_of(package)}" for package in packages or []]
    versions.append(f"Python {platform.python_version()}")
    return {
        "date": str(datetime.date.today()),
        "machine": f"{gpus} x {torch.cuda.get_device_name()}, {', '.join(versions)}",
        "command": shlex.join([*launcher, "-m", module, *argv]),
    }


def version_of(package: str) -> str:
    """Return the version of a package, or "of unknown version" if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"
