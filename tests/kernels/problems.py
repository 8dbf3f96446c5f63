"""Random attention problems for tests."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ringattn.kernels import reference
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals

GRADIENTS = ("dq", "dk", "dv")


@dataclass
class Problem:
    """Arguments of `forward` and `backward`. lse and delta are those of the float64 reference, in fp32.

    `options` holds the keyword arguments that both have in common: dropout, blocks and precision.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    intervals: Intervals
    scale: float
    dout: Tensor
    lse: Tensor
    delta: Tensor
    options: dict = field(default_factory=dict)

    def forward(self, module, **arguments):
        return module.forward(self.q, self.k, self.v, self.intervals, self.scale, **self.options, **arguments)

    def gradients(self, module, **arguments) -> tuple[Tensor, ...]:
        """Return (dq, dk, dv); the arguments are those of `ringattn.kernels.reference.backward`."""
        operands = self.q, self.k, self.v, self.dout, self.lse, self.delta, self.intervals, self.scale
        return module.backward(*operands, **self.options, **arguments)

    def backward(self, module) -> tuple[Tensor, ...]:
        """Return new (dq, dk, dv) in the dtype of states, which are not rounded."""
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
    **options,
) -> Problem:
    """Create a problem with standard normal inputs under the intervals; `heads` is (Hq, Hkv) and `dims` is (D, Dv)."""
    generator = torch.Generator().manual_seed(0)
    num_queries = lo.shape[1]

    def normal(tokens: int, num_heads: int, dim: int) -> Tensor:
        return torch.randn(batch, tokens, num_heads, dim, generator=generator).to(device, dtype)

    q = normal(num_queries, heads[0], dims[0])
    k, v = normal(num_keys, heads[1], dims[0]), normal(num_keys, heads[1], dims[1])
    dout, scale = normal(num_queries, heads[0], dims[1]), dims[0] ** -0.5
    intervals = Intervals.of(lo, hi, num_keys, device)
    out, lse = reference.forward(q.double(), k.double(), v.double(), intervals, scale, final=True, **options)
    delta = reference.row_delta(out, dout.double())
    return Problem(q, k, v, intervals, scale, dout, lse.float(), delta.float(), options)


def make_dropout(num_queries: int, num_keys: int, seed: int = 0, device: torch.device | str = "cpu") -> Dropout:
    """Create dropout at striped query positions and shuffled key positions."""
    queries = 3 + 4 * torch.arange(num_queries)
    keys = torch.randperm(2 * num_keys, generator=torch.Generator().manual_seed(seed))[:num_keys]
    return Dropout(0.3, seed, *(x.to(device, torch.int32) for x in (queries, keys)))


def make_blocks(
    num_queries: int,
    num_keys: int,
    shape: tuple[int, int] = (1, 1),
    size: int = 64,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Create a random block mask for `shape` (batch entries, query heads), of which six in ten blocks are kept."""
    num_blocks = (-(-n // size) for n in (num_queries, num_keys))
    keep = torch.rand(*shape, *num_blocks, generator=torch.Generator().manual_seed(seed)) < 0.6
    return BlockMask(keep.to(device), size)


STRIDED = ("heads-first", "every-other-token", "strided-head-dim")


def strided(x: Tensor, layout: str) -> Tensor:
    """Return a copy of x (B, N, H, D) that is a part of a larger tensor, in one of the ways of STRIDED."""
    batch, tokens, heads, dim = x.shape
    if layout == "heads-first":
        y = x.new_zeros(batch, heads, tokens, dim).transpose(1, 2)
    elif layout == "every-other-token":
        y = x.new_zeros(batch, 2 * tokens, heads + 1, dim)[:, ::2, 1:]
    else:
        y = x.new_zeros(batch, tokens, heads, 2 * dim)[..., ::2]
    return y.copy_(x)


def spread_heads(x: Tensor, stride: int = 2**30) -> Tensor:
    """Return a copy of x (1, N, H, D) whose heads are `stride` elements apart. The memory between two heads is never touched.

    The memory begins 2**31 elements before the first head. An offset that overflows 32 bits therefore reads wrong numbers from
    there, instead of ending the process.
    """
    _, tokens, heads, dim = x.shape
    before, size = 2**31, (heads - 1) * stride + tokens * dim
    memory = torch.UntypedStorage((before + size) * x.element_size(), device=x.device)
    y = x.new_zeros(0).set_(memory, before, x.shape, (size, dim, stride, 1))
    return y.copy_(x)
