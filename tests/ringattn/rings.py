"""Run the same attention on one rank and on a ring, for the tests of this folder."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn import Layout, Mask, ring_attention, simulate

NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass
class Case:
    """One attention problem over the whole sequence."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor

    @classmethod
    def random(
        cls,
        seq_len: int,
        batch: int = 1,
        heads: int = 4,
        key_heads: int = 2,
        dim: int = 8,
        value_dim: int = 8,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> "Case":
        """Draw inputs and upstream gradients from a normal distribution. The values do not depend on the dtype."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(batch, seq_len, *shape, generator=generator, dtype=torch.float64).to(dtype)

        return cls(
            normal(heads, dim), normal(key_heads, dim), normal(key_heads, value_dim), normal(heads, value_dim), normal(heads)
        )

    def to(self, target: torch.dtype | str) -> "Case":
        """Return the problem in another dtype, or on another device."""
        return Case(*(x.to(target) for x in (self.q, self.k, self.v, self.dout, self.dlse)))

    def on_rank(self, layout: Layout, mask: Mask, rank: int, group, attend=ring_attention, **options) -> list[Tensor]:
        """Return one rank's tokens of (out, lse, dq, dk, dv), for the loss sum(out * dout) + sum(lse * dlse)."""
        if attend is ring_attention:
            options["group"] = group
        q, k, v = (layout.shard(x, rank).requires_grad_() for x in (self.q, self.k, self.v))
        out, lse = attend(q, k, v, layout=layout, mask=mask, return_lse=True, **options)
        upstream = layout.shard(self.dout, rank), layout.shard(self.dlse, rank).to(lse.dtype)
        return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), (q, k, v), upstream)]

    def on_ring(self, layout: Layout, mask: Mask, all_pairs: bool = False, **options) -> list[Tensor]:
        """Return (out, lse, dq, dk, dv) of the whole sequence, computed on a simulated ring.

        `all_pairs` says whether every pair of ranks is connected directly, so that blocks are not relayed.
        """
        ranks = simulate(layout.ranks, lambda rank, group: self.on_rank(layout, mask, rank, group, **options), all_pairs)
        return unshard_results(layout, ranks)

    def unsharded(self, mask: Mask, backend: str = "reference", **options) -> list[Tensor]:
        """Return (out, lse, dq, dk, dv) of the whole sequence, computed on one rank."""
        return self.on_rank(Layout.contiguous(self.q.shape[1], 1), mask, 0, None, backend=backend, **options)


def unshard_results(layout: Layout, ranks: list[list[Tensor]]) -> list[Tensor]:
    """Join the results (out, lse, dq, dk, dv) of all ranks."""
    return [layout.unshard([shards[i] for shards in ranks]) for i in range(len(NAMES))]


def relative_errors(got: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Return the error of the worst row relative to the largest row, by name.

    A norm over the whole tensor could hide a few wrong rows.
    """
    errors = {}
    for name, x, y in zip(NAMES, got, expected, strict=True):
        assert x.shape == y.shape, name
        x, y = x.double().flatten(0, 1).flatten(1), y.double().flatten(0, 1).flatten(1)
        errors[name] = ((x - y).norm(dim=1).max() / y.norm(dim=1).max()).item() if y.numel() else 0.0
    return errors


def assert_close(got: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Check that no row of any tensor has a relative error above the tolerance."""
    errors = relative_errors(got, expected)
    assert all(error <= tolerance for error in errors.values()), errors


def documents(seq_len: int) -> list[int]:
    """Lengths of documents: single tokens at both ends and in the middle, and one document that spans many shards."""
    half = seq_len // 2
    return [1, half, 1, seq_len - half - 3, 1]


def masks(seq_len: int) -> dict[str, Mask]:
    """The kinds of mask with which every layout and schedule is tested."""
    return {
        "causal": Mask.causal(),
        "full": Mask.full(),
        "window": Mask.causal(window=7),
        "documents": Mask.causal(documents=documents(seq_len)),
        "window+documents": Mask.causal(window=5, documents=documents(seq_len)),
        "two-sided": Mask(window=(9, 4), documents=documents(seq_len)),
        "intervals": Mask.from_intervals(*prefix_intervals(seq_len)),
    }


def prefix_intervals(seq_len: int) -> tuple[Tensor, Tensor]:
    """A causal mask, except that the first third attends to all of itself, and the last third only to the second half."""
    positions = torch.arange(seq_len)
    third = seq_len // 3
    return torch.where(positions < seq_len - third, 0, seq_len // 2), (positions + 1).clamp(min=third)


MASK_NAMES = ("causal", "full", "window", "documents", "window+documents")
ALL_MASK_NAMES = tuple(masks(8))
