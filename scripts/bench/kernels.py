"""Time our kernels beside PyTorch's SDPA, FlexAttention and flash-attn-4, and refuse to time a wrong result.

    python -m scripts.bench.kernels                                     # all suites at S = 16,384
    python -m scripts.bench.kernels --suite speed --lengths 2048 4096 8192 16384 32768 65536 131072
    python -m scripts.bench.kernels --suite blocks memory --peers ringattn flex
    python -m scripts.bench.kernels --device cpu                        # a dry run of everything, tiny

Suites, all bf16, B = 1: `speed` (D 64 and 128, causal and full; with --lengths a curve, D 128 causal), `masks` (a window of
4,096, packed documents of 1 token to all, and of 1/256 to 1/2 of all), `heads` (32 query heads on 32 and on 8 key heads),
`blocks` (block-sparse) and `memory` (beside N x N). Every output and gradient is first held to float64 at that very case: all
rows of the first and the last head. Writes README.md, rows.json and pictures to --output.

A GPU that works at the limit of its power lowers its clock after a moment: a kernel timed after a pause, while others compile
or are checked, looks faster than it is, and one timed after a hungry one slower. So all implementations of a case are
prepared and checked first and then timed in turn, in rounds, forward and backward, every other round in reverse: every time a
call is repeated for 0.2 s to take the GPU to the clock that it can hold (not on the CPU), and timed at once. A figure is the
median over rounds; `samples` in rows.json are the milliseconds of each. With --graph calls are replayed from CUDA graphs,
which leaves out the host's time: of short sequences it is the larger part.

FLOPs count 4 H pairs D forward, of the pairs that the mask allows, and 2.5 times that backward. GB/s are q, k, v and out once
(backward: dout and the gradients too) over the time. Extra memory is the peak above the tensors given and returned.
"""

import argparse
import datetime
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import triton
from torch import Tensor

from scripts.bench import kernels_report, peers
from scripts.bench.cases import TOLERANCE, Case, expected_results, relative_error

ROOT = Path(__file__).resolve().parents[2]

FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.125)
HEATING = 0.2  # seconds
SUITES = ("speed", "masks", "heads", "blocks", "memory")
SIZES = {
    "cuda": {"length": 16384, "heads": 16, "head_dims": (64, 128), "memory": (16384, 65536, 131072, 262144)},
    "cpu": {"length": 256, "heads": 2, "head_dims": (16,), "memory": (128, 256)},
}
Call = Callable[[], tuple[Tensor, ...]]  # what is checked and timed: the results of one direction
Key = tuple[str, str]  # implementation, direction


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
    kinds = {"speed": ("causal", "full"), "masks": ("causal", "window", "documents", "short documents")}[suite]
    cases = [Case(kind, length, heads, dim) for dim in head_dims for kind in kinds]
    return cases + [Case("causal", n, heads, head_dims[-1]) for n in lengths if suite == "speed"]


def name_of(case: Case) -> str:
    """What --only is looked for in."""
    return f"{case.label} D{case.head_dim} S{case.length}"


def heat(call: Call, device: torch.device) -> None:
    """Calls back to back for HEATING seconds, a few at a time so that the queue stays short; none on the CPU."""
    if device.type != "cuda":
        return
    end = time.perf_counter() + HEATING
    while time.perf_counter() < end:
        for _ in range(4):
            call()
        torch.cuda.synchronize()


def median_ms(call: Call, device: torch.device) -> float:
    """Median milliseconds of a call; on the CPU, of three by the clock on the wall."""
    if device.type == "cuda":
        return triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median")
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def extra_bytes(call: Call, device: torch.device) -> int | None:
    """Peak memory of a call above what was there before and what it returns; None on the CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results)


def failure(error: Exception) -> dict:
    """What is reported of a direction that raised."""
    return {"status": "failed", "error": f"{type(error).__name__}: {str(error)[:500]}"}


def check_call(call: Call, expected: dict[str, Tensor], device: torch.device) -> dict:
    """Errors of the results of a call, and if they are right its extra memory."""
    errors = {name: relative_error(x, expected[name]) for name, x in zip(expected, call(), strict=True)}
    if not max(errors.values()) <= TOLERANCE:
        return {"status": "wrong", "errors": errors}
    return {"status": "ok", "errors": errors, "extra_bytes": extra_bytes(call, device)}


def check(
    case: Case, prepare: peers.Prepare, tensors: list[Tensor], expected: dict[str, Tensor]
) -> tuple[dict[str, dict], dict[str, Call]]:
    """By direction what `check_call` found, or why there is nothing; and the calls that passed. A failure ends nothing else."""
    (*inputs, dout), device = tensors, tensors[0].device
    found, calls = {}, {}
    try:
        attend = prepare(case, device)
        calls["forward"] = lambda: (attend(*inputs),)
        found["forward"] = check_call(calls["forward"], {"out": expected["out"]}, device)
        out = attend(*inputs)
        calls["backward"] = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
        found["backward"] = check_call(calls["backward"], {name: expected[name] for name in ("dq", "dk", "dv")}, device)
    except peers.Unsupported:
        reason = {"status": "unsupported"}
    except Exception as error:  # whatever a peer's compiler or kernel raises
        reason = failure(error)
    found = {direction: found.get(direction) or reason for direction in kernels_report.DIRECTIONS}
    return found, {direction: call for direction, call in calls.items() if found[direction]["status"] == "ok"}


def speed(case: Case, direction: str, samples: list[float]) -> dict:
    """The median of the rounds' milliseconds, and the rates at it."""
    ms = statistics.median(samples)
    rates = {"tflops": case.flops(direction) / ms * 1e-9, "gb_per_s": case.bytes(direction) / ms * 1e-6}
    return {"ms": ms, **rates, "samples": samples}


def captured(call: Call) -> Callable[[], None]:
    """`call` as a CUDA graph that replays it. All it stands on must have been queued in the current stream, not the default."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph.replay


def time_rounds(
    calls: dict[Key, Call], rounds: int, device: torch.device, graph: bool
) -> tuple[dict[Key, list[float]], dict[Key, dict]]:
    """Milliseconds of every call by round, and the failures: a call that raises has no more turns and ends nothing else."""
    calls, samples, failures = dict(calls), {key: [] for key in calls}, {}
    for turn in range(rounds):
        for key in list(samples)[:: -1 if turn % 2 else 1]:
            try:
                if graph and turn == 0:
                    calls[key] = captured(calls[key])
                heat(calls[key], device)
                samples[key].append(median_ms(calls[key], device))
            except Exception as error:
                failures[key] = failure(error)
                del samples[key]
    return samples, failures


def measure_case(
    case: Case, implementations: dict[str, peers.Prepare], device: torch.device, rounds: int, graph: bool
) -> list[dict]:
    """One row an implementation; the seconds printed are those before the timing, most of them compilation."""
    tensors = case.inputs(device)
    expected = expected_results(case, *tensors)
    rows, calls, seconds = {}, {}, {}
    for name, prepare in implementations.items():
        start = time.perf_counter()
        torch.cuda.empty_cache()
        found, passed = check(case, prepare, tensors, expected)
        calls |= {(name, direction): call for direction, call in passed.items()}
        rows[name] = {"implementation": name, "case": case, **found}
        seconds[name] = time.perf_counter() - start
    del expected
    torch.cuda.empty_cache()
    samples, failures = time_rounds(calls, rounds, device, graph)
    for (name, direction), times in samples.items():
        rows[name][direction] |= speed(case, direction, times)
    for (name, direction), found in failures.items():
        rows[name][direction] = found
    for name, row in rows.items():
        cells = [kernels_report.describe(row[direction]) for direction in kernels_report.DIRECTIONS]
        print(f"{case} {name}: {' | '.join(cells)} [{seconds[name]:.0f} s]", flush=True)
    return list(rows.values())


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
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose name has it, such as 'causal D128 S16384'")
    parser.add_argument("--lengths", nargs="+", type=int, default=[], help="of the curve, multiples of 128")
    parser.add_argument("--peers", nargs="+", choices=peers.IMPLEMENTATIONS, help="default: all that run here")
    parser.add_argument("--rounds", type=int, default=3, help="of timing; default: 3")
    parser.add_argument("--graph", action="store_true", help="replay calls from CUDA graphs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run, tiny")
    arguments = parser.parse_args(argv)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a CUDA device; --device cpu makes a dry run")
    if any(n <= 0 or n % 128 for n in arguments.lengths):
        parser.error(f"--lengths {arguments.lengths}: each must be a positive multiple of 128")
    if arguments.graph and arguments.device != "cuda":
        parser.error("--graph needs a CUDA device")
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: must be positive")
    return arguments


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    # graphs cannot capture the default stream, nor the backward of what ran there
    with torch.cuda.stream(torch.cuda.Stream()) if arguments.graph else nullcontext():
        return run(argv, arguments)


def choose_cases(arguments: argparse.Namespace, device: torch.device) -> dict[str, list[Case]]:
    """The cases asked for, by suite; none of a suite that has none of them."""
    suites = {}
    for suite in arguments.suite:
        cases = dict.fromkeys(suite_cases(suite, arguments.lengths, device))
        suites[suite] = [case for case in cases if re.search(arguments.only, name_of(case))]
    return {suite: cases for suite, cases in suites.items() if cases}


def run(argv: list[str], arguments: argparse.Namespace) -> int:
    """Measure, report, and say whether our kernels ran everywhere, as an exit status."""
    device = torch.device(arguments.device)
    chosen = choose_cases(arguments, device)
    if not chosen:
        sys.exit(f"--only {arguments.only!r}: no case of {', '.join(arguments.suite)} has it in its name")
    implementations = peers.available(device)
    if arguments.peers:
        implementations = {name: x for name, x in implementations.items() if name in arguments.peers}
    arguments.output.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "-m", "scripts.bench.kernels", *argv])
    head = {"date": str(datetime.date.today()), "machine": machine(device, implementations), "command": command}
    head["rounds"] = arguments.rounds
    suites, rows = {}, {}
    for suite, cases in chosen.items():
        suites[suite] = cases
        for case in cases:
            if case not in rows:
                rows[case] = measure_case(case, implementations, device, arguments.rounds, arguments.graph)
                (arguments.output / "rows.json").write_text(kernels_report.to_json(head, rows))
        # after every suite, so that a run that is cut short leaves what it has
        kernels_report.write(arguments.output, head, suites, rows)
    print((arguments.output / "README.md").read_text())
    ours = [row for found in rows.values() for row in found if row["implementation"] == peers.OURS]
    return int(any(row[direction]["status"] != "ok" for row in ours for direction in ("forward", "backward")))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
