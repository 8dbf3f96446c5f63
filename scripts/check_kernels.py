"""Hold the Triton kernels to the float64 reference on a GPU, beside PyTorch's SDPA in the same dtype.

    python scripts/check_kernels.py --output DIR --time
    compute-sanitizer --tool racecheck python scripts/check_kernels.py --lengths 1 63 257 --alone

Prints Markdown tables of the largest row error (relative to the row's scale) and, with --time, of TFLOP/s; exits with 1 if
an error exceeds its tolerance. FLOPs count 4 B H S S D forward (half of that when causal) and 2.5 times that backward.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))
from kernels import backward, forward, reference  # noqa: E402

NAMES = ("out", "lse", "dq", "dk", "dv")
DTYPES = (torch.bfloat16, torch.float16)
# in units of the dtype's eps; dq and dk also carry the rounding of `out`, through delta = rowsum(dout * out)
TOLERANCE = {"out": 2, "dq": 8, "dk": 4, "dv": 2}
LSE_TOLERANCE = 1e-5
HEADS = (4, 2)
LENGTHS = (1, 63, 1000, 4097)
WINDOW, DOCUMENT = 200, 300
MASKS = ("full", "causal", "window", "documents")


def make_intervals(mask: str, length: int) -> tuple[Tensor, Tensor]:
    """lo, hi int32 (1, length) of a mask by name."""
    rows = torch.arange(length, device="cuda", dtype=torch.int32)[None]
    if mask == "full":
        return torch.zeros_like(rows), torch.full_like(rows, length)
    lo = {"causal": rows * 0, "window": (rows + 1 - WINDOW).clamp(min=0), "documents": rows // DOCUMENT * DOCUMENT}[mask]
    return lo, rows + 1


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Largest error of a row relative to its largest element, or to a tenth of the largest of all where that is more."""
    scale = expected.abs().amax(-1)
    # the dq and dk of a single row vanish: their errors are compared with the inputs, whose scale is 1
    scale = scale.clamp(min=1.0 if len(scale[0]) == 1 else 0.1 * scale.max().item())
    return ((actual.double() - expected).abs().amax(-1) / scale).nan_to_num(nan=float("inf")).max().item()


def attend_and_differentiate(module, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lo: Tensor, hi: Tensor) -> tuple:
    """(out, lse, dq, dk, dv) by the forward and backward of a kernel module."""
    scale = q.shape[-1] ** -0.5
    gradients = [torch.zeros(x.shape, dtype=reference.state_dtype(x.dtype), device=x.device) for x in (q, k, v)]
    out, lse = module.forward(q, k, v, lo, hi, scale, final=True)
    delta = reference.row_delta(out, dout)
    module.backward(q, k, v, dout, lse, delta, lo, hi, scale, *gradients)
    return out, lse, *gradients


TRITON = SimpleNamespace(forward=forward.forward, backward=backward.backward)


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's attention on tensors of (B, N, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def sdpa_results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> tuple:
    """(out, None, dq, dk, dv) by the backend that PyTorch picks itself."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = sdpa(q, k, v, causal)
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


def check_case(dtype: torch.dtype, dim: int, length: int, mask: str, peer: bool) -> tuple[list, list, list[str]]:
    """(errors of the kernels, errors of SDPA, names that exceed their tolerance) for one problem."""
    torch.manual_seed(0)
    shapes = [(1, length, num_heads, dim) for num_heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes)
    lo, hi = make_intervals(mask, length)
    expected = attend_and_differentiate(reference, *(x.double() for x in (q, k, v, dout)), lo, hi)
    ours = errors_of(attend_and_differentiate(TRITON, q, k, v, dout, lo, hi), expected)
    theirs = [None] * len(NAMES)
    if peer and mask in ("causal", "full"):
        theirs = errors_of(sdpa_results(q, k, v, dout, mask == "causal"), expected)
    limits = [LSE_TOLERANCE if name == "lse" else TOLERANCE[name] * torch.finfo(dtype).eps for name in NAMES]
    failed = [name for name, error, limit in zip(NAMES, ours, limits, strict=True) if not error <= limit]
    return ours, theirs, failed


def error_table(lengths: list[int], peer: bool) -> tuple[list[str], list[str]]:
    """Lines of a Markdown table, and a line for every case that failed."""
    lines = ["| dtype | D | S | mask | " + " | ".join(NAMES) + " |", "|---" * (4 + len(NAMES)) + "|"]
    failures = []
    for dtype, dim, length, mask in product(DTYPES, (64, 128), lengths, MASKS):
        ours, theirs, failed = check_case(dtype, dim, length, mask, peer)
        cells = [
            f"{x:.1e}" + (f" ({y:.1e})" if y is not None else "") + (" **too large**" if name in failed else "")
            for name, x, y in zip(NAMES, ours, theirs, strict=True)
        ]
        case = f"{str(dtype).removeprefix('torch.')} | {dim} | {length} | {mask}"
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
        failures += [f"{case}: {name} exceeds its tolerance" for name in failed]
    return lines, failures


def teraflops(function: Callable[[], object], flops: float) -> str:
    """Median TFLOP/s of a call, or the name of the error that it raises."""
    try:
        return f"{flops / triton.testing.do_bench(function, return_mode='median') * 1e-9:.0f}"
    except RuntimeError as error:
        return type(error).__name__


def time_case(dim: int, mask: str, length: int = 16384, heads: int = 16) -> Iterator[str]:
    """TFLOP/s forward and backward of the kernels, then of SDPA with cuDNN; bf16, one sequence."""
    q, k, v, dout = (torch.randn(1, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    (lo, hi), scale = make_intervals(mask, length), dim**-0.5
    flops = 4 * heads * length**2 * dim / (2 if mask == "causal" else 1)
    out, lse = forward.forward(q, k, v, lo, hi, scale, final=True)
    delta = reference.row_delta(out, dout)
    gradients = [torch.zeros(x.shape, device="cuda") for x in (q, k, v)]
    yield teraflops(lambda: forward.forward(q, k, v, lo, hi, scale, final=True), flops)
    yield teraflops(lambda: backward.backward(q, k, v, dout, lse, delta, lo, hi, scale, *gradients), 2.5 * flops)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        yield teraflops(lambda: sdpa(q, k, v, mask == "causal"), flops)
        try:
            out = sdpa(q, k, v, mask == "causal")
        except RuntimeError as error:
            yield type(error).__name__
            return
        yield teraflops(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), 2.5 * flops)


def time_table() -> list[str]:
    lines = ["| D | mask | Triton forward | Triton backward | cuDNN forward | cuDNN backward |", "|---" * 6 + "|"]
    for dim, mask in product((64, 128), ("causal", "full")):
        lines.append(f"| {dim} | {mask} | " + " | ".join(time_case(dim, mask)) + " |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="directory for check_kernels.md")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="leave SDPA out, which a race checker would accuse too")
    parser.add_argument("--time", action="store_true", help="also measure TFLOP/s at S = 16384, 16 heads, bf16")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device; without one run the tests, which use Triton's interpreter")
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", ""]
    lines += [f"Largest row error against float64, {HEADS[0]} query and {HEADS[1]} key heads (SDPA's in brackets)", ""]
    table, failures = error_table(args.lengths, not args.alone)
    lines += table
    if args.time:
        lines += ["", "TFLOP/s, bf16, B 1, H 16, S 16384", "", *time_table()]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "check_kernels.md").write_text(text)
    print("\n".join(failures) or "every error is within its tolerance")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
