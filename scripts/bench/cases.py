"""One attention problem of a benchmark: its mask, its inputs, its FLOPs and bytes, and its results in float64."""

import math
import random
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ringattn import BlockMask, Mask
from ringattn.kernels.interval_mask import Intervals
from scripts.accuracy import float64_results, group_error

BLOCK = 128  # rows and columns of a block of the block-sparse cases
# Matrix products of one (query, key) pair, relative to a forward: a forward has two, and a backward has five.
RELATIVE_FLOPS = {"forward": 1.0, "backward": 2.5, "both": 3.5}


@dataclass(frozen=True)
class Case:
    """Self-attention of one bf16 sequence."""

    kind: str  # full, causal, window, documents, short documents or blocks
    length: int  # tokens, a multiple of BLOCK
    heads: int
    head_dim: int
    kept: float = 1.0  # the fraction of blocks that are computed, chosen at random; only for the kind "blocks"
    key_heads: int | None = None  # None: as many as query heads

    @property
    def num_key_heads(self) -> int:
        return self.key_heads or self.heads

    @property
    def label(self) -> str:
        label = f"{self.kind} {self.kept:.1%}" if self.kind == "blocks" else self.kind
        return f"{label}, {self.heads}/{self.key_heads} heads" if self.key_heads else label

    @property
    def window(self) -> int | None:
        """4,096 keys, or a quarter of the sequence if that is less."""
        return min(4096, self.length // 4) if self.kind == "window" else None

    @cached_property
    def documents(self) -> list[int] | None:
        """The lengths of the packed documents, drawn log-uniformly and the same in every run.

        A document has between 1 token and all tokens of the sequence. A short document has between 1/256 and 1/2 of them.
        """
        if "documents" not in self.kind:
            return None
        shortest, longest = (1, self.length) if self.kind == "documents" else (self.length / 256, self.length / 2)
        generator, lengths = random.Random(0), []
        while (remaining := self.length - sum(lengths)) > 0:
            drawn = math.exp(generator.uniform(math.log(shortest), math.log(longest)))
            lengths.append(min(remaining, max(1, round(drawn))))
        return lengths

    @cached_property
    def keep(self) -> Tensor | None:
        """Which blocks are computed, bool (blocks, blocks) on the CPU: exactly the fraction `kept`, the same in every run."""
        if self.kind != "blocks":
            return None
        side = self.length // BLOCK
        order = torch.randperm(side**2, generator=torch.Generator().manual_seed(0))
        return (order < round(self.kept * side**2)).view(side, side)

    @cached_property
    def mask(self) -> Mask:
        """The mask without its blocks."""
        if self.kind in ("full", "blocks"):
            return Mask.full()
        return Mask.causal(window=self.window, documents=self.documents)

    def blocks(self, device: torch.device) -> BlockMask | None:
        """Return the blocks that are computed, on `device`; None for all."""
        return None if self.keep is None else BlockMask(self.keep[None, None].to(device), BLOCK)

    @cached_property
    def pairs(self) -> int:
        """The number of (query, key) pairs per head that the mask allows."""
        return int(self.keep.sum()) * BLOCK**2 if self.kind == "blocks" else self.mask.pairs(self.length)[0]

    def flops(self, direction: str) -> float:
        """Return the FLOPs of a "forward" (4 per head, pair and element of a head), a "backward" or "both"."""
        return 4.0 * self.heads * self.pairs * self.head_dim * RELATIVE_FLOPS[direction]

    def bytes(self, direction: str) -> int:
        """Return the bytes of q, k, v and out for a "forward", and also those of dout, dq, dk and dv for a "backward"."""
        heads = 2 * (self.heads + self.num_key_heads)
        return 2 * self.length * heads * self.head_dim * (1 if direction == "forward" else 2)

    @property
    def score_bytes(self) -> int:
        """The bytes of the N x N bf16 scores, which no implementation here stores."""
        return 2 * self.heads * self.length**2

    def inputs(self, device: torch.device) -> list[Tensor]:
        """Return q, k, v and dout, standard normal bf16 (1, length, heads, head_dim); all but dout require gradients."""
        generator = torch.Generator(device).manual_seed(0)
        return random_inputs(self, self.length, generator)


def random_inputs(case: Case, rows: int, generator: torch.Generator) -> list[Tensor]:
    """Draw q, k, v and dout of `rows` tokens on the device of the generator; all but dout require gradients."""
    heads = case.heads, case.num_key_heads, case.num_key_heads, case.heads
    options = {"generator": generator, "device": generator.device, "dtype": torch.bfloat16}
    q, k, v, dout = (torch.randn(1, rows, count, case.head_dim, **options) for count in heads)
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def expected_results(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Return out, dq, dk and dv in float64, for the first and the last key head and the query heads that use them."""
    q, dout = (_first_and_last(x, case.heads // case.num_key_heads) for x in (q, dout))
    k, v = (_first_and_last(x, 1) for x in (k, v))
    intervals = Intervals.of(*case.mask.intervals(case.length), case.length, q.device)
    return float64_results(q, k, v, dout, intervals, case.blocks(q.device))


def checked_error(actual: Tensor, expected: Tensor) -> float:
    """Return the `group_error` of the heads that `expected_results` has computed."""
    return group_error(_first_and_last(actual, expected.shape[2] // 2), expected).item()


def _first_and_last(x: Tensor, heads: int) -> Tensor:
    """Return the first `heads` and the last `heads` heads of x (B, N, H, D)."""
    return torch.cat([x[:, :, :heads], x[:, :, -heads:]], 2).detach()
