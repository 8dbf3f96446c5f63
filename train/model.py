"""A GPT: RMSNorm, rotary positions, grouped heads, SwiGLU. Architecture only.

How tokens attend to each other is handed in, so the model runs on any shard of a sequence and knows no process group:

    attend(q (B, N, Hq, D), k (B, N, Hkv, D), v (B, N, Hkv, D)) -> (B, N, Hq, D)

One serves all layers, or each has its own, which may remember keys. What becomes of the last hidden states is handed in, too:
`finish` runs inside `forward`, where sharded parameters are whole, and no logits need ever exist for all tokens at once.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import ModelConfig, round_up

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Finish = Callable[[Tensor, Tensor], Tensor]
FASTEST = 4.0  # turns within the length a model was trained on, beyond which features keep their frequency


def padded_vocabulary(config: ModelConfig, vocab_size: int) -> int:
    """Rows of the embedding for a tokenizer of `vocab_size` tokens: at least the model's own, a multiple of 64."""
    return round_up(max(vocab_size, config.vocab_size or 0), 64)


def rope(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, fp32 (B or 1, N, 1, D / 2), of global `positions` (N,) or (B, N).

    Feature pair i of position p turns by p * rope_theta ** (-2 i / D), or as `stretched` says.
    """
    dim = config.head_features
    frequency = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim)
    if config.rope_factor is not None:
        frequency = stretched(frequency, config.rope_factor, config.rope_trained_len)
    angle = torch.atleast_2d(positions).float()[..., None, None] * frequency
    return angle.cos(), angle.sin()


def stretched(frequency: Tensor, factor: float, trained_len: int) -> Tensor:
    """Frequencies of rotary angles for more positions than the `trained_len` that a model knew, as in Llama 3.1.

    Pairs that turned less than once in `trained_len` positions turn slower by `factor`, those that turned more than FASTEST
    times as before, and those between by a mean of both.
    """
    turns = frequency * trained_len / (2 * math.pi)
    kept = ((turns - 1) / (FASTEST - 1)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of every head of `x` (B, N, H, D), in fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim, ffn_dim = config.head_features, config.ffn_features
        self.attention_norm = nn.Parameter(torch.empty(config.dim))
        self.query = nn.Linear(config.dim, config.heads * self.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(config.heads * self.head_dim, config.dim, bias=False)
        self.ffn_norm = nn.Parameter(torch.empty(config.dim))
        self.gate = nn.Linear(config.dim, ffn_dim, bias=False)
        self.up = nn.Linear(config.dim, ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, config.dim, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Normal of std 0.02, as GPT-2; what writes to the residual stream is scaled by 1 / sqrt(2 * layers)."""
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for linear in (self.query, self.key, self.value, self.gate, self.up):
            nn.init.normal_(linear.weight, std=0.02, generator=generator)
        for linear in (self.output, self.down):
            nn.init.normal_(linear.weight, std=residual, generator=generator)
        nn.init.ones_(self.attention_norm)
        nn.init.ones_(self.ffn_norm)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        return self.after(x, attend(*self.before(x, cos, sin)))

    # what lies before and after attention touches each token by itself, and can be compiled apart from how ranks meet

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.rms_norm(x, x.shape[-1:], self.attention_norm, self.config.norm_eps)
        q, k, v = (project(h).unflatten(-1, (-1, self.head_dim)) for project in (self.query, self.key, self.value))
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def after(self, x: Tensor, attention: Tensor) -> Tensor:
        x = x + self.output(attention.flatten(-2))
        h = F.rms_norm(x, x.shape[-1:], self.ffn_norm, self.config.norm_eps)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class GPT(nn.Module):
    """Token embedding, blocks, norm, and an output matrix over a vocabulary padded to a multiple of 64."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        padded = padded_vocabulary(config, vocab_size)
        self.embedding = nn.Parameter(torch.empty(padded, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.dim))
        self.head = None if config.tie_embeddings else nn.Parameter(torch.empty(padded, config.dim))

    def init_weights(self, generator: torch.Generator) -> None:
        """Fill the parameters outside the blocks, which fill their own."""
        nn.init.normal_(self.embedding, std=0.02, generator=generator)
        if self.head is not None:
            nn.init.normal_(self.head, std=0.02, generator=generator)
        nn.init.ones_(self.norm)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend | Sequence[Attend], finish: Finish) -> Tensor:
        """Run this rank's rows through the model.

        Args:
            tokens: int64 (B, N), this rank's rows of the sequence.
            positions: int64 (N,) or (B, N), where in the whole sequence they stand.
            attend: attention over the whole sequence, see above; a sequence has one for every layer.
            finish: of the normalised hidden states (B, N, dim) and the output matrix (padded vocabulary, dim).

        Returns:
            What `finish` returns.
        """
        x = F.embedding(tokens, self.embedding)
        cos, sin = rope(positions, self.config)
        attends = attend if isinstance(attend, Sequence) else [attend] * len(self.blocks)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, cos, sin, attend)
        x = F.rms_norm(x, x.shape[-1:], self.norm, self.config.norm_eps)
        return finish(x, self.embedding if self.head is None else self.head)
