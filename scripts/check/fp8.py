"""Compare FP8 attention and bf16 attention with a float64 reference, on a CPU or on a GPU.

    python -m scripts.check.fp8
    python -m scripts.check.fp8 --dim 256 --keys 65536 --output outputs/check

The script prints two tables. The first table contains the errors of attention's output for three kinds of bf16 inputs.
Heavy-tailed inputs have Student's t distribution with 3 degrees of freedom. In outlier inputs, one feature of q, k and v is 30
times as large as the other features. The columns are:

    bf16               attention with precision="ieee"
    FP8                attention with precision="fp8"
    rounded inputs     exact attention in float64 on inputs that are rounded to FP8
    no rotation        the same, if queries and keys are not rotated before they are rounded
    one scale          the same, if all blocks of a head have the same scale
    neither            the same, without the rotation and with one scale per head

Without a kernel for FP8 inputs, the column "FP8" contains the errors of bf16 attention on the rounded inputs. The second table
contains the errors of the gradients. After an FP8 forward pass, the backward pass computes in bf16 with the rounded inputs. An
error is the norm of the difference divided by the norm of the reference. Each cell is the root mean square over several seeds.
The exit status is 1 if an error in the column "FP8" of the first table exceeds LIMIT.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringattn import flash_attention
from ringattn.kernels import fp8
from ringattn.kernels.interval_mask import Intervals
from scripts import command
from scripts.accuracy import float64_results, output_of
from scripts.tables import markdown_table

INPUTS = ("normal", "heavy-tailed", "outlier")
DEGREES_OF_FREEDOM = 3
OUTLIER = 30  # in outlier inputs, one feature is multiplied by this factor
GRADIENTS = ("dq", "dk", "dv")
# (whether queries and keys are rotated, whether every block has its own scale)
VARIANTS = {
    "rounded inputs": (True, True),
    "no rotation": (False, True),
    "one scale": (True, False),
    "neither": (False, False),
}
# The largest accepted error of the output. Errors at head dims 64 and 128 are 0.05 to 0.12.
LIMIT = 0.2


def draw(kind: str, seed: int, args: argparse.Namespace) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def sample(tokens: int) -> Tensor:
        shape = 1, tokens, args.heads, args.dim
        x = torch.randn(shape, generator=generator)
        if kind == "heavy-tailed":
            chi_squared = torch.randn(*shape, DEGREES_OF_FREEDOM, generator=generator).square().sum(-1)
            x = x / (chi_squared / DEGREES_OF_FREEDOM).sqrt()
        if kind == "outlier":
            x[..., args.dim // 3] *= OUTLIER
        return x.to(args.device, torch.bfloat16)

    dout = torch.randn(1, args.queries, args.heads, args.dim, generator=generator).to(args.device, torch.bfloat16)
    return [sample(args.queries), sample(args.keys), sample(args.keys), dout]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def attention_errors(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, expected: dict[str, Tensor], precision: str
) -> dict[str, Any]:
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = output_of(flash_attention(*inputs, precision=precision))
    results = dict(zip(("out", *GRADIENTS), (out.detach(), *torch.autograd.grad(out, inputs, dout)), strict=True))
    return {name: relative_error(x, expected[name]) for name, x in results.items()}


def rounding_error(q: Tensor, k: Tensor, v: Tensor, expected: Tensor, rotate: bool, per_block: bool) -> float:
    """Return the error of float64 attention on inputs rounded to FP8. The options are those of `fp8.quantize_rows`."""
    rows = [fp8.quantize_rows(x, rotate, per_block) for x in (q, k)]
    values = fp8.quantize_values(v, per_block)
    rounded = [fp8.dequantize(x, torch.float64, v.shape[1]) for x in (*rows, values)]
    return relative_error(output_of(flash_attention(*rounded)), expected)


def measure(kind: str, args: argparse.Namespace) -> dict[str, float]:
    samples: dict[str, list[float]] = {}
    for seed in range(args.seeds):
        q, k, v, dout = draw(kind, seed, args)
        rows = torch.zeros(1, args.queries, dtype=torch.int64)
        expected = float64_results(q, k, v, dout, Intervals.of(rows, rows + args.keys, args.keys, args.device))
        for name, precision in (("bf16", "ieee"), ("FP8", "fp8")):
            for result, error in attention_errors(q, k, v, dout, expected, precision).items():
                samples.setdefault(name if result == "out" else f"{result}, {name}", []).append(error)
        for name, options in VARIANTS.items():
            samples.setdefault(name, []).append(rounding_error(q, k, v, expected["out"], *options))
    return {name: torch.tensor(errors).square().mean().sqrt().item() for name, errors in samples.items()}


def tables(errors: dict[str, dict[str, float]]) -> str:
    def table(names: Iterable[str]) -> str:
        names = list(names)
        rows = [[kind, *(f"{found[name]:.4f}" for name in names)] for kind, found in errors.items()]
        return markdown_table(" | ".join(("inputs", *names)), rows)

    gradients = [f"{gradient}, {name}" for gradient in GRADIENTS for name in ("bf16", "FP8")]
    return f"{table(('bf16', 'FP8', *VARIANTS))}\n{table(gradients)}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help="the device (default: cuda if available)")
    parser.add_argument("--queries", type=command.at_least(1), default=64, help="number of queries (default: 64)")
    parser.add_argument("--keys", type=command.at_least(1), default=16384, help="number of keys (default: 16384)")
    parser.add_argument("--heads", type=command.at_least(1), default=1, help="number of heads (default: 1)")
    parser.add_argument("--dim", type=command.at_least(1), default=128, help="head dim (default: 128)")
    parser.add_argument("--seeds", type=command.at_least(1), default=4, help="number of seeds (default: 4)")
    parser.add_argument("--output", type=Path, help="a directory in which to write check_fp8.md")
    return parser.parse_args(argv)


@command.exit_without_memory()
def main(argv: list[str]) -> int:
    args = parse(argv)
    errors = {kind: measure(kind, args) for kind in INPUTS}
    text = f"Errors of attention with {args.queries} queries, {args.keys} keys, {args.heads} heads and head dim {args.dim} on "
    text += f"{args.device}, as the root mean square over {args.seeds} seeds\n\n{tables(errors)}"
    print(text)
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "check_fp8.md").write_text(text)
    failures = [kind for kind, found in errors.items() if not found["FP8"] <= LIMIT]
    print(f"errors above {LIMIT}: {', '.join(failures)}" if failures else "every error is within its limit")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
