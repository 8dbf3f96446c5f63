"""Hold the Triton kernels to the float64 reference on a GPU, beside PyTorch's SDPA in the same dtype.

    python -m scripts.check.kernels --output DIR --time
    python -m scripts.check.kernels --kernels hopper
    compute-sanitizer --tool racecheck python -m scripts.check.kernels --lengths 63 257 --dims 64 --alone

Prints Markdown tables of the largest row error (relative to the row's scale) and, with --time, of what a partial result costs
beside a final one in TFLOP/s; exits with 1 if an error exceeds its tolerance. FLOPs count 4 B H S S D forward (half of that
when causal) and 2.5 times that backward.
"""

import argparse
import importlib
import statistics
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.interval_mask import Intervals, full
from scripts.bench.kernels import time_rounds
from scripts.bench.peers import stock_attention

NAMES = ("out", "lse", "dq", "dk", "dv")
DTYPES = (torch.bfloat16, torch.float16)
# in units of the dtype's eps; dq and dk also carry the rounding of `out`, through delta = rowsum(dout * out)
TOLERANCE = {"out": 2, "dq": 8, "dk": 4, "dv": 2}
LSE_TOLERANCE = 1e-5
HEADS = (4, 2)
LENGTHS = (1, 63, 1000, 4097)
WINDOW, DOCUMENT = 200, 300
MASKS = ("full", "causal", "window", "documents")


def make_intervals(mask: str, length: int) -> Intervals:
    """A mask by name, of `length` queries and keys."""
    rows = torch.arange(length)[None]
    if mask == "full":
        return full(length, length, "cuda")
    lo = {"causal": rows * 0, "window": (rows + 1 - WINDOW).clamp(min=0), "documents": rows // DOCUMENT * DOCUMENT}[mask]
    return Intervals.of(lo, rows + 1, length, "cuda")


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Largest error of a row relative to its largest element, or to a tenth of the largest of all where that is more."""
    scale = expected.abs().amax(-1)
    # the dq and dk of a single row vanish: their errors are compared with the inputs, whose scale is 1
    scale = scale.clamp(min=1.0 if len(scale[0]) == 1 else 0.1 * scale.max().item())
    return ((actual.double() - expected).abs().amax(-1) / scale).nan_to_num(nan=float("inf")).max().item()


def attend_and_differentiate(module, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, intervals: Intervals) -> tuple:
    """(out, lse, dq, dk, dv) by the forward and backward of a kernel module."""
    scale = q.shape[-1] ** -0.5
    out, lse = module.forward(q, k, v, intervals, scale, final=True)
    delta = reference.row_delta(out, dout)
    grad_dtype = reference.state_dtype(q.dtype)
    return out, lse, *module.backward(q, k, v, dout, lse, delta, intervals, scale, grad_dtype=grad_dtype)


def load_kernels(name: str) -> SimpleNamespace:
    """The forward and backward of a kernel family, "portable" or "hopper"."""
    backend = {"portable": "triton", "hopper": "hopper"}[name]
    modules = (importlib.import_module(f"ringattn.kernels.{backend}.{direction}") for direction in ("forward", "backward"))
    return SimpleNamespace(forward=next(modules).forward, backward=next(modules).backward)


def sdpa_results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> tuple:
    """(out, None, dq, dk, dv) by the backend that PyTorch picks itself."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = stock_attention(q, k, v, causal)
    return out.detach(), None, *torch.autograd.grad(out, (q, k, v), dout)


def errors_of(results: tuple, expected: tuple) -> list[float | None]:
    """Row errors of (out, lse, dq, dk, dv), None where there is no result; lse rows are single numbers of scale >= 1."""
    errors = []
    for name, x, y in zip(NAMES, results, expected, strict=True):
        if x is None:
            errors.append(None)
        elif name == "lse":
            errors.append(((x.double() - y).abs() / y.abs().clamp(min=1)).nan_to_num(nan=float("inf")).max().item())
        else:
            errors.append(row_error(x, y))
    return errors


def check_case(
    kernels: SimpleNamespace, dtype: torch.dtype, dim: int, length: int, mask: str, peer: bool
) -> tuple[list, list, list[str]]:
    """(errors of the kernels, errors of SDPA, names that exceed their tolerance) for one problem."""
    torch.manual_seed(0)
    shapes = [(1, length, num_heads, dim) for num_heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    intervals = make_intervals(mask, length)
    expected = attend_and_differentiate(reference, *(x.double() for x in (q, k, v, dout)), intervals)
    ours = errors_of(attend_and_differentiate(kernels, q, k, v, dout, intervals), expected)
    theirs = [None] * len(NAMES)
    if peer and mask in ("causal", "full"):
        theirs = errors_of(sdpa_results(q, k, v, dout, mask == "causal"), expected)
    limits = [LSE_TOLERANCE if name == "lse" else TOLERANCE[name] * torch.finfo(dtype).eps for name in NAMES]
    failed = [name for name, error, limit in zip(NAMES, ours, limits, strict=True) if not error <= limit]
    return ours, theirs, failed


def error_table(kernels: SimpleNamespace, dims: list[int], lengths: list[int], peer: bool) -> tuple[list[str], list[str]]:
    """Lines of a Markdown table, and a line for every case that failed."""
    lines = ["| dtype | D | S | mask | " + " | ".join(NAMES) + " |", "|---" * (4 + len(NAMES)) + "|"]
    failures = []
    for dtype, dim, length, mask in product(DTYPES, dims, lengths, MASKS):
        ours, theirs, failed = check_case(kernels, dtype, dim, length, mask, peer)
        cells = [
            f"{x:.1e}" + (f" ({y:.1e})" if y is not None else "") + (" **too large**" if name in failed else "")
            for name, x, y in zip(NAMES, ours, theirs, strict=True)
        ]
        case = f"{str(dtype).removeprefix('torch.')} | {dim} | {length} | {mask}"
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
        failures += [f"{case}: {name} exceeds its tolerance" for name in failed]
    return lines, failures


def time_case(kernels: SimpleNamespace, dim: int, mask: str, length: int, heads: int = 16) -> list[str]:
    """TFLOP/s of a forward to an output, and with a state in and out; of a backward to bf16, and into fp32 sums.

    What cannot run has the name of its error instead. All are timed in turn and hot: from a pause the first would look faster.
    """
    q, k, v, dout = (torch.randn(1, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    block = make_intervals(mask, length), dim**-0.5
    flops = 4 * heads * length**2 * dim / (2 if mask == "causal" else 1)
    out, lse = kernels.forward(q, k, v, *block, final=True)
    state = kernels.forward(q, k, v, *block)
    saved = dout, lse, reference.row_delta(out, dout), *block
    sums = [torch.zeros(x.shape, device="cuda") for x in (q, k, v)]
    calls = {
        ("forward", "output"): lambda: kernels.forward(q, k, v, *block, final=True),
        ("forward", "state"): lambda: kernels.forward(q, k, v, *block, state),
        ("backward", "bf16"): lambda: kernels.backward(q, k, v, *saved),
        ("backward", "sums"): lambda: kernels.backward(q, k, v, *saved, *sums),
    }
    samples, failures = time_rounds(calls, rounds=5, device=q.device, graph=False)
    cells = {key: failed["error"].split(":")[0] for key, failed in failures.items()}
    for key, milliseconds in samples.items():
        cells[key] = f"{flops * (2.5 if key[0] == 'backward' else 1) / statistics.median(milliseconds) * 1e-9:.0f}"
    return [cells[key] for key in calls]


def time_table(kernels: SimpleNamespace, dims: list[int]) -> list[str]:
    columns = "D", "S", "mask", "forward", "with state in and out", "backward", "into fp32 sums"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for dim, length, mask in product(dims, (8192, 16384), ("causal", "full")):
        lines.append(f"| {dim} | {length} | {mask} | " + " | ".join(time_case(kernels, dim, mask, length)) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="directory for check_kernels.md")
    parser.add_argument("--kernels", choices=("portable", "hopper"), default="portable")
    parser.add_argument("--dims", type=int, nargs="+", default=(64, 128), help="head dims (default: %(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="leave SDPA out, which a race checker would accuse too")
    parser.add_argument("--time", action="store_true", help="also measure TFLOP/s with 16 heads, bf16")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device; without one run the tests, which use Triton's interpreter")
    kernels = load_kernels(args.kernels)
    lines = [
        f"The {args.kernels} kernels, {torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}",
        "",
    ]
    lines += [f"Largest row error against float64, {HEADS[0]} query and {HEADS[1]} key heads (SDPA's in brackets)", ""]
    table, failures = error_table(kernels, args.dims, args.lengths, not args.alone)
    lines += table
    if args.time:
        lines += ["", "TFLOP/s, bf16, B 1, H 16", "", *time_table(kernels, args.dims)]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "check_kernels.md").write_text(text)
    print("\n".join(failures) or "every error is within its tolerance")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
