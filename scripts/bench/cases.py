"""One attention problem of a benchmark: its mask, inputs, work and bytes, and the float64 results it is held to."""

import math
import random
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ringattn import BlockMask, Mask
from ringattn.kernels import reference
from ringattn.kernels.interval_mask import Intervals

BLOCK = 128  # rows of a block of the block-sparse cases
GROUP = 64  # rows whose error is taken together
CHECKED_HEADS = [0, -1]
# Rounding to bf16 leaves some 0.3% to 0.5%; a kernel that skips one tile of 64 keys of 16,384 is off by 6%.
TOLERANCE = 0.02


@dataclass(frozen=True)
class Case:
    """Self-attention of one bf16 sequence."""

    kind: str  # full | causal | window | documents | short documents | blocks
    length: int  # a multiple of BLOCK
    heads: int
    head_dim: int
    kept: float = 1.0  # of the blocks, at random; only of kind "blocks"
    key_heads: int | None = None  # None: as many as query heads

    @property
    def label(self) -> str:
        label = f"{self.kind} {self.kept:.1%}" if self.kind == "blocks" else self.kind
        return f"{label}, {self.heads}/{self.key_heads} heads" if self.key_heads else label

    @property
    def window(self) -> int | None:
        """4,096 keys, less in short sequences."""
        return min(4096, self.length // 4) if self.kind == "window" else None

    @cached_property
    def documents(self) -> list[int] | None:
        """Lengths drawn log-uniformly between 1 and the sequence's, or if short between its 1/256 and 1/2; always the same."""
        if "documents" not in self.kind:
            return None
        shortest, longest = (1, self.length) if self.kind == "documents" else (self.length / 256, self.length / 2)
        rng, lengths = random.Random(0), []
        while (left := self.length - sum(lengths)) > 0:
            drawn = math.exp(rng.uniform(math.log(shortest), math.log(longest)))
            lengths.append(min(left, max(1, round(drawn))))
        return lengths

    @cached_property
    def keep(self) -> Tensor | None:
        """bool (blocks, blocks) on the CPU: exactly the fraction `kept` of them, at random, the same at every run."""
        if self.kind != "blocks":
            return None
        side = self.length // BLOCK
        order = torch.randperm(side**2, generator=torch.Generator().manual_seed(0))
        return (order < round(self.kept * side**2)).view(side, side)

    @cached_property
    def mask(self) -> Mask:
        if self.kind in ("full", "blocks"):
            return Mask.full()
        return Mask.causal(window=self.window, documents=self.documents)

    def blocks(self, device: torch.device) -> BlockMask | None:
        return None if self.keep is None else BlockMask(self.keep[None, None].to(device), BLOCK)

    @cached_property
    def pairs(self) -> int:
        """(query, key) pairs that one head needs."""
        return int(self.keep.sum()) * BLOCK**2 if self.kind == "blocks" else self.mask.pairs(self.length)[0]

    def flops(self, direction: str) -> float:
        """4 H pairs D forward, 2.5 times that backward."""
        return 4.0 * self.heads * self.pairs * self.head_dim * (1 if direction == "forward" else 2.5)

    def bytes(self, direction: str) -> int:
        """q, k, v, out once forward; dout and the three gradients too backward."""
        heads = 2 * (self.heads + (self.key_heads or self.heads))
        return 2 * self.length * heads * self.head_dim * (1 if direction == "forward" else 2)

    @property
    def score_bytes(self) -> int:
        """The N x N bf16 scores that are never written down."""
        return 2 * self.heads * self.length**2

    def inputs(self, device: torch.device) -> list[Tensor]:
        """q, k, v, dout, standard normal bf16 (1, length, heads or key_heads, head_dim); all but dout require gradients."""
        generator = torch.Generator(device).manual_seed(0)
        key_heads = self.key_heads or self.heads
        shapes = [(1, self.length, heads, self.head_dim) for heads in (self.heads, key_heads, key_heads, self.heads)]
        tensors = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for shape in shapes]
        return [x.requires_grad_() for x in tensors[:3]] + tensors[3:]


@torch.no_grad()
def expected_results(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """out, dq, dk, dv in float64 of the checked heads, every row of them, by `ringattn.kernels.reference` some queries at a time.

    Checked are the first and the last key head, and the first and the last query head, or with grouped heads their groups.
    """
    k, v = (x[:, :, CHECKED_HEADS].double() for x in (k, v))
    q, dout = (_checked(x, case).double() for x in (q, dout))
    results = {name: torch.zeros_like(x) for name, x in (("out", q), ("dq", q), ("dk", k), ("dv", v))}
    intervals = Intervals.of(*case.mask.intervals(case.length), case.length, q.device)
    blocks, scale = case.blocks(q.device), case.head_dim**-0.5
    num_rows = max(1, 2**26 // case.length // BLOCK) * BLOCK  # half a GiB of float64 scores a head
    for start in range(0, case.length, num_rows):
        rows, keys = slice(start, min(start + num_rows, case.length)), slice(0, case.length)
        options = {"blocks": None if blocks is None else blocks.cut(rows, keys)}
        part = intervals.cut(rows, keys), scale
        out, lse = reference.forward(q[:, rows], k, v, *part, final=True, **options)
        delta = reference.row_delta(out, dout[:, rows])
        grads = results["dq"][:, rows], results["dk"], results["dv"]
        reference.backward(q[:, rows], k, v, dout[:, rows], lse, delta, *part, *grads, **options)
        results["out"][:, rows] = out
    return results


def _checked(x: Tensor, case: Case) -> Tensor:
    """The checked heads of x (B, N, heads, D), where these are query heads."""
    group = case.heads // (case.key_heads or case.heads)
    return torch.cat([x[:, :, :group], x[:, :, -group:]], 2)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """`largest_error` of the checked heads."""
    half = expected.shape[2] // 2
    return largest_error(torch.cat([actual[:, :, :half], actual[:, :, -half:]], 2), expected).item()


@torch.no_grad()
def largest_error(actual: Tensor, expected: Tensor) -> Tensor:
    """Largest error of GROUP rows of any head, relative to their own size, both as Euclidean norms: fp64 ().

    Rows far down a causal mask are small, so the largest row must not set the scale; the gradient of a row that sees one
    key vanishes, so single rows must not either.
    """
    actual, expected = (x.double().unflatten(1, (-1, GROUP)) for x in (actual, expected))
    error, scale = (torch.linalg.vector_norm(x, dim=(2, 4)) for x in (actual - expected, expected))
    return (error / scale.clamp(min=1e-12)).nan_to_num(nan=float("inf")).max()
