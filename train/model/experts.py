"""Define a feed-forward network of several experts (mixture of experts). A router chooses a few experts for every token.

The tokens are sorted by expert, so that one grouped matrix product computes all experts. No token is dropped.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.train.settings.config import ModelConfig

# "clamped" is the activation of gpt-oss (OpenAI 2025).
CLAMP_LIMIT, CLAMP_ALPHA = 7.0, 1.702


def activate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return the hidden layer of a gated feed-forward network. The argument `activation` is the setting `model.activation`."""
    if activation == "clamped":
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(-CLAMP_LIMIT, CLAMP_LIMIT)
        return gate * torch.sigmoid(CLAMP_ALPHA * gate) * (up + 1)
    return (F.gelu(gate, approximate="tanh") if activation == "gelu" else F.silu(gate)) * up


class Experts(nn.Module):
    """Holds the router and the experts of one layer. The weights of all experts are stacked along the first dimension."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.experts is not None
        self.config = config
        count, dim, ffn_dim = config.experts, config.dim, config.resolved_ffn_dim

        def bias(size: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(count, size)) if config.expert_bias else None

        self.router = nn.Linear(dim, count, bias=config.expert_bias)
        self.gate, self.up = (nn.Parameter(torch.empty(count, ffn_dim, dim)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(count, dim, ffn_dim))
        self.gate_bias, self.up_bias, self.down_bias = bias(ffn_dim), bias(ffn_dim), bias(dim)

    def init_weights(self, generator: torch.Generator, inner: float, outer: float) -> None:
        """Initialise `gate` and `up` with standard deviation `inner`, and `down` with `outer`. The block initialises biases."""
        for weight, std in ((self.router.weight, 0.02), (self.gate, inner), (self.up, inner), (self.down, outer)):
            nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs for `x` (B, N, dim), and the routing: fp32 (2, experts).

        For each expert, the routing contains the number of tokens and the sum of the router probabilities.
        """
        config, tokens = self.config, x.flatten(0, -2)
        probabilities = self.router(tokens).float().softmax(-1)
        weights, chosen = probabilities.topk(config.experts_per_token)
        if config.normalise_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        expert, order = chosen.flatten().sort(stable=True)
        inverse = order.argsort()
        # `ends` stays on the device, so that the host does not wait for the GPU.
        ends = torch.searchsorted(expert, torch.arange(len(self.gate), device=x.device), right=True, out_int32=True)

        def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            rows = grouped_product(rows, weight, ends)
            # If the code indexed `bias`, the backward pass would sum many gradients with atomic operations.
            return rows if bias is None else rows + F.one_hot(expert, len(weight)).to(rows.dtype) @ bias

        rows = _Permute.apply(tokens, order, inverse, config.experts_per_token)
        gate, up = product(rows, self.gate, self.gate_bias), product(rows, self.up, self.up_bias)
        rows = product(activate(gate, up, config.activation), self.down, self.down_bias)
        rows = _Permute.apply(rows, inverse, order, 1).unflatten(0, chosen.shape)
        counts = ends.diff(prepend=ends.new_zeros(1))
        routing = torch.stack((counts.to(probabilities.dtype), probabilities.sum(0)))
        return (weights[..., None].to(x.dtype) * rows).sum(1).view(x.shape), routing


class _Permute(torch.autograd.Function):
    """Return x[order // copies], where `order` is a permutation of `copies` copies of all rows.

    The gradient is deterministic, because no two threads add to the same row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Any:  # pyrefly: ignore[bad-override]  # torch declares none
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        return grad_outputs[0][inverse].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows by the weights of their experts.

    Args:
        rows: (R, in), sorted by expert.
        weights: (experts, out, in).
        ends: int32 (experts,), the end of the rows of each expert.

    Returns:
        (R, out).
    """
    # The kernel requires bf16 inputs whose rows begin at multiples of 16 bytes.
    if rows.is_cuda and rows.dtype == torch.bfloat16 and all(size % 8 == 0 for size in weights.shape[1:]):
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    return _loop_over_experts(rows, weights, ends)


@torch.compiler.disable  # The number of rows per expert depends on the routing.
def _loop_over_experts(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(part, weight) for part, weight in zip(rows.split(sizes), weights.unbind(), strict=True)])


def balance_loss(routing: Tensor, tokens: Tensor, experts_per_token: int) -> Tensor:
    """Return this rank's part of the load-balancing loss of Switch Transformers (Fedus et al. 2021, arXiv:2101.03961).

    The loss of a layer is E * sum_e f_e p_e. Over all ranks, the fraction f_e of the tokens chooses expert e. The mean router
    probability of expert e is p_e. The sum of the returned values over all ranks is the mean loss of the layers. If all experts
    have equally many tokens, the loss is `experts_per_token`.

    Args:
        routing: (layers, 2, E), the routing of this rank in every layer.
        tokens: (layers, E), the number of tokens of each expert on all ranks.
    """
    total = tokens[0].sum() / experts_per_token
    return routing.shape[-1] * (tokens / total * routing[:, 1] / total).sum(-1).mean()
