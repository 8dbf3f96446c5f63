"""Time our kernels beside PyTorch's SDPA, FlexAttention and flash-attn-4, and refuse to time a wrong result.

    python scripts/benchmark_kernels.py                                     # all suites at S = 16,384
    python scripts/benchmark_kernels.py --suite speed --lengths 2048 4096 8192 16384 32768 65536 131072
    python scripts/benchmark_kernels.py --suite blocks memory --peers ringattn flex
    python scripts/benchmark_kernels.py --device cpu                        # a dry run of everything, tiny

Suites, all bf16, B = 1: `speed` (D 64 and 128, causal and full; with --lengths a curve, D 128 causal), `masks` (a window of
4,096, packed documents), `heads` (32 query heads on 32 and on 8 key heads), `blocks` (block-sparse) and `memory` (beside
N x N). Every output and gradient is first held to float64 at that very case: all rows of the first and the last head. Writes
README.md, rows.json and pictures to --output.

FLOPs count 4 H pairs D forward, of the pairs that the mask allows, and 2.5 times that backward. GB/s are q, k, v and out once
(backward: dout and the gradients too) over the time. Extra memory is the peak above the tensors given and returned.
"""

import argparse
import datetime
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import benchmark_report  # noqa: E402
import peers  # noqa: E402
from cases import TOLERANCE, Case, expected_results, relative_error  # noqa: E402

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.125)
SUITES = ("speed", "masks", "heads", "blocks", "memory")
SIZES = {
    "cuda": {"length": 16384, "heads": 16, "head_dims": (64, 128), "memory": (16384, 65536, 131072, 262144)},
    "cpu": {"length": 256, "heads": 2, "head_dims": (16,), "memory": (128, 256)},
}


def suite_cases(suite: str, lengths: list[int], device: torch.device) -> list[Case]:
    """The cases of a suite; `lengths` are those of the curve of `speed`. On the CPU everything is tiny."""
    size = SIZES[device.type]
    length, heads, head_dims = size["length"], size["heads"], size["head_dims"]
    if suite == "memory":
        return [Case("causal", n, 2, head_dims[-1]) for n in size["memory"]]
    if suite == "blocks":
        blocks = [Case("blocks", length, heads, head_dims[-1], kept) for kept in FRACTIONS]
        return [Case("full", length, heads, head_dims[-1]), *blocks]
    if suite == "heads":
        return [Case("causal", length, 2 * heads, head_dims[-1], key_heads=key_heads) for key_heads in (2 * heads, heads // 2)]
    kinds = {"speed": ("causal", "full"), "masks": ("causal", "window", "documents")}[suite]
    cases = [Case(kind, length, heads, dim) for dim in head_dims for kind in kinds]
    return cases + [Case("causal", n, heads, head_dims[-1]) for n in lengths if suite == "speed"]


def median_ms(function: Callable[[], object], device: torch.device) -> float:
    """Median milliseconds of a call; on the CPU, of three by the clock on the wall."""
    if device.type == "cuda":
        return triton.testing.do_bench(function, warmup=25, rep=100, return_mode="median")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def extra_bytes(function: Callable[[], tuple[Tensor, ...]], device: torch.device) -> int | None:
    """Peak memory of a call above what was there before and what it returns; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results)


def measure_direction(
    case: Case, direction: str, function: Callable[[], tuple[Tensor, ...]], expected: dict[str, Tensor], device: torch.device
) -> dict:
    """Errors of the results of a call, and if they are right its time and memory."""
    errors = {name: relative_error(x, expected[name]) for name, x in zip(expected, function(), strict=True)}
    if not max(errors.values()) <= TOLERANCE:
        return {"status": "wrong", "errors": errors}
    memory, ms = extra_bytes(function, device), median_ms(function, device)
    rates = {"tflops": case.flops(direction) / ms * 1e-9, "gb_per_s": case.bytes(direction) / ms * 1e-6}
    return {"status": "ok", "errors": errors, "ms": ms, **rates, "extra_bytes": memory}


def measure(case: Case, prepare: peers.Prepare, tensors: list[Tensor], expected: dict[str, Tensor]) -> dict[str, dict]:
    """What `measure_direction` found forward and backward, or why there is nothing: a peer that fails ends nothing else."""
    (*inputs, dout), device = tensors, tensors[0].device
    found = {}
    try:
        attend = prepare(case, device)
        wanted = {"out": expected["out"]}
        found["forward"] = measure_direction(case, "forward", lambda: (attend(*inputs),), wanted, device)
        out = attend(*inputs)
        wanted = {name: expected[name] for name in ("dq", "dk", "dv")}
        found["backward"] = measure_direction(
            case, "backward", lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True), wanted, device
        )
    except peers.Unsupported:
        reason = {"status": "unsupported"}
    except Exception as error:  # whatever a peer's compiler or kernel raises
        reason = {"status": "failed", "error": f"{type(error).__name__}: {str(error)[:500]}"}
    return {direction: found.get(direction) or reason for direction in ("forward", "backward")}


def measure_case(case: Case, implementations: dict[str, peers.Prepare], device: torch.device) -> list[dict]:
    """One row an implementation."""
    tensors = case.inputs(device)
    expected = expected_results(case, *tensors)
    rows = []
    for name, prepare in implementations.items():
        start = time.perf_counter()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        found = measure(case, prepare, tensors, expected)
        rows.append({"implementation": name, "case": case, **found})
        cells = [benchmark_report.describe(found[direction]) for direction in ("forward", "backward")]
        print(f"{case} {name}: {' | '.join(cells)} [{time.perf_counter() - start:.0f} s]", flush=True)
    return rows


def machine(device: torch.device, implementations: dict[str, peers.Prepare]) -> str:
    """Hardware and versions, for the head of the table."""
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    if device.type != "cuda":
        return f"CPU (a dry run), {versions}"
    if "fa4" in implementations:
        versions += f", flash-attn-4 {peers.version_of('flash-attn-4')}"
    return f"{torch.cuda.get_device_name()}, {versions}, cuDNN {torch.backends.cudnn.version()}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    today = datetime.date.today()
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / f"{today}-kernels", help="a directory")
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=SUITES, help="default: all")
    parser.add_argument("--lengths", nargs="+", type=int, default=[], help="of the curve, multiples of 128")
    parser.add_argument("--peers", nargs="+", choices=peers.IMPLEMENTATIONS, help="default: all that run here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, tiny")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --device cpu makes a dry run")
    if any(n <= 0 or n % 128 for n in arguments.lengths):
        parser.error(f"--lengths {arguments.lengths}: each must be a positive multiple of 128")
    return arguments


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    device = torch.device(arguments.device)
    implementations = peers.available(device)
    if arguments.peers:
        implementations = {name: x for name, x in implementations.items() if name in arguments.peers}
    arguments.output.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "scripts/benchmark_kernels.py", *argv])
    head = {"date": str(datetime.date.today()), "machine": machine(device, implementations), "command": command}
    suites, rows = {}, {}
    for suite in arguments.suite:
        suites[suite] = list(dict.fromkeys(suite_cases(suite, arguments.lengths, device)))
        for case in suites[suite]:
            if case not in rows:
                rows[case] = measure_case(case, implementations, device)
                (arguments.output / "rows.json").write_text(benchmark_report.to_json(head, rows))
        # after every suite, so that a run that is cut short leaves what it has
        benchmark_report.write(arguments.output, head, suites, rows)
    print((arguments.output / "README.md").read_text())
    ours = [row for found in rows.values() for row in found if row["implementation"] == peers.OURS]
    return int(any(row[direction]["status"] != "ok" for row in ours for direction in ("forward", "backward")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
