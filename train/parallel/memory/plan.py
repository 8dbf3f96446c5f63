"""A memory plan: where a rank keeps the data of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """Where a rank keeps the data of a step. All ranks have the same plan."""

    # How many blocks, beginning with the first, the backward recomputes, except for attention.
    recomputed_blocks: int = 0
    # How many of these blocks, beginning with the first, have their inputs and attention results in host memory. The last block
    # has not, because the backward pass begins with it.
    offloaded_blocks: int = 0
    # How many blocks, up to the last, have their fp32 weights, gradients and moments in host memory.
    host_blocks: int = 0
    # How many tokens of a sequence a rank processes at once, except in attention. 0: all.
    chunk: int = 0

    def describe(self, layers: int) -> str:
        """Return the choices that differ from the default, for a model with this number of blocks."""
        choices = []
        if self.recomputed_blocks:
            choices.append(f"the backward pass recomputes {self.recomputed_blocks} of {layers} blocks except for attention")
        if self.offloaded_blocks:
            choices.append(f"the inputs and attention results of {self.offloaded_blocks} blocks are in host memory")
        if self.host_blocks:
            choices.append(f"the optimizer of {self.host_blocks} blocks is in host memory")
        if self.chunk:
            choices.append(f"at most {self.chunk:,} tokens are processed at once")
        return ", ".join(choices)
