"""Random attention problems for tests."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.interval_mask import Intervals


@dataclass
class Problem:
    """Inputs of `forward` and `backward`; lse and delta, fp32, are those of the float64 reference.

    `features` holds the keyword arguments common to both: dropout, blocks, precision.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    intervals: Intervals
    scale: float
    dout: Tensor
    lse: Tensor
    delta: Tensor
    features: dict = field(default_factory=dict)

    def forward(self, module, **options):
        return module.forward(self.q, self.k, self.v, self.intervals, self.scale, **self.features, **options)

    def gradients(self, module, **options) -> tuple[Tensor, ...]:
        """(dq, dk, dv); `options` as for `ringattn.kernels.reference.backward`."""
        operands = self.q, self.k, self.v, self.dout, self.lse, self.delta, self.intervals, self.scale
        return module.backward(*operands, **self.features, **options)

    def backward(self, module) -> tuple[Tensor, ...]:
        """Fresh (dq, dk, dv), unrounded."""
        return self.gradients(module, grad_dtype=reference.state_dtype(self.q.dtype))

    def double(self) -> "Problem":
        values = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in vars(self).items()}
        return Problem(**values)


def make_problem(
    lo: Tensor,
    hi: Tensor,
    num_keys: int,
    dtype: torch.dtype = torch.float32,
    batch: int = 1,
    heads: tuple[int, int] = (2, 1),
    dims: tuple[int, int] = (16, 16),
    device: torch.device | str = "cpu",
    **features,
) -> Problem:
    """Standard normal inputs under the intervals; `heads` is (Hq, Hkv) and `dims` is (D, Dv)."""
    generator = torch.Generator().manual_seed(0)
    num_queries = lo.shape[1]

    def normal(rows: int, num_heads: int, dim: int) -> Tensor:
        return torch.randn(batch, rows, num_heads, dim, generator=generator).to(device, dtype)

    q, k, v = (
        normal(num_queries, heads[0], dims[0]),
        normal(num_keys, heads[1], dims[0]),
        normal(num_keys, heads[1], dims[1]),
    )
    dout, scale = normal(num_queries, heads[0], dims[1]), dims[0] ** -0.5
    intervals = Intervals.of(lo, hi, num_keys, device)
    out, lse = reference.forward(q.double(), k.double(), v.double(), intervals, scale, final=True, **features)
    delta = reference.row_delta(out, dout.double())
    return Problem(q, k, v, intervals, scale, dout, lse.float(), delta.float(), features)


STRIDED = ("heads-first", "every-other-row", "strided-head-dim")


def strided(x: Tensor, layout: str) -> Tensor:
    """`x` (B, N, H, D) as a part of a larger tensor, in one of the ways of STRIDED."""
    batch, rows, heads, dim = x.shape
    if layout == "heads-first":
        y = x.new_zeros(batch, heads, rows, dim).transpose(1, 2)
    elif layout == "every-other-row":
        y = x.new_zeros(batch, 2 * rows, heads + 1, dim)[:, ::2, 1:]
    else:
        y = x.new_zeros(batch, rows, heads, 2 * dim)[..., ::2]
    return y.copy_(x)
