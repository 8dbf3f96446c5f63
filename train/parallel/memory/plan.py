"""A memory plan: where a rank keeps the data of a step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryPlan:
    """Decides where a rank keeps the data of a step. All ranks have the same plan."""

    # The backward pass recomputes the first `recomputed_blocks` blocks, except for their attention.
    recomputed_blocks: int = 0
    # The first `attention_blocks` blocks also recompute attention.
    attention_blocks: int = 0
    # The inputs and attention results of the first `offloaded_blocks` recomputed blocks are in host memory. The last block is
    # never offloaded, because the backward pass begins there.
    offloaded_blocks: int = 0
    # The last `host_blocks` blocks have their fp32 weights, gradients and moments in host memory.
    host_blocks: int = 0
    # The number of tokens per chunk outside of attention. The value 0 disables chunks.
    chunk: int = 0

    def num_chunks(self, tokens: int) -> int:
        return -(-tokens // self.chunk) if self.chunk else 1

    def describe(self, layers: int) -> str:
        """Describe the choices that differ from the default, for a model with `layers` blocks."""
        texts = {
            f"the backward pass recomputes {self.recomputed_blocks} of {layers} blocks except for attention": (
                self.recomputed_blocks
            ),
            f"and attention in {self.attention_blocks} of them": self.attention_blocks,
            f"the inputs and attention results of {self.offloaded_blocks} blocks are in host memory": self.offloaded_blocks,
            f"the optimizer of {self.host_blocks} blocks is in host memory": self.host_blocks,
            f"{self.chunk:,} tokens at once": self.chunk,
        }
        return ", ".join(text for text, is_chosen in texts.items() if is_chosen)
