"""Define the attention problems of the benchmarks, with masks, inputs, FLOPs and float64 results."""

import math
import random
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ringattn import BlockMask, Mask
from ringattn.kernels.interval_mask import Intervals
from scripts.accuracy import float64_results, group_error

BLOCK = 128  # in the block-sparse cases, a block has this many rows and columns


@dataclass(frozen=True)
class Case:
    """Self-attention of one bf16 sequence."""

    kind: str  # full, causal, window, documents, short documents or blocks
    length: int  # tokens, a multiple of BLOCK
    heads: int
    head_dim: int
    kept: float = 1.0  # the fraction of blocks that are computed, chosen at random. Only for the kind "blocks".
    key_heads: int | None = None  # default: the same as `heads`
    value_dim: int | None = None  # the head dim of v; default: the same as `head_dim`
    window_size: int | None = None  # the number of keys per query, for the kind "window"; default: see `window`

    @property
    def num_key_heads(self) -> int:
        return self.key_heads or self.heads

    @property
    def out_dim(self) -> int:
        return self.value_dim or self.head_dim

    @property
    def dims(self) -> str:
        return f"{self.head_dim}/{self.value_dim}" if self.value_dim else str(self.head_dim)

    @property
    def label(self) -> str:
        label = f"{self.kind} {self.kept:.1%}" if self.kind == "blocks" else self.kind
        label = f"window {self.window_size:,}" if self.window_size else label
        return f"{label}, {self.heads}/{self.key_heads} heads" if self.key_heads else label

    @property
    def window(self) -> int | None:
        """Return the window, by default 4,096 keys, but at most a quarter of the sequence."""
        return (self.window_size or min(4096, self.length // 4)) if self.kind == "window" else None

    @cached_property
    def documents(self) -> list[int] | None:
        """The lengths of the packed documents. The document lengths are drawn log-uniformly, and are the same in every run.

        The lengths of "documents" are between 1 and the length of the sequence. The lengths of "short documents" are between
        1/256 and 1/2 of the sequence.
        """
        if "documents" not in self.kind:
            return None
        shortest, longest = (1, self.length) if self.kind == "documents" else (self.length / 256, self.length / 2)
        generator = random.Random(0)
        lengths: list[int] = []
        while (remaining := self.length - sum(lengths)) > 0:
            drawn = math.exp(generator.uniform(math.log(shortest), math.log(longest)))
            lengths.append(min(remaining, max(1, round(drawn))))
        return lengths

    @cached_property
    def keep(self) -> Tensor | None:
        """Return the block mask as a bool tensor (blocks, blocks) on the CPU. Every run uses the same mask."""
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
        return self.mask.pairs(self.length)[0] if self.keep is None else int(self.keep.sum()) * BLOCK**2

    def flops(self, direction: str) -> float:
        """Return the FLOPs of a direction. The direction is "forward", "backward" or "both".

        The products for S, dq and dk use the head dim of q and k. The products for out, dP and dv use the head dim of v.
        """
        forward, backward = self.head_dim + self.out_dim, 3 * self.head_dim + 2 * self.out_dim
        elements = {"forward": forward, "backward": backward, "both": forward + backward}[direction]
        return 2.0 * self.heads * self.pairs * elements

    def bytes(self, direction: str) -> int:
        """Return the bytes of q, k, v and out. The direction "backward" also counts the bytes of dout, dq, dk and dv."""
        elements = (self.heads + self.num_key_heads) * (self.head_dim + self.out_dim)
        return 2 * self.length * elements * (1 if direction == "forward" else 2)

    @property
    def score_bytes(self) -> int:
        """Return the bytes of all N x N scores in bf16. No measured implementation stores all scores."""
        return 2 * self.heads * self.length**2

    def inputs(self, device: torch.device) -> list[Tensor]:
        """Return q, k, v and dout, which are standard normal bf16 tensors (1, length, heads, head dim).

        All tensors except dout require gradients.
        """
        generator = torch.Generator(device).manual_seed(0)
        return random_inputs(self, self.length, generator)


def random_inputs(case: Case, rows: int, generator: torch.Generator) -> list[Tensor]:
    """Return random q, k, v and dout (1, rows, heads, head dim) in bf16. All tensors except dout require gradients."""
    heads = case.heads, case.num_key_heads, case.num_key_heads, case.heads
    options = {"generator": generator, "device": generator.device, "dtype": torch.bfloat16}
    dims = case.head_dim, case.head_dim, case.out_dim, case.out_dim
    q, k, v, dout = (torch.randn(1, rows, count, dim, **options) for count, dim in zip(heads, dims, strict=True))
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def expected_results(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Compute float64 results for the first and the last key head."""
    q, dout = (_first_and_last(x, case.heads // case.num_key_heads) for x in (q, dout))
    k, v = (_first_and_last(x, 1) for x in (k, v))
    intervals = Intervals.of(*case.mask.intervals(case.length), case.length, q.device)
    return float64_results(q, k, v, dout, intervals, case.blocks(q.device))


def checked_error(actual: Tensor, expected: Tensor) -> float:
    return group_error(_first_and_last(actual, expected.shape[2] // 2), expected).item()


def _first_and_last(x: Tensor, heads: int) -> Tensor:
    return torch.cat([x[:, :, :heads], x[:, :, -heads:]], 2).detach()
