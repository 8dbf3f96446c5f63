"""Time the kernels of this project, and compare them with PyTorch's SDPA, FlexAttention and flash-attn-4.

    python -m scripts.bench.kernels                                     # all suites, most of them at S = 16,384
    python -m scripts.bench.kernels --suite speed --lengths 2048 4096 8192 16384 32768 65536 131072
    python -m scripts.bench.kernels --suite blocks memory --peers ringattn flex
    python -m scripts.bench.kernels --suite head-dims windows --peers ringattn deterministic cudnn fa4
    python -m scripts.bench.kernels --suite backward --peers ringattn fa4 --compile-workers 16
    python -m scripts.bench.kernels --suite fp8 --peers ringattn fp8 fp8-rounded
    python -m scripts.bench.kernels --suite decode                      # runs scripts.bench.decode

All suites use bf16 and B = 1. A CUDA device is required. The speed of an implementation is reported only if its results are
correct.

- `speed` measures head dims 64 and 128 with causal and full masks. With --lengths, this suite also measures a causal mask with
  D = 128 at each of these sequence lengths.
- `masks` measures a window of 4,096 tokens, packed documents of 1 to S tokens, and packed documents of S / 256 to S / 2 tokens.
- `heads` measures 32 query heads with 32 key heads and with 8 key heads.
- `head-dims` measures the head dims 256, 192/128 (192 for queries and keys, 128 for values) and 96, with causal and full masks.
- `windows` measures a causal mask, windows of 128 to 4,096 tokens, and packed documents, with D = 128. The suite also measures
  the layers of gpt-oss 20B and of Gemma 3 4B, and layers with D = 128, at four times the length.
- `backward` compares the backward with flash-attn-4 for 16,384 and 65,536 tokens. The cases are D = 128 with a causal mask, a
  full mask and packed documents, D = 64 with a causal mask, and a causal mask with 32/8 heads.
- `fp8` measures the head dims 64, 128 and 256 with causal and full masks. This suite runs only if --suite names it.
- `blocks` measures block-sparse masks that keep some of the blocks, chosen at random.
- `memory` measures the extra memory of a call, and compares it with the size of the N x N scores.
- `decode` runs `scripts.bench.decode`, which writes its own report to the folder decode in --output. This suite runs only if
  --suite names it.

The implementation `deterministic` is ringattn under `torch.use_deterministic_algorithms(True)`. The implementation `fp8` is
ringattn with precision="fp8". The implementation `fp8-rounded` is the forward of `fp8` on inputs that are already rounded. The
implementation `sinks` is ringattn with learned sinks that are too small to change the results. The implementations
`deterministic`, `fp8`, `fp8-rounded` and `sinks` are measured only if --peers names them.

The library flash-attn-4 compiles for about 10 s per case. With --compile-workers, several processes first compile the kernels
of all cases, as `scripts.bench.compile_first` explains.

Before a call is timed, its output and its gradients are compared with a float64 reference. The check covers only the first and
the last key head. The script writes README.md, rows.json and plots to --output.

A GPU lowers its clock rate when it reaches its power limit. For a fair comparison, all implementations are first compiled and
checked. All implementations are then timed in turn in several rounds, and every second round runs in reverse order. Before each
measurement, the call is repeated for 0.2 s, until the clock rate is stable. Every reported time is the median over the rounds.
With --graph, CUDA graphs replay the calls, so the times do not include the host. For short sequences, the host takes longer
than the GPU.

A forward pass has 4 H D FLOPs per (query, key) pair that the mask allows. A backward pass has 2.5 times as many FLOPs. The rate
in GB/s counts the bytes of q, k, v and out once. In the backward pass, the rate also counts the bytes of dout and of the
gradients. The extra memory of a call is its peak memory minus the memory of its arguments and results.
"""

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from scripts import command
from scripts.accuracy import GROUP_TOLERANCE
from scripts.bench import compile_first, decode, kernels_report, peers
from scripts.bench.cases import BLOCK, Case, checked_error, expected_results
from scripts.bench.kernels_report import DIRECTIONS

DEVICE = torch.device("cuda")
LENGTH, HEADS, HEAD_DIMS = 16384, 16, (64, 128)
MEMORY_LENGTHS = (16384, 65536, 131072, 262144)
FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.125)  # the fractions of blocks that a block-sparse mask keeps
WARMUP_SECONDS = 0.2
WINDOWS = (128, 512, 1024, 4096)
# suite "windows": (head dim, query heads, key heads, windows). The first shape is of gpt-oss 20B, the last of Gemma 3 4B.
WINDOW_LAYERS = ((64, 64, 8, (128, 512, 1024)), (128, 16, 16, (128, 512, 1024)), (256, 8, 4, (1024,)))
# suite "head-dims": (head dim of q and k, head dim of v, query heads, key heads)
WIDE_CASES = ((256, None, 8, None), (192, 128, 16, None), (192, 128, 32, 8), (96, None, 16, None), (96, None, 32, 8))
BACKWARD_LENGTHS = (16384, 65536)
# suite "fp8": (head dim, number of heads)
FP8_CASES = ((64, 16), (128, 16), (256, 8))
FP8_TOLERANCE = 0.1  # the largest accepted error with FP8 inputs; rounding the inputs to FP8 causes an error of 0.05
SUITES = ("speed", "masks", "heads", "head-dims", "windows", "backward", "blocks", "memory")
FP8, DECODE = "fp8", "decode"  # the suites that run only on request
Call = Callable[[], tuple[Tensor, ...]]  # a function that computes the results of one direction
Key = tuple[str, str]  # the name of the implementation, and the direction


def suite_cases(suite: str, lengths: list[int]) -> list[Case]:
    """Return the cases of a suite. The suite "speed" also measures the sequence lengths `lengths`."""
    dim = HEAD_DIMS[-1]
    if suite == "memory":
        return [Case("causal", n, 2, dim) for n in MEMORY_LENGTHS]
    if suite == "blocks":
        return [Case("full", LENGTH, HEADS, dim), *(Case("blocks", LENGTH, HEADS, dim, kept) for kept in FRACTIONS)]
    if suite == "heads":
        return [Case("causal", LENGTH, 2 * HEADS, dim, key_heads=key_heads) for key_heads in (2 * HEADS, HEADS // 2)]
    if suite == "head-dims":
        return [
            Case(kind, LENGTH, heads, dim, key_heads=key_heads, value_dim=value_dim)
            for dim, value_dim, heads, key_heads in WIDE_CASES
            for kind in ("causal", "full")
        ]
    if suite == FP8:
        return [Case(kind, LENGTH, heads, dim) for dim, heads in FP8_CASES for kind in ("causal", "full")]
    if suite == "windows":
        windows = [Case("window", LENGTH, HEADS, dim, window_size=size) for size in WINDOWS]
        layers = [
            Case("window" if size else "causal", 4 * LENGTH, heads, dim, key_heads=key_heads, window_size=size)
            for dim, heads, key_heads, sizes in WINDOW_LAYERS
            for size in (None, *sizes)
        ]
        return [Case("causal", LENGTH, HEADS, dim), *windows, Case("documents", LENGTH, HEADS, dim), *layers]
    if suite == "backward":
        kinds = [(kind, dim) for kind in ("causal", "full", "documents")] + [("causal", HEAD_DIMS[0])]
        return [
            case
            for length in BACKWARD_LENGTHS
            for case in (
                *(Case(kind, length, HEADS, dim) for kind, dim in kinds),
                Case("causal", length, 2 * HEADS, dim, key_heads=HEADS // 2),
            )
        ]
    kinds = {"speed": ("causal", "full"), "masks": ("causal", "window", "documents", "short documents")}[suite]
    cases = [Case(kind, LENGTH, HEADS, dim) for dim in HEAD_DIMS for kind in kinds]
    return cases + [Case("causal", n, HEADS, dim) for n in lengths if suite == "speed"]


def case_name(case: Case) -> str:
    return f"{case.label} D{case.dims} S{case.length}"


def warm_up(call: Callable[[], object]) -> None:
    end = time.perf_counter() + WARMUP_SECONDS
    while time.perf_counter() < end:
        for _ in range(4):
            call()
        torch.cuda.synchronize()


def median_ms(call: Callable[[], object]) -> float:
    ms = triton.testing.do_bench(call, warmup=25, rep=100, return_mode="median")
    assert isinstance(ms, float)
    return ms


def extra_bytes(call: Call) -> int:
    """Return the peak memory of a call minus the memory of its arguments and results."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in results)


def describe_failure(error: Exception) -> dict[str, Any]:
    return {"status": "failed", "error": f"{type(error).__name__}: {str(error)[:500]}"}


def check_call(call: Call, expected: dict[str, Tensor], tolerance: float = GROUP_TOLERANCE) -> dict[str, Any]:
    """Run a call, and return the errors of its results. If the results are correct, also return the extra memory of the
    call.
    """
    errors = {name: checked_error(x, expected[name]) for name, x in zip(expected, call(), strict=True)}
    if not max(errors.values()) <= tolerance:
        return {"status": "wrong", "errors": errors}
    return {"status": "ok", "errors": errors, "extra_bytes": extra_bytes(call)}


def check(
    case: Case, name: str, prepare: peers.Prepare, tensors: list[Tensor], expected: dict[str, Tensor]
) -> tuple[dict[str, dict[str, Any]], dict[str, Call]]:
    """Check the forward and the backward of an implementation. Exceptions are reported in `found`.

    Returns:
        (found, calls), two dicts with the keys "forward" and "backward". The dict `found` contains the results of `check_call`,
        or an error. The dict `calls` contains the calls with correct results.
    """
    *inputs, dout = tensors
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    tolerance = FP8_TOLERANCE if name in (peers.FP8, peers.FP8_ROUNDED) else GROUP_TOLERANCE

    def forward() -> tuple[Tensor, ...]:
        with peers.context(name):
            return (attend(*inputs),)

    def backward() -> tuple[Tensor, ...]:
        with peers.context(name):
            return torch.autograd.grad(out, inputs, dout, retain_graph=True)

    try:
        attend = prepare(case, DEVICE)
        calls["forward"] = forward
        found["forward"] = check_call(forward, {"out": expected["out"]}, tolerance)
        out = attend(*inputs)
        calls["backward"] = backward
        found["backward"] = check_call(backward, {name: expected[name] for name in ("dq", "dk", "dv")}, tolerance)
        reason: dict[str, Any] = {}
    except peers.Unsupported:
        reason = {"status": "unsupported"}
    except Exception as error:  # compilers and kernels of other libraries raise exceptions of any type
        reason = describe_failure(error)
    found = {direction: found.get(direction) or reason for direction in DIRECTIONS}
    return found, {direction: call for direction, call in calls.items() if found[direction]["status"] == "ok"}


def summarise(case: Case, direction: str, samples: list[float]) -> dict[str, Any]:
    ms = statistics.median(samples)
    rates = {"tflops": case.flops(direction) / ms * 1e-9, "gb_per_s": case.bytes(direction) / ms * 1e-6}
    return {"ms": ms, **rates, "samples": samples}


def capture(call: Call) -> Callable[[], None]:
    """Capture a call in a CUDA graph and return the function that replays it.

    The current stream must not be the default stream.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        call()
    return graph.replay


def time_in_rounds(
    calls: dict[Key, Call], rounds: int, use_graphs: bool = False
) -> tuple[dict[Key, list[float]], dict[Key, dict[str, Any]]]:
    """Time all calls one after the other in several rounds. Every second round runs in reverse order.

    Returns:
        (samples, failures). The dict `samples` contains the milliseconds of each round for every call that succeeded. The dict
        `failures` describes the error of every call that failed.
    """
    timed: dict[Key, Callable[[], object]] = {**calls}
    samples: dict[Key, list[float]] = {key: [] for key in calls}
    failures: dict[Key, dict[str, Any]] = {}
    for i in range(rounds):
        for key in list(samples)[:: -1 if i % 2 else 1]:
            try:
                if use_graphs and i == 0:
                    timed[key] = capture(calls[key])
                warm_up(timed[key])
                samples[key].append(median_ms(timed[key]))
            except Exception as error:
                failures[key] = describe_failure(error)
                del samples[key]
    return samples, failures


def measure_case(case: Case, implementations: dict[str, peers.Prepare], rounds: int, use_graphs: bool) -> list[dict[str, Any]]:
    """Check and time all implementations of a case. Print and return one row per implementation."""
    tensors = case.inputs(DEVICE)
    expected = expected_results(case, *tensors)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[Key, Call] = {}
    seconds: dict[str, float] = {}
    for name, prepare in implementations.items():
        start = time.perf_counter()
        torch.cuda.empty_cache()
        found, correct = check(case, name, prepare, tensors, expected)
        calls |= {(name, direction): call for direction, call in correct.items()}
        rows[name] = {"implementation": name, "case": case, **found}
        seconds[name] = time.perf_counter() - start
    del expected
    torch.cuda.empty_cache()
    samples, failures = time_in_rounds(calls, rounds, use_graphs)
    for (name, direction), times in samples.items():
        rows[name][direction] |= summarise(case, direction, times)
    for (name, direction), found in failures.items():
        rows[name][direction] = found
    for name, row in rows.items():
        cells = [kernels_report.describe(row[direction]) for direction in DIRECTIONS]
        print(f"{case} {name}: {' | '.join(cells)} [{seconds[name]:.0f} s]", flush=True)
    return list(rows.values())


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    parser.add_argument("--output", type=Path, default=command.RESULTS / "kernels", help="default: outputs/benchmarks/kernels")
    parser.add_argument(
        "--suite", nargs="+", choices=(*SUITES, FP8, DECODE), default=SUITES, help="default: all but fp8 and decode"
    )
    parser.add_argument("--only", metavar="REGEX", default="", help="only cases with a matching name: 'causal D128 S16384'")
    parser.add_argument(
        "--lengths", nargs="+", type=command.at_least(1), default=[], help="lengths of the curve, multiples of 128"
    )
    parser.add_argument(
        "--peers", nargs="+", choices=peers.IMPLEMENTATIONS, help=f"default: all but {', '.join(peers.ON_REQUEST)}"
    )
    parser.add_argument("--rounds", type=command.at_least(1), default=3, help="rounds of timing; default: 3")
    parser.add_argument(
        "--compile-workers", type=command.at_least(0), default=0, help="processes that compile all kernels first; default: 0"
    )
    parser.add_argument("--graph", action="store_true", help="replay the calls from CUDA graphs")
    args = parser.parse_args(argv)
    if any(n <= 0 or n % BLOCK for n in args.lengths):
        parser.error(f"--lengths {args.lengths}: each length must be a positive multiple of {BLOCK}")
    if not torch.cuda.is_available():
        parser.error("a CUDA device is required")
    return args


def choose_cases(args: argparse.Namespace) -> dict[str, list[Case]]:
    """Return, for each suite, the cases whose names match --only.

    Raises:
        SystemExit: no case matches --only.
    """
    chosen = {}
    for suite in (suite for suite in args.suite if suite != DECODE):
        cases = dict.fromkeys(suite_cases(suite, args.lengths))
        if cases := [case for case in cases if re.search(args.only, case_name(case))]:
            chosen[suite] = cases
    if not chosen:
        sys.exit(
            f"error: --only {args.only!r} matches no case of {', '.join(args.suite)}; names are such as 'causal D128 S16384'"
        )
    return chosen


@contextmanager
def stream_for(use_graphs: bool) -> Generator[None]:
    """Return a context manager that selects a stream for calls. CUDA graphs cannot capture the default stream."""
    if not use_graphs:
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


def run(args: argparse.Namespace, header: dict[str, Any], implementations: dict[str, peers.Prepare]) -> list[dict[str, Any]]:
    """Measure the selected cases and write the report. Return the measurements of ringattn."""
    chosen = choose_cases(args)
    args.output.mkdir(parents=True, exist_ok=True)
    if args.compile_workers:
        cases = [case for cases in chosen.values() for case in cases]
        compile_first.compile_first(cases, list(implementations), args.compile_workers)
    suites: dict[str, list[Case]] = {}
    rows: kernels_report.Rows = {}
    for suite, cases in chosen.items():
        suites[suite] = cases
        for case in cases:
            if case not in rows:
                rows[case] = measure_case(case, implementations, args.rounds, args.graph)
            kernels_report.save_rows(args.output, header, suites, rows)
        kernels_report.write(args.output, header, suites, rows)
    return [row for found in rows.values() for row in found if row["implementation"] == peers.OURS]


@command.exit_without_memory()
def main(argv: list[str]) -> int:
    args = parse(argv)
    status = 0
    if DECODE in args.suite:
        only = ["--only", args.only] if args.only else []
        status = decode.main(["--output", str(args.output / DECODE), "--rounds", str(args.rounds), *only])
        if set(args.suite) == {DECODE}:
            return status
    if args.compile_workers:
        compile_first.use_disk_cache()
    names = args.peers or [name for name in peers.IMPLEMENTATIONS if name not in peers.ON_REQUEST]
    implementations = {name: x for name, x in peers.available().items() if name in names}
    packages = ["flash-attn-4"] if "fa4" in implementations else []
    header = command.describe_run("scripts.bench.kernels", argv, gpus=1, packages=packages) | {"rounds": args.rounds}
    with stream_for(args.graph):
        ours = run(args, header, implementations)
    print((args.output / "README.md").read_text())
    return max(status, int(any(row[direction]["status"] != "ok" for row in ours for direction in DIRECTIONS)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
