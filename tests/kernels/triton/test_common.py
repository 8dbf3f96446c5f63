"""Device functions and tile sizes that the Triton kernels have in common."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout, keep_mask, philox
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.triton import common
from tests.covering import every_pair
from tests.kernels.masks import random_intervals


@triton.jit
def _program_tile_kernel(out, num_tiles):
    tile, head = common.program_tile(num_tiles)
    tl.store(out + tl.program_id(0) * 2, tile)
    tl.store(out + tl.program_id(0) * 2 + 1, head)


@pytest.mark.parametrize(("num_tiles", "num_heads"), [(5, 3), (3, 10), (1, 9)])
def test_programs_process_head_after_head_and_interleave_the_last_heads(num_tiles, num_heads, device):
    out = torch.empty(num_tiles * num_heads, 2, dtype=torch.int32, device=device)
    _program_tile_kernel[(num_tiles * num_heads,)](out, num_tiles)
    sequential = max(num_heads - common.INTERLEAVED_HEADS.value, 0)
    expected = [[tile, head] for head in range(sequential) for tile in range(num_tiles)]
    expected += [[tile, head] for tile in range(num_tiles) for head in range(sequential, num_heads)]
    assert out.tolist() == expected


@triton.jit
def _block_loop_kernel(
    lo, hi, lists, out, first, end, num_columns, STEP: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr
):
    blocks = common.kept_blocks(lists, (0, 0), tl.program_id(0), tl.program_id(0), first // BLOCK, num_columns, BLOCK, 1)
    loop = common.block_loop(lo, hi, first, end, blocks, STEP, BLOCK, 1)
    for i in range(0, common.loop_length(loop, MASKED)):
        column = common.load_block_column(blocks, loop, i, STEP, BLOCK, MASKED)
        start, _ = common.loop_position(loop, i, column, STEP, BLOCK, 1, MASKED)
        tl.store(out + start // STEP, 1 + tl.load(out + start // STEP))


@pytest.mark.parametrize("seed", range(4))
def test_loop_over_kept_blocks_reaches_every_kept_column_once(seed, device):
    """Unmasked steps contain only pairs of the mask, and the steps together contain all pairs in kept blocks."""
    step, size, num_rows, num_columns = 32, 64, 70, 300
    lo, hi = random_intervals(num_rows, num_columns, seed)
    if seed == 3:  # most columns are unmasked for all rows
        lo[:], hi[:] = 40, 290
    keep = torch.rand(1, 1, 2, 5, generator=torch.Generator().manual_seed(seed)) < 0.6
    lists, intervals = BlockMask(keep.to(device), size).query_lists, Intervals.of(lo, hi, num_columns, device)
    columns = torch.arange(320)
    for first, end in ((0, 64), (64, 70)):
        reached = {}
        for masked in (False, True):
            out = torch.zeros(10, dtype=torch.int32, device=device)
            bounds = intervals.lo[0], intervals.hi[0]
            _block_loop_kernel[(1,)](*bounds, lists, out, first, end, num_columns, STEP=step, BLOCK=size, MASKED=masked)
            reached[masked] = out.cpu().repeat_interleave(step)
        kept = keep[0, 0, first // size].repeat_interleave(size)
        pairs = (lo[0, first:end, None] <= columns) & (columns < hi[0, first:end, None])
        assert (reached[False] + reached[True] <= 1).all()
        assert not (reached[False] + reached[True])[~kept].any()
        assert pairs[:, reached[False] > 0].all()
        assert (reached[False] + reached[True])[kept & pairs.any(0)].all()


@triton.jit(do_not_specialize=["seed", "threshold"])
def _draw_kernel(
    rows, columns, out, head, batch, seed: tl.uint64, threshold: tl.uint32, num_columns,
    ROWS: tl.constexpr, STEP: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    dropout = (tl.load(rows + tl.arange(0, ROWS)), columns, batch, 1, seed, threshold, 1.0)
    keep = common.draw_keep_mask(dropout, head - 1, 0, num_columns, STEP, TRANSPOSED, True)
    tl.store(out + tl.arange(0, ROWS)[:, None] * STEP + tl.arange(0, STEP)[None, :], keep.to(tl.int32))


@every_pair(p=[0.1, 0.7], seed=[1, 2**31, 2**64 - 1], transposed=[False, True])
def test_kernels_draw_the_same_dropout_mask_as_pytorch(p, seed, transposed, device):
    rows = (2**30 + 5 * torch.arange(32, dtype=torch.int32)).to(device)
    columns = torch.randperm(64, dtype=torch.int32).to(device)
    dropout = Dropout(p, seed, *((columns, rows) if transposed else (rows, columns)))
    out = torch.empty(32, 64, dtype=torch.int32, device=device)
    _draw_kernel[(1,)](rows, columns, out, 2, 1, seed, dropout.threshold, 64, ROWS=32, STEP=64, TRANSPOSED=transposed)
    expected = keep_mask(dropout, 2, 3)[1, 2]
    assert torch.equal(out.bool(), expected.T if transposed else expected)


@triton.jit(do_not_specialize=["seed"])
def _philox_kernel(counters, out, seed: tl.uint64, ROUNDS: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    a, b = tl.load(counters + index), tl.load(counters + SIZE + index)
    c, d = tl.load(counters + 2 * SIZE + index), tl.load(counters + 3 * SIZE + index)
    a, b, c, d = tl.philox(seed, a, b, c, d, ROUNDS)
    tl.store(out + index, a.to(tl.int32, bitcast=True))
    tl.store(out + SIZE + index, b.to(tl.int32, bitcast=True))
    tl.store(out + 2 * SIZE + index, c.to(tl.int32, bitcast=True))
    tl.store(out + 3 * SIZE + index, d.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("rounds", [7, 10])
def test_philox_of_triton_gives_the_same_words_as_pytorch(rounds, device):
    counters = torch.randint(-(2**31), 2**31, (4, 64), dtype=torch.int32, device=device)
    out, seed, word = torch.empty_like(counters), 0x299F31D0A4093822, 0xFFFFFFFF
    _philox_kernel[(1,)](counters, out, seed, ROUNDS=rounds, SIZE=64)
    assert torch.equal(out.long() & word, torch.stack(philox(tuple(counters.long() & word), seed, rounds)))


@pytest.mark.parametrize("size", [64, 192, 256])
def test_fitted_tiles_divide_the_blocks(size):
    blocks = BlockMask(torch.ones(1, 1, 1, 1, dtype=torch.bool), size)
    for kernel in ("forward", "key_gradient", "query_gradient"):
        for head_dim in (16, 64, 128, 256):
            for dtype in (torch.float32, torch.bfloat16):
                tile = common.choose_tile(kernel, dtype, head_dim)
                fitted = common.fit_tile(tile, blocks)
                assert size % fitted.queries == size % fitted.keys == 0
                assert min(fitted.queries, fitted.keys) >= min(64, *tile[:2])
                assert common.fit_tile(tile, None) is tile


def test_rows_too_far_apart_for_32_bits_are_copied():
    def tensor(*strides: int) -> Tensor:
        return torch.empty_strided((1, 2, 1, 16), strides, device="meta")

    near, far, strided = tensor(2**23, 2**22 - 16, 16, 1), tensor(2**23, 2**22, 16, 1), tensor(64, 32, 32, 2)
    assert common.as_addressable(near) is near
    assert common.as_addressable(far).is_contiguous()
    assert common.as_addressable(strided).is_contiguous()
    many_heads = torch.empty(2, 3, 2**18, 16, device="meta")  # a contiguous copy would have the same strides
    assert common.as_addressable(many_heads).stride() == (3 * 2**22, 16, 3 * 16, 1)
