"""Rotary position embeddings (RoPE): pairs of dimensions are rotated by angles that grow with the position of a token.

The product of a query and a key then depends on the distance between them. For sequences that are longer than those a model was
trained on, `rope_factor` slows down the pairs with low frequencies, so that they meet no angle outside the trained range. Pairs
with high frequencies, which distinguish nearby tokens, stay as they are.
"""

import math

import torch
from torch import Tensor

from ringattn.train.config import ModelConfig

# A pair keeps its frequency if it makes more than this many rotations within rope_trained_len tokens. Between one rotation and
# this number, the frequency is interpolated.
MAX_ROTATIONS = {"llama3": 4.0, "yarn": 32.0}


def rope(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, fp32 (B or 1, N, 1, D / 2), for global `positions` (N,) or (B, N).

    Pair i at position p is rotated by the angle p * rope_theta ** (-2 i / D). With a `rope_factor`, the angle is multiplied by
    `slowdown`. With yarn, cos and sin are also multiplied by `yarn_scale`. Angles are computed in fp64, because in fp32 the
    angles at a position of one million are wrong by up to 0.06.
    """
    dim = config.resolved_head_dim
    frequency = config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    if config.rope_factor is not None:
        frequency = frequency * slowdown(frequency, config)
    angle = torch.atleast_2d(positions).double()[..., None, None] * frequency
    is_yarn = config.rope_factor is not None and config.rope_scaling == "yarn"
    scale = yarn_scale(config.rope_factor) if is_yarn else 1.0
    return scale * angle.cos().float(), scale * angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of every head of `x` (B, N, H, D), in fp32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def slowdown(frequency: Tensor, config: ModelConfig) -> Tensor:
    """Return the factors (D / 2,) by which the frequencies of the pairs are multiplied.

    The factor is 1 for high frequencies and 1 / rope_factor for low frequencies. In between, it is interpolated.

    The method "llama3" interpolates by the number of rotations within rope_trained_len, as Llama 3.1 does. The method "yarn"
    (Peng et al. 2023, arXiv:2309.00071) interpolates by the index of the pair, from the pair that makes MAX_ROTATIONS rotations
    to the pair that makes one rotation. These two indices are rounded outwards to whole pairs, as in other implementations.
    """
    limit = MAX_ROTATIONS[config.rope_scaling]
    if config.rope_scaling == "llama3":
        rotations = frequency * config.rope_trained_len / (2 * math.pi)
        kept = ((rotations - 1) / (limit - 1)).clamp(0, 1)
    else:
        first, last = math.floor(_pair_of(limit, config)), math.ceil(_pair_of(1.0, config))
        first, last = max(first, 0), min(last, config.resolved_head_dim - 1)
        pair = torch.arange(len(frequency), dtype=frequency.dtype, device=frequency.device)
        kept = 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
    return kept + (1 - kept) / config.rope_factor


def _pair_of(rotations: float, config: ModelConfig) -> float:
    """Return the (fractional) index of the pair that makes this many rotations within rope_trained_len tokens."""
    positions_per_radian = config.rope_trained_len / (2 * math.pi * rotations)
    return config.resolved_head_dim / 2 * math.log(positions_per_radian) / math.log(config.rope_theta)


def yarn_scale(factor: float) -> float:
    """Return the factor by which yarn multiplies queries and keys, so that attention over more tokens stays as sharp."""
    return 0.1 * math.log(factor) + 1
