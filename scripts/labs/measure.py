"""Parse the options of labs, measure the time and the memory of a call, and limit the memory."""

import argparse
import os
import resource
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from scripts import command
from scripts.plots import plt, save_plot

# Without a GPU, PyTorch's profiler would print error messages of its own.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
OUTPUT = command.ROOT / "outputs" / "labs"
CPU_REPEATS = 5
MIB = 2**20
# The first number in /proc/self/statm is the virtual memory in pages. Only Linux has such a file.
MEMORY_FILE = Path("/proc/self/statm")


def new_parser(doc: str, name: str) -> argparse.ArgumentParser:
    """Create the parser of a lab with the options --device and --output.

    Args:
        doc: the help text.
        name: the default name of the picture, outputs/labs/<name>.png.
    """
    parser = command.new_parser(doc)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help="default: cuda if there is a GPU")
    output = OUTPUT / f"{name}.png"
    parser.add_argument("--output", type=command.png_file, default=output, help=f"default: outputs/labs/{name}.png")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse the arguments, and convert --device to a `torch.device`. Exit if the device is missing."""
    args = parser.parse_args(argv)
    args.device = torch.device(args.device)
    if args.device.type == "cpu":
        torch.set_num_threads(1)
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine has no CUDA device, use --device cpu")
    return args


def describe_machine(device: torch.device) -> str:
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "1 CPU thread"
    return f"{machine}, torch {torch.__version__}"


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of a call in milliseconds. The first call is not timed.

    On a GPU, the result is the median time of many calls. On a CPU, the result is the shortest time of a few calls.
    """
    if device.type == "cuda":
        import triton

        ms = triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median")
        assert isinstance(ms, float)
        return ms
    call()
    seconds = []
    for _ in range(CPU_REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of a call in bytes. Memory that was allocated before the call is not counted.

    On a CPU, the profiler of PyTorch records every allocation and every release of a tensor.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    profiler: Any = profile.profiler
    changes = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        allocated += change.nbytes()
        peak = max(peak, allocated)
    return peak


@contextmanager
def limited_memory(limit: int, device: torch.device) -> Generator[None]:
    """Return a context manager that limits the additional memory to `limit` bytes.

    The limit applies only to CPU memory, and only on Linux.
    """
    if device.type == "cuda" or not MEMORY_FILE.exists():
        yield
        return
    old_limits = resource.getrlimit(resource.RLIMIT_AS)
    present = int(MEMORY_FILE.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (present + limit, old_limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old_limits)


def write_picture(figure: plt.Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_plot(figure, path)
    print(f"\nwrote {path}")
