"""Compute attention in float64, and define how large the errors of kernels and rings may be.

`row_error` measures every row separately, and `group_error` measures 64 rows together.
"""

import torch
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.interval_mask import Intervals

NAMES = ("out", "lse", "dq", "dk", "dv")

# The largest accepted `row_error` of each result, in multiples of the dtype's machine epsilon. Rounding `out` changes delta =
# rowsum(dout * out), so dq and dk have larger limits.
TOLERANCE = {"out": 2, "dq": 8, "dk": 4, "dv": 2}
# The largest accepted error of an lse. For all 16-bit inputs, the lse is computed in fp32.
LSE_TOLERANCE = 1e-5
# The largest accepted error for fp32 inputs. The limit allows rounding errors of sums over about 2,000 keys. A kernel that
# leaves out a single key has an error of 2e-2.
FP32_TOLERANCE = 5e-5

GROUP = 64  # the number of rows that `group_error` measures together
# The largest accepted `group_error`. Rounding to bf16 causes a `group_error` of 0.003 to 0.005. If a kernel skips one tile of
# 64 keys out of 16,384, the error is 0.06.
GROUP_TOLERANCE = 0.02

# The largest number of scores that are computed at one time. In float64, these scores take 0.5 GiB.
MAX_SCORES = 2**26


@torch.no_grad()
def float64_results(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, intervals: Intervals, blocks: BlockMask | None = None
) -> dict[str, Tensor]:
    """Compute attention and its gradients in float64 with `ringattn.kernels.reference`.

    To save memory, the function computes few heads and queries at a time.

    Args:
        q: (B, N, Hq, D), k: (B, Nk, Hkv, D), v: (B, Nk, Hkv, Dv), any floating-point dtype. Hkv divides Hq.
        dout: (B, N, Hq, Dv).
        intervals: the range of keys to which each query may attend.
        blocks: which blocks of 128 x 128 scores are computed. None means all blocks.

    Returns:
        A dict of float64 tensors. The tensors "dq", "dk" and "dv" have the shapes of q, k and v. The shapes of "out" and "lse"
        are (B, N, Hq, Dv) and (B, N, Hq).
    """
    group, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    num_rows = max(1, MAX_SCORES // k.shape[1] // group // 128) * 128
    results = {
        name: torch.zeros(x.shape, dtype=torch.float64, device=q.device) for name, x in (("dq", q), ("dk", k), ("dv", v))
    }
    results["out"] = torch.zeros(dout.shape, dtype=torch.float64, device=q.device)
    results["lse"] = torch.zeros_like(results["dq"][..., 0])
    keys = slice(0, k.shape[1])
    for head in range(k.shape[2]):
        key_head, heads = slice(head, head + 1), slice(head * group, (head + 1) * group)
        key, value = k[:, :, key_head].double(), v[:, :, key_head].double()
        grad_key, grad_value = results["dk"][:, :, key_head], results["dv"][:, :, key_head]
        for start in range(0, q.shape[1], num_rows):
            rows = slice(start, min(start + num_rows, q.shape[1]))
            query, grad = q[:, rows, heads].double(), dout[:, rows, heads].double()
            options = {"blocks": None if blocks is None else blocks.restrict(rows, keys)}
            problem = intervals.restrict(rows, keys), scale
            out, lse = reference.forward(query, key, value, *problem, final=True, **options)
            results["out"][:, rows, heads], results["lse"][:, rows, heads] = out, lse
            grads = results["dq"][:, rows, heads], grad_key, grad_value
            reference.backward(query, key, value, grad, lse, reference.row_delta(out, grad), *problem, *grads, **options)
    return results


def output_of(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference between `actual` and `expected` (B, N, H, D), relative to the scale of the row.

    The scale of a row is its largest element. The scale is at least a tenth of the largest element of `expected`. A NaN counts
    as infinity.
    """
    scale = expected.abs().amax(-1)
    # For a sequence of one token, dq and dk are zero. Therefore errors of dq and dk are relative to the inputs, whose scale is
    # 1.
    scale = scale.clamp(min=1.0 if len(scale[0]) == 1 else 0.1 * scale.max().item())
    return ((actual.double() - expected).abs().amax(-1) / scale).nan_to_num(nan=float("inf")).max().item()


def row_errors(results: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the `row_error` of each result. The error of an lse is relative if the magnitude of the lse is above 1."""
    errors = {}
    for name, x in results.items():
        if name == "lse":
            relative = (x.double() - expected[name]).abs() / expected[name].abs().clamp(min=1)
            errors[name] = relative.nan_to_num(nan=float("inf")).max().item()
        else:
            errors[name] = row_error(x, expected[name])
    return errors


def row_limits(dtype: torch.dtype) -> dict[str, float]:
    """Return the limits of `row_errors` for attention on inputs of `dtype`."""
    eps = torch.finfo(dtype).eps
    return {name: LSE_TOLERANCE if name == "lse" else max(TOLERANCE[name] * eps, FP32_TOLERANCE) for name in NAMES}


@torch.no_grad()
def group_error(actual: Tensor, expected: Tensor) -> Tensor:
    """Return the largest relative error of any GROUP consecutive rows, as a float64 scalar.

    The relative error divides the norm of a group's errors by the norm of the group's expected values.

    Args:
        actual, expected: (B, N, H, D); GROUP divides N.
    """
    actual, expected = (x.double().unflatten(1, (-1, GROUP)) for x in (actual, expected))
    error, scale = (torch.linalg.vector_norm(x, dim=(2, 4)) for x in (actual - expected, expected))
    return (error / scale.clamp(min=1e-12)).nan_to_num(nan=float("inf")).max()
