"""A memory plan: where a rank keeps the data of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """Where a rank keeps the data of a step. All ranks have the same plan."""

    recomputed_blocks: int = 0  # how many blocks, beginning with the first, the backward recomputes, except for attention

    def describe(self, layers: int) -> str:
        """Return the choices that differ from the default, for a model with this number of blocks."""
        count = self.recomputed_blocks
        return f"the backward pass recomputes {count} of {layers} blocks except for attention" if count else ""
