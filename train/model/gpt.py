"""The GPT, with RMSNorm, rotary position embeddings, grouped query heads and SwiGLU.

The model receives attention as a function, so it uses no process group and runs on any shard of a sequence:

    attend(q (B, N, Hq, D), k (B, N, Hkv, D), v (B, N, Hkv, D)) -> (B, N, Hq, D)

It also receives a function `finish`, which processes the last hidden states while sharded parameters are gathered. `finish` can
compute the loss in chunks, so that the logits of all tokens never exist at the same time.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.train.model.rope import rope, rotate
from ringattn.train.settings.config import ModelConfig, round_up

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Finish = Callable[[Tensor, Tensor], Tensor]


def padded_vocabulary(config: ModelConfig, vocab_size: int) -> int:
    """Return the number of rows of the embedding: the larger vocabulary, rounded up to a multiple of 64."""
    return round_up(max(vocab_size, config.vocab_size or 0), 64)


class Block(nn.Module):
    """A layer that computes x + attention(norm(x)), and then x + SwiGLU(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim, ffn_dim = config.resolved_head_dim, config.resolved_ffn_dim
        self.attention_norm = nn.Parameter(torch.empty(config.dim))
        self.query = nn.Linear(config.dim, config.heads * self.head_dim, bias=config.qkv_bias)
        self.key = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.value = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=config.qkv_bias)
        self.query_norm = nn.Parameter(torch.empty(self.head_dim)) if config.qk_norm else None
        self.key_norm = nn.Parameter(torch.empty(self.head_dim)) if config.qk_norm else None
        self.output = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.ffn_norm = nn.Parameter(torch.empty(config.dim))
        self.gate = nn.Linear(config.dim, ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, config.dim, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the weights as in GPT-2, with standard deviation 0.02, or 0.02 / sqrt(2 * layers) for residual outputs."""
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for linear in (self.query, self.key, self.value, self.gate, self.up):
            nn.init.normal_(linear.weight, std=0.02, generator=generator)
        for linear in (self.output, self.down):
            nn.init.normal_(linear.weight, std=residual, generator=generator)
        for name, parameter in self.named_parameters():
            if name.endswith("norm"):
                nn.init.ones_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.after(x, attend(*self.before(x, cos, sin)))

    # `before` and `after` do not communicate, so torch.compile can compile them.

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rotated queries, the rotated keys, and the values."""
        h = self.norm(x, self.attention_norm)
        q, k, v = (project(h).unflatten(-1, (-1, self.head_dim)) for project in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.norm(q, self.query_norm), self.norm(k, self.key_norm)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def after(self, x: Tensor, attention: Tensor) -> Tensor:
        """Add the attention output (B, N, Hq, D) and the result of the SwiGLU to the residual stream `x` (B, N, dim)."""
        x = x + self.output(attention.flatten(-2))
        h = self.norm(x, self.ffn_norm)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply RMSNorm over the last dimension."""
        return F.rms_norm(x, x.shape[-1:], weight, self.config.norm_eps)


class GPT(nn.Module):
    """A GPT. Its vocabulary is padded to a multiple of 64."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.layers = [config.layer(index) for index in range(config.layers)]
        padded = padded_vocabulary(config, vocab_size)
        self.embedding = nn.Parameter(torch.empty(padded, config.dim))
        # The type of a ModuleList does not contain the type of its modules.
        self.blocks = cast("list[Block]", nn.ModuleList(Block(config) for _ in range(config.layers)))
        self.norm = nn.Parameter(torch.empty(config.dim))
        self.head = None if config.tie_embeddings else nn.Parameter(torch.empty(padded, config.dim))

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the parameters outside the blocks."""
        nn.init.normal_(self.embedding, std=0.02, generator=generator)
        if self.head is not None:
            nn.init.normal_(self.head, std=0.02, generator=generator)
        nn.init.ones_(self.norm)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend | Sequence[Attend], finish: Finish) -> Tensor:
        """Run this rank's tokens through the model, and return the result of `finish`.

        Args:
            tokens: int64 (B, N), this rank's tokens of the sequence.
            positions: int64 (N,) or (B, N), their positions in the whole sequence.
            attend: the function for attention over the whole sequence, or one per layer.
            finish: finish(hidden, head) receives the normalised hidden states (B, N, dim) and the output matrix (padded
                vocabulary, dim).
        """
        x = F.embedding(tokens, self.embedding)
        angles = {settings: rope(positions, settings) for settings in dict.fromkeys(layer.rope for layer in self.layers)}
        attends: Sequence[Attend] = attend if isinstance(attend, Sequence) else [attend] * len(self.blocks)
        for block, layer, each in zip(self.blocks, self.layers, attends, strict=True):
            x = block(x, *angles[layer.rope], each)
        x = F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)
        return finish(x, self.embedding if self.head is None else self.head)
