"""Problems for the Triton kernels: small in Triton's interpreter, larger on a GPU, where tiles are larger."""

import torch

from ringattn.kernels.triton.common import Tile
from tests.kernels.conftest import ON_GPU
from tests.kernels.masks import intervals_of
from tests.kernels.problems import Problem, make_blocks, make_dropout, make_problem

# Triton's interpreter computes bf16 incorrectly.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU

# The tile of the fixture `small_tiles`.
SMALL_TILE = Tile(64, 64, 8, 2) if ON_GPU else Tile(32, 16, 8, 1)

# Numbers of queries and keys. Both have several small tiles, the last of which is not full.
SIZES = (150, 180) if ON_GPU else (40, 50)
# The same with two blocks of queries and two or three blocks of keys.
SIZES_WITH_BLOCKS = (150, 180) if ON_GPU else (70, 90)

HEADS = {  # (Hq, Hkv), (D, Dv), batch
    "grouped": ((2, 1), (16, 24), 1),
    "batch": ((1, 1), (24, 16), 2),
}

SHAPES = {  # (Nq, Nk), (Hq, Hkv), (D, Dv), batch
    "one-query": ((1, 63), (2, 1), (64, 64), 1),
    "one-key": ((63, 1), (2, 1), (64, 64), 1),
    "no-queries": ((0, 20), (2, 1), (16, 16), 1),
    "no-keys": ((20, 0), (2, 1), (16, 16), 1),
    "63": ((63, 63), (4, 2), (16, 16), 2),
    "111x130": ((111, 130), (3, 1), (80, 80), 1),
    "130x111": ((130, 111), (2, 2), (64, 48), 1),
    "128": ((128, 128), (2, 1), (128, 128), 1),
    "value-dim-wider": ((65, 65), (2, 1), (16, 96), 1),
    "many-heads": ((40, 40), (10, 5), (16, 16), 2),
}
QUICK_SHAPES = ("one-query", "one-key", "no-queries", "no-keys", "value-dim-wider")


def masked_problem(mask: str, heads: str, dropout: bool, blocks: bool, dtype: torch.dtype, device: torch.device) -> Problem:
    """Create a problem with several tiles; `heads` is a key of HEADS."""
    sizes = SIZES_WITH_BLOCKS if blocks else SIZES
    (num_heads, num_key_heads), dims, batch = HEADS[heads]
    options = {"dropout": make_dropout(*sizes, device=device)} if dropout else {}
    options |= {"blocks": make_blocks(*sizes, (batch, num_heads), device=device)} if blocks else {}
    return make_problem(
        *intervals_of(mask, *sizes), sizes[1], dtype, batch, (num_heads, num_key_heads), dims, device, **options
    )


def shaped_problem(shape: str, dtype: torch.dtype, device: torch.device) -> Problem:
    """Create a problem with a sliding window; `shape` is a key of SHAPES."""
    sizes, heads, dims, batch = SHAPES[shape]
    return make_problem(*intervals_of("window", *sizes), sizes[1], dtype, batch, heads, dims, device)
