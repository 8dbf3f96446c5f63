"""Rotary position embeddings (RoPE) rotate pairs of dimensions by angles that grow with the position of a token.

The product of a query and a key then depends on their distance. To extend a model to longer sequences, `rope_factor` reduces
the low frequencies, so that their angles stay in the range of the training. High frequencies distinguish nearby tokens and do
not change.
"""

import math

import torch
from torch import Tensor

from ringattn.train.settings.config import ModelConfig

# A pair with more rotations than this within rope_trained_len keeps its frequency. A pair with fewer rotations, but at least
# one, is interpolated.
MAX_ROTATIONS = {"llama3": 4.0, "yarn": 32.0}


def rope(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, fp32 (B or 1, N, 1, D / 2), for global `positions` (N,) or (B, N).

    Pair i at position p is rotated by p * rope_theta ** (-2 i / D), times `slowdown` if `rope_factor` is set. With "yarn", both
    results are multiplied by `yarn_scale`. At a position of one million, angles in fp32 would be wrong by up to 0.06.
    """
    dim = config.resolved_head_dim
    frequency = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    scale = 1.0
    if config.rope_factor is not None:
        frequency = frequency * slowdown(frequency, config)
        scale = yarn_scale(config.rope_factor) if config.rope_scaling == "yarn" else 1.0
    angle = torch.atleast_2d(positions).double()[..., None, None] * frequency
    return scale * angle.cos().float(), scale * angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of every head of `x` (B, N, H, D), in fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def slowdown(frequency: Tensor, config: ModelConfig) -> Tensor:
    """Return the factors (D / 2,) of the frequencies: 1 for high ones, 1 / rope_factor for low ones, interpolated in between.

    "llama3" interpolates by the number of rotations within rope_trained_len, as Llama 3.1 does. "yarn" (Peng et al. 2023,
    arXiv:2309.00071) interpolates by the index of the pair, from the pair with MAX_ROTATIONS rotations to the one with one
    rotation, rounded outwards as in other implementations.
    """
    assert config.rope_factor is not None
    assert config.rope_trained_len is not None
    limit = MAX_ROTATIONS[config.rope_scaling]
    if config.rope_scaling == "llama3":
        rotations = frequency * config.rope_trained_len / (2 * math.pi)
        kept = ((rotations - 1) / (limit - 1)).clamp(0, 1)
    else:
        first, last = (_pair_of(rotations, config, config.rope_trained_len) for rotations in (limit, 1.0))
        first, last = max(math.floor(first), 0), min(math.ceil(last), config.resolved_head_dim - 1)
        pair = torch.arange(len(frequency), dtype=frequency.dtype, device=frequency.device)
        kept = 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
    return kept + (1 - kept) / config.rope_factor


def _pair_of(rotations: float, config: ModelConfig, trained_len: int) -> float:
    """Return the fractional index of the pair that makes `rotations` rotations within `trained_len` tokens."""
    positions_per_radian = trained_len / (2 * math.pi * rotations)
    return config.resolved_head_dim / 2 * math.log(positions_per_radian) / math.log(config.rope_theta)


def yarn_scale(factor: float) -> float:
    """Return the factor by which yarn multiplies queries and keys.

    With this factor, the softmax of attention stays as sharp over many tokens as it was over fewer tokens.
    """
    return 0.1 * math.log(factor) + 1
