"""Define a case, which is one attention problem of a benchmark.

A case provides its mask and its inputs. A case also counts FLOPs and bytes, and computes float64 reference results.
"""

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
    key_heads: int | None = None  # None means one key head per query head
    value_dim: int | None = None  # the head dim of v. None means the head dim of q and k.
    window_size: int | None = None  # the number of keys per query, for the kind "window". None: see `window`.

    @property
    def num_key_heads(self) -> int:
        return self.key_heads or self.heads

    @property
    def out_dim(self) -> int:
        """Return the head dim of v and out."""
        return self.value_dim or self.head_dim

    @property
    def dims(self) -> str:
        """The head dim, or the head dims of q and of v if they differ."""
        return f"{self.head_dim}/{self.value_dim}" if self.value_dim else str(self.head_dim)

    @property
    def label(self) -> str:
        label = f"{self.kind} {self.kept:.1%}" if self.kind == "blocks" else self.kind
        label = f"window {self.window_size:,}" if self.window_size else label
        return f"{label}, {self.heads}/{self.key_heads} heads" if self.key_heads else label

    @property
    def window(self) -> int | None:
        """Return the number of keys in the window of the mask. Without `window_size`, the window has 4,096 keys, but at most a
        quarter of the sequence.
        """
        return (self.window_size or min(4096, self.length // 4)) if self.kind == "window" else None

    @cached_property
    def documents(self) -> list[int] | None:
        """The lengths of the packed documents. The lengths are drawn log-uniformly, and are the same in every run.

        In the kind "documents", a document has between 1 token and all tokens of the sequence. In the kind "short documents", a
        document has between 1/256 and 1/2 of the tokens of the sequence.
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
        """Return a bool tensor (blocks, blocks) on the CPU that is True for each computed block. Only cases of the kind
        "blocks" have a block mask.

        The fraction of computed blocks is exactly `kept`. Every run computes the same blocks.
        """
        if self.kind != "blocks":
            return None
        side = self.length // BLOCK
        order = torch.randperm(side**2, generator=torch.Generator().manual_seed(0))
        return (order < round(self.kept * side**2)).view(side, side)

    @cached_property
    def mask(self) -> Mask:
        """Return the mask of the case without its block mask."""
        if self.kind in ("full", "blocks"):
            return Mask.full()
        return Mask.causal(window=self.window, documents=self.documents)

    def blocks(self, device: torch.device) -> BlockMask | None:
        """Return the block mask on `device`, or None if all blocks are computed."""
        return None if self.keep is None else BlockMask(self.keep[None, None].to(device), BLOCK)

    @cached_property
    def pairs(self) -> int:
        """Return the number of (query, key) pairs per head that the mask allows."""
        return self.mask.pairs(self.length)[0] if self.keep is None else int(self.keep.sum()) * BLOCK**2

    def flops(self, direction: str) -> float:
        """Return the FLOPs of a direction. The direction is "forward", "backward" or "both".

        For each head and each (query, key) pair, a matrix product has 2 FLOPs per element of a head. In the forward pass, the
        product for S depends on the head dim of q and k, and the product for out depends on the head dim of v. In the backward
        pass, the products for S, dq and dk depend on the head dim of q and k. The products for dP and dv depend on the head dim
        of v.
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
        """Return the number of bytes that N x N bf16 scores would need. No measured implementation stores all scores."""
        return 2 * self.heads * self.length**2

    def inputs(self, device: torch.device) -> list[Tensor]:
        """Return q, k, v and dout, which are standard normal bf16 tensors (1, length, heads, head dim).

        All tensors except dout require gradients.
        """
        generator = torch.Generator(device).manual_seed(0)
        return random_inputs(self, self.length, generator)


def random_inputs(case: Case, rows: int, generator: torch.Generator) -> list[Tensor]:
    """Draw q, k, v and dout of `rows` tokens on the device of the generator. All tensors except dout require gradients."""
    heads = case.heads, case.num_key_heads, case.num_key_heads, case.heads
    options = {"generator": generator, "device": generator.device, "dtype": torch.bfloat16}
    dims = case.head_dim, case.head_dim, case.out_dim, case.out_dim
    q, k, v, dout = (torch.randn(1, rows, count, dim, **options) for count, dim in zip(heads, dims, strict=True))
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def expected_results(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Return float64 reference results for the first and the last key head, and for their query heads."""
    q, dout = (_first_and_last(x, case.heads // case.num_key_heads) for x in (q, dout))
    k, v = (_first_and_last(x, 1) for x in (k, v))
    intervals = Intervals.of(*case.mask.intervals(case.length), case.length, q.device)
    return float64_results(q, k, v, dout, intervals, case.blocks(q.device))


def checked_error(actual: Tensor, expected: Tensor) -> float:
    """Return the `group_error` of all heads that `expected_results` computes."""
    return group_error(_first_and_last(actual, expected.shape[2] // 2), expected).item()


def _first_and_last(x: Tensor, heads: int) -> Tensor:
    """Return the first `heads` heads and the last `heads` heads of x (B, N, H, D)."""
    return torch.cat([x[:, :, :heads], x[:, :, -heads:]], 2).detach()
