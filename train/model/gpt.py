"""Define the GPT, which has rotary position embeddings, grouped query heads and gated feed-forward networks.

The model receives attention as a function. The model therefore needs no process group and runs on any shard of a sequence:

    attend(q (B, N, Hq, D), k (B, N, Hkv, D), v (B, N, Hkv, D)) -> (B, N, Hq, D)

With `model.sinks`, attention also receives `sink_logits` (Hq,).

The model also receives a function `finish`. While sharded parameters are gathered, `finish` processes the last hidden states.
For example, `finish` computes the loss in chunks, so that the logits of all tokens never exist together.
"""

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.train.model.experts import Experts, activate
from ringattn.train.model.rope import rope, rotate
from ringattn.train.settings.config import ModelConfig, round_up

Attend = Callable[..., Tensor]
Finish = Callable[[Tensor, Tensor], Tensor]
Balance = Callable[[Tensor], Tensor]


def padded_vocabulary(config: ModelConfig, vocab_size: int) -> int:
    """Return the embedding's number of rows, which is a multiple of 64."""
    return round_up(max(vocab_size, config.vocab_size or 0), 64)


def normalise(x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    if config.norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, eps=config.norm_eps)
    if config.norm == "rms_plus_one":
        # In bf16, 1 + weight would lose most digits of the weight.
        return F.rms_norm(x.float(), x.shape[-1:], 1 + weight.float(), config.norm_eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, config.norm_eps)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def init_norm(weight: Tensor, config: ModelConfig) -> None:
    nn.init.constant_(weight, 0 if config.norm == "rms_plus_one" else 1)


class Block(nn.Module):
    """A layer, which computes x + attention(norm(x)), and then x + FFN(norm(x)).

    FFN is a gated feed-forward network, or several experts. The setting `norm_position` can also place norms after attention
    and FFN. With `parallel`, attention and FFN have the same input. Only initial weights depend on `is_first`.
    """

    def __init__(self, config: ModelConfig, is_first: bool = False) -> None:
        super().__init__()
        self.config, self.is_first = config, is_first
        self.head_dim, ffn_dim = config.resolved_head_dim, config.resolved_ffn_dim
        query_dim, key_dim = config.heads * self.head_dim, config.kv_heads * self.head_dim
        normed = (query_dim, key_dim) if config.qk_norm_all_heads else (self.head_dim, self.head_dim)
        before, after = config.norm_position != "after", config.norm_position != "before"

        def vector(dim: int, exists: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(dim)) if exists else None

        self.attention_norm = vector(config.dim, before)
        self.query = nn.Linear(config.dim, query_dim, bias=config.qkv_bias)
        self.key = nn.Linear(config.dim, key_dim, bias=config.qkv_bias)
        self.value = nn.Linear(config.dim, key_dim, bias=config.qkv_bias)
        self.query_norm, self.key_norm = (vector(dim, config.qk_norm) for dim in normed)
        self.sinks = vector(config.heads, config.sinks)
        self.output = nn.Linear(query_dim, config.dim, bias=config.output_bias)
        self.attention_post_norm = vector(config.dim, after)
        self.ffn_norm = vector(config.dim, before and not config.parallel)
        if config.experts is None:
            self.gate = nn.Linear(config.dim, ffn_dim, bias=False)
            self.up = nn.Linear(config.dim, ffn_dim, bias=False)
            self.down = nn.Linear(ffn_dim, config.dim, bias=False)
        else:
            self.experts = Experts(config)
        self.ffn_post_norm = vector(config.dim, after)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialise the weights as in GPT-2, with standard deviation 0.02, or 0.02 / sqrt(2 * layers) for residual outputs.

        The first layer's FFN weights have standard deviation 1 / sqrt(inputs), so its outputs are about 0.6. Otherwise, the
        residual stream would stay near 0.02, like the embeddings, and the norms of all layers would multiply gradients by up to
        50. Then even the smallest learning rates of the warmup would increase the loss.
        """
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        inner, outer = (self.config.dim**-0.5, self.config.resolved_ffn_dim**-0.5) if self.is_first else (0.02, residual)
        weights = [(self.query, 0.02), (self.key, 0.02), (self.value, 0.02), (self.output, residual)]
        if self.config.experts is None:
            weights += [(self.gate, inner), (self.up, inner), (self.down, outer)]
        else:
            self.experts.init_weights(generator, inner, outer)
        for linear, std in weights:
            nn.init.normal_(linear.weight, std=std, generator=generator)
        for name, parameter in self.named_parameters():
            if name.endswith("norm"):
                init_norm(parameter, self.config)
            elif name.endswith(("bias", "sinks")):
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream after the layer, and the routing if the layer has experts."""
        options = {} if self.sinks is None else {"sink_logits": self.sinks}
        return self.after(x, attend(*self.before(x, cos, sin), **options))

    # `before` and `after` do not communicate, so torch.compile can compile them.

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rotated queries, the rotated keys, and the values."""
        h, config = self.norm(x, self.attention_norm), self.config
        q, k, v = self.query(h), self.key(h), self.value(h)
        if config.qk_norm_all_heads:
            q, k = self.norm(q, self.query_norm), self.norm(k, self.key_norm)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in (q, k, v))
        if not config.qk_norm_all_heads:
            q, k = self.norm(q, self.query_norm), self.norm(k, self.key_norm)
        q, k = (rotate(each, cos, sin, config.rope_interleaved) for each in (q, k))
        if config.attention_scale is not None:
            q = q * (config.attention_scale * math.sqrt(self.head_dim))  # Attention divides by sqrt(head_dim).
        return q, k, v

    def after(self, x: Tensor, attention: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add `attention` (B, N, Hq, D) and the FFN's result to the residual stream `x` (B, N, dim)."""
        residual = x
        x = self.add(x, self.output(attention.flatten(-2)), self.attention_post_norm)
        h = self.norm(residual, self.attention_norm) if self.config.parallel else self.norm(x, self.ffn_norm)
        y, routing = self.feed_forward(h)
        return self.add(x, y, self.ffn_post_norm), routing

    def feed_forward(self, h: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.config.experts is None:
            return self.down(activate(self.gate(h), self.up(h), self.config.activation)), None
        return self.experts(h)

    def add(self, x: Tensor, y: Tensor, norm: Tensor | None) -> Tensor:
        return torch.add(x, self.norm(y, norm), alpha=self.config.residual_scale)

    def norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalise over the last dimension, or return `x` unchanged if `weight` is None."""
        return x if weight is None else normalise(x, weight, self.config)


class GPT(nn.Module):
    """Defines a GPT whose vocabulary is padded to a multiple of 64."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.layers = [config.layer(index) for index in range(config.layers)]
        padded = padded_vocabulary(config, vocab_size)
        self.embedding = nn.Parameter(torch.empty(padded, config.dim))
        # The type ModuleList does not show which modules a list contains.
        self.blocks = cast("list[Block]", nn.ModuleList(Block(config, index == 0) for index in range(config.layers)))
        self.norm = nn.Parameter(torch.empty(config.dim))
        self.head = None if config.tie_embeddings else nn.Parameter(torch.empty(padded, config.dim))

    def init_weights(self, generator: torch.Generator) -> None:
        nn.init.normal_(self.embedding, std=0.02, generator=generator)
        if self.head is not None:
            nn.init.normal_(self.head, std=0.02, generator=generator)
        init_norm(self.norm, self.config)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend | Sequence[Attend],
        finish: Finish,
        balance: Balance | None = None,
    ) -> Tensor:
        """Run this rank's tokens through the model, and return the result of `finish`.

        Args:
            tokens: int64 (B, N), this rank's tokens of the sequence.
            positions: int64 (N,) or (B, N), their positions in the whole sequence.
            attend: the function for attention over the whole sequence, or one per layer.
            finish: finish(hidden, head). Here, `hidden` are the normalised hidden states (B, N, dim), times `logit_scale`. The
                output matrix is `head` (padded vocabulary, dim).
            balance: balance(routing) is added to the result of `finish`. `routing` has the shape (layers, 2, experts), see
                `Experts.forward`.
        """
        x = scaled(F.embedding(tokens, self.embedding), self.config.embedding_scale)
        angles = {settings: rope(positions, settings) for settings in dict.fromkeys(layer.rope for layer in self.layers)}
        attends: Sequence[Attend] = attend if isinstance(attend, Sequence) else [attend] * len(self.blocks)
        routing: list[Tensor] = []
        for block, layer, each in zip(self.blocks, self.layers, attends, strict=True):
            x, routed = block(x, *angles[layer.rope], each)
            if balance is not None:
                routing.append(routed)
        x = scaled(normalise(x, self.norm, self.config), self.config.logit_scale)
        result = finish(x, self.embedding if self.head is None else self.head)
        return result if balance is None else result + balance(torch.stack(routing))
