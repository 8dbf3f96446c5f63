"""Rotary positions: pairs of features turn with a token's place, so that a product of query and key knows their distance.

For longer sequences than a model was trained on, pairs that turned seldom turn slower: they meet no angle that they did not
know, and those that tell near tokens apart stay as they are.
"""

import math

import torch
from torch import Tensor

from ringattn.train.config import ModelConfig

# turns within rope_trained_len above which a pair stays as it is; between 1 and these it becomes slower by a part
MOST_TURNS = {"llama3": 4.0, "yarn": 32.0}


def rope(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, fp32 (B or 1, N, 1, D / 2), of global `positions` (N,) or (B, N).

    Feature pair i of position p turns by p * rope_theta ** (-2 i / D), with a `rope_factor` slower by `slowdown`. With yarn
    both are larger by `yarn_scale`. Angles are fp64: in fp32 those a million tokens on are off by 0.06.
    """
    dim = config.resolved_head_dim
    frequency = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    if config.rope_factor is not None:
        frequency = frequency * slowdown(frequency, config)
    angle = torch.atleast_2d(positions).double()[..., None, None] * frequency
    cos, sin = angle.cos().float(), angle.sin().float()
    if config.rope_factor is not None and config.rope_scaling == "yarn":
        scale = yarn_scale(config.rope_factor)
        return scale * cos, scale * sin
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of every head of `x` (B, N, H, D), in fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def slowdown(frequency: Tensor, config: ModelConfig) -> Tensor:
    """What each pair's frequency (D / 2,) is multiplied by: 1 for fast pairs, 1 / rope_factor for slow ones, a mean between.

    llama3 weighs by the turns within rope_trained_len, as Llama 3.1 does; yarn (Peng et al. 2023, arXiv:2309.00071) by the
    place between the pairs of the most and of one turn, as widely used: rounded outwards to whole pairs.
    """
    most = MOST_TURNS[config.rope_scaling]
    if config.rope_scaling == "llama3":
        turns = frequency * config.rope_trained_len / (2 * math.pi)
        kept = ((turns - 1) / (most - 1)).clamp(0, 1)
    else:
        first, last = math.floor(_pair_of(most, config)), math.ceil(_pair_of(1.0, config))
        first, last = max(first, 0), min(last, config.resolved_head_dim - 1)
        pair = torch.arange(len(frequency), dtype=frequency.dtype, device=frequency.device)
        kept = 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
    return kept + (1 - kept) / config.rope_factor


def _pair_of(turns: float, config: ModelConfig) -> float:
    """Which pair, counted from 0, turns so often within rope_trained_len."""
    longest = config.rope_trained_len / (2 * math.pi * turns)  # positions a radian
    return config.resolved_head_dim / 2 * math.log(longest) / math.log(config.rope_theta)


def yarn_scale(factor: float) -> float:
    """What yarn multiplies queries and keys by: attention over more tokens is to stay as sharp."""
    return 0.1 * math.log(factor) + 1
