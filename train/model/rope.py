"""Rotary position embeddings (RoPE) rotate pairs of dimensions by angles that grow with the position of a token.

The product of a rotated query and a rotated key therefore depends on the distance of their tokens. To extend a model to longer
sequences, `factor` divides the low frequencies. Angles of low frequencies then stay within the trained range. High frequencies
do not change, because they distinguish nearby tokens.
"""

import math

import torch
from torch import Tensor

from ringattn.train.settings.config import Rope

# Frequencies with more than MAX_ROTATIONS rotations within the training length stay unchanged. Frequencies with at most one
# rotation are divided by `factor`. All other frequencies are divided by a number between 1 and `factor`.
MAX_ROTATIONS = {"llama3": 4.0, "yarn": 32.0}


def rope(positions: Tensor, settings: Rope) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, fp32 (B or 1, N, 1, D / 2), for global `positions` (N,) or (B, N).

    The embedding rotates D dimensions. At position p, pair i of the D dimensions rotates by p * theta ** (-2 i / D). If
    `factor` is set, the function `slowdown` scales each angle. Both results are multiplied by `attention_scale`. Angles in fp32
    would be wrong by up to 0.06 at position one million.
    """
    dim = settings.dim
    frequency = settings.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    scale = 1.0
    if settings.factor is not None:
        frequency = frequency * slowdown(frequency, settings)
        scale = attention_scale(settings)
    angle = torch.atleast_2d(positions).double()[..., None, None] * frequency
    return scale * angle.cos().float(), scale * angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of the first D dimensions of every head of `x` (B, N, H, head dim), in fp32.

    `cos` and `sin` have D / 2 elements per token. With `interleaved`, the pairs are (x[2 i], x[2 i + 1]). The result contains
    the first elements of all pairs before the second elements. This order does not change products of queries and keys.
    """
    dim = 2 * cos.shape[-1]
    if dim == 0:
        return x
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin, interleaved), x[..., dim:]), -1)
    x32 = x.float()
    a, b = (x32[..., ::2], x32[..., 1::2]) if interleaved else x32.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


def slowdown(frequency: Tensor, settings: Rope) -> Tensor:
    """Return the factors (D / 2,) of the frequencies.

    The factors rise from 1 / factor for low frequencies to 1 for high frequencies.

    "linear" slows all frequencies down. "llama3" interpolates by the number of rotations within trained_len, as Llama 3.1 does.
    "yarn" (Peng et al. 2023, arXiv:2309.00071) interpolates by the index of the pair, and rounds the bounds outwards.
    "yarn-exact" does not round. "longrope" (Ding et al. 2024, arXiv:2402.13753) has a factor for every pair.
    """
    factor, trained_len, scaling = settings.factor, settings.trained_len, settings.scaling
    assert factor is not None
    if scaling == "linear":
        return torch.full_like(frequency, 1 / factor)
    if scaling == "longrope":
        return 1 / torch.tensor(settings.factors, dtype=frequency.dtype, device=frequency.device)
    assert trained_len is not None
    if scaling == "llama3":
        rotations = frequency * trained_len / (2 * math.pi)
        kept = ((rotations - 1) / (MAX_ROTATIONS["llama3"] - 1)).clamp(0, 1)
    else:
        first, last = (_pair_of(rotations, settings, trained_len) for rotations in (MAX_ROTATIONS["yarn"], 1.0))
        if scaling == "yarn":
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, settings.dim - 1)
        pair = torch.arange(len(frequency), dtype=frequency.dtype, device=frequency.device)
        kept = 1 - ((pair - first) / max(last - first, 0.001)).clamp(0, 1)
    return kept + (1 - kept) / factor


def _pair_of(rotations: float, settings: Rope, trained_len: int) -> float:
    positions_per_radian = trained_len / (2 * math.pi * rotations)
    return settings.dim / 2 * math.log(positions_per_radian) / math.log(settings.theta)


def attention_scale(settings: Rope) -> float:
    assert settings.factor is not None
    if settings.scaling == "longrope":
        return longrope_scale(settings.factor, settings.trained_len)
    return yarn_scale(settings.factor) if settings.scaling.startswith("yarn") else 1.0


def longrope_scale(factor: float, trained_len: int | None) -> float:
    assert trained_len is not None
    return math.sqrt(1 + math.log(factor) / math.log(trained_len)) if factor > 1 else 1.0


def yarn_scale(factor: float) -> float:
    """Return the factor by which yarn multiplies queries and keys.

    The factor keeps attention over long sequences as sharp as over short sequences.
    """
    return 0.1 * math.log(factor) + 1
