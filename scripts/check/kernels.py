"""Compare the GPU kernels with a float64 reference on one GPU.

    python -m scripts.check.kernels --time
    python -m scripts.check.kernels --kernels hopper --output outputs/check
    compute-sanitizer --tool racecheck python -m scripts.check.kernels --lengths 63 257 --dims 64 --alone

The script prints a table of the largest row errors, relative to the scale of each row. For comparison, the table also contains
the errors of PyTorch's scaled_dot_product_attention (SDPA) in the same dtype. The exit status is 1 if an error exceeds its
limit. With --time, the script also prints a table of TFLOP/s. The table contains calls with final results, and calls with
partial results as on a ring. A forward pass counts as 4 B H S S D FLOPs, or half as many with a causal mask. A backward pass
counts as 2.5 forward passes.
"""

import argparse
import importlib
import statistics
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from ringattn.kernels import dispatch, reference
from ringattn.kernels.interval_mask import Intervals
from scripts import command
from scripts.accuracy import NAMES, float64_results, row_errors, row_limits
from scripts.bench.kernels import time_in_rounds
from scripts.bench.peers import stock_attention
from scripts.tables import markdown_table

DTYPES = (torch.bfloat16, torch.float16)
HEADS, KEY_HEADS = 4, 2
LENGTHS = (1, 63, 1000, 4097)
WINDOW, DOCUMENT = 200, 300  # the size of the window and the length of a document, in tokens
MASKS = ("full", "causal", "window", "documents")


def make_intervals(mask: str, length: int) -> Intervals:
    rows = torch.arange(length)[None]
    if mask == "full":
        return Intervals.of(rows * 0, rows * 0 + length, length, "cuda")
    lo = {"causal": rows * 0, "window": (rows + 1 - WINDOW).clamp(min=0), "documents": rows // DOCUMENT * DOCUMENT}[mask]
    return Intervals.of(lo, rows + 1, length, "cuda")


def load_kernels(name: str) -> SimpleNamespace:
    backend = {"portable": "triton", "hopper": "hopper"}[name]
    forward, backward = (importlib.import_module(f"ringattn.kernels.{backend}.{x}") for x in ("forward", "backward"))
    return SimpleNamespace(forward=forward.forward, backward=dispatch.backward if name == "hopper" else backward.backward)


def kernel_results(
    kernels: SimpleNamespace, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, intervals: Intervals
) -> dict[str, Tensor]:
    scale = q.shape[-1] ** -0.5
    out, lse = kernels.forward(q, k, v, intervals, scale, final=True)
    delta = reference.row_delta(out, dout)
    grads = kernels.backward(q, k, v, dout, lse, delta, intervals, scale, grad_dtype=torch.float32)
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


def sdpa_results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, is_causal: bool) -> dict[str, Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = stock_attention(q, k, v, is_causal)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def measure_errors(
    kernels: SimpleNamespace, dtype: torch.dtype, dim: int, length: int, mask: str, with_sdpa: bool
) -> tuple[dict[str, float], dict[str, float]]:
    torch.manual_seed(0)
    shapes = [(1, length, heads, dim) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    intervals = make_intervals(mask, length)
    expected = float64_results(q, k, v, dout, intervals)
    ours = row_errors(kernel_results(kernels, q, k, v, dout, intervals), expected)
    if with_sdpa and mask in ("causal", "full"):
        return ours, row_errors(sdpa_results(q, k, v, dout, mask == "causal"), expected)
    return ours, {}


def format_errors(ours: dict[str, float], sdpa: dict[str, float], limits: dict[str, float]) -> list[str]:
    cells = []
    for name in NAMES:
        cell = f"{ours[name]:.1e}" + (f" ({sdpa[name]:.1e})" if name in sdpa else "")
        cells.append(cell if ours[name] <= limits[name] else f"{cell} **too large**")
    return cells


def error_rows(kernels: SimpleNamespace, args: argparse.Namespace) -> Iterator[list[str]]:
    for dtype, dim, length, mask in product(DTYPES, args.dims, args.lengths, MASKS):
        ours, sdpa = measure_errors(kernels, dtype, dim, length, mask, with_sdpa=not args.alone)
        case = [str(dtype).removeprefix("torch."), str(dim), str(length), mask]
        yield case + format_errors(ours, sdpa, row_limits(dtype))


def measure_speed(kernels: SimpleNamespace, dim: int, mask: str, length: int, heads: int = 16) -> list[str]:
    """Measure a forward, a forward with a state, a backward, and a backward with fp32 gradients, in TFLOP/s. If a call fails,
    its cell contains the name of the error. The calls are timed in turn in several rounds, because a GPU has a higher clock
    after a pause.
    """
    q, k, v, dout = (torch.randn(1, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    problem = make_intervals(mask, length), dim**-0.5
    flops = 4 * heads * length**2 * dim / (2 if mask == "causal" else 1)
    out, lse = kernels.forward(q, k, v, *problem, final=True)
    state = kernels.forward(q, k, v, *problem)
    saved = dout, lse, reference.row_delta(out, dout), *problem
    grads = [torch.zeros(x.shape, device="cuda") for x in (q, k, v)]
    calls = {
        ("forward", "output"): lambda: kernels.forward(q, k, v, *problem, final=True),
        ("forward", "state"): lambda: kernels.forward(q, k, v, *problem, state),
        ("backward", "bf16"): lambda: kernels.backward(q, k, v, *saved),
        ("backward", "fp32"): lambda: kernels.backward(q, k, v, *saved, *grads),
    }
    samples, failures = time_in_rounds(calls, rounds=5)
    cells = {key: found["error"].split(":")[0] for key, found in failures.items()}
    for (direction, kind), milliseconds in samples.items():
        factor = 2.5 if direction == "backward" else 1
        cells[direction, kind] = f"{factor * flops / statistics.median(milliseconds) * 1e-9:.0f}"
    return [cells[key] for key in calls]


def speed_table(kernels: SimpleNamespace, dims: list[int]) -> str:
    columns = "D | S | mask | forward | with state in and out | backward | into fp32 gradients"
    cases = product(dims, (8192, 16384), ("causal", "full"))
    rows = [[dim, length, mask, *measure_speed(kernels, dim, mask, length)] for dim, length, mask in cases]
    return "TFLOP/s, bf16, B 1, H 16\n\n" + markdown_table(columns, rows)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    parser.add_argument("--output", type=Path, help="a directory in which to write check_kernels.md")
    parser.add_argument("--kernels", choices=("portable", "hopper"), default="portable", help="default: portable")
    parser.add_argument(
        "--dims", type=command.at_least(1), nargs="+", default=(64, 128, 256), help="head dims (default: 64 128 256)"
    )
    parser.add_argument(
        "--lengths", type=command.at_least(1), nargs="+", default=LENGTHS, help="tokens (default: 1 63 1000 4097)"
    )
    parser.add_argument("--alone", action="store_true", help="leave out SDPA, which a race checker would also report")
    parser.add_argument("--time", action="store_true", help="also measure the speed with 16 heads in bf16")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("a CUDA device is required; without one, run `make test`, which uses Triton's interpreter")
    return args


@command.exit_without_memory()
def main(argv: list[str]) -> int:
    args = parse(argv)
    kernels = load_kernels(args.kernels)
    run = command.describe_run("scripts.check.kernels", argv, gpus=1)
    rows = list(error_rows(kernels, args))
    text = f"The {args.kernels} kernels on {run['machine']}, {run['date']}\n\n"
    text += f"Largest row error against float64, {HEADS} query heads and {KEY_HEADS} key heads (in brackets: SDPA)\n\n"
    text += markdown_table(" | ".join(("dtype", "D", "S", "mask", *NAMES)), rows)
    if args.time:
        text += "\n" + speed_table(kernels, args.dims)
    print(text)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "check_kernels.md").write_text(text)
    failures = [" ".join(row) for row in rows if any("too large" in cell for cell in row)]
    print("\n".join(failures) or "every error is within its limit")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
