"""Tests of the memory of masks that a CUDA graph reads."""

import random

import numpy as np
import pytest
import torch

from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.mask_slots import MaskSlots

ROWS, KEYS, BATCH, HEADS = 1500, 2000, 2, 3


def random_mask(generator: random.Random, num_jumps: int) -> Intervals:
    """A mask whose bounds jump `num_jumps` times in each of two batch entries. Many intervals are empty."""
    lo, hi = (
        torch.stack(
            [
                torch.tensor(sorted(generator.choices(generator.sample(range(KEYS + 1), num_jumps + 1), k=ROWS)))
                for _ in range(BATCH)
            ]
        )
        for _ in range(2)
    )
    return Intervals.of(lo, hi, KEYS, is_replaced=True)


def request_tables(mask: Intervals) -> None:
    """Request tables of all kinds, for few programs and for one program per work tile."""
    mask.tiles(64, 32)
    for programs in (5, 132, 2**31 - 1):
        mask.work_tiles(192, 64, BATCH, HEADS, 2, programs)
        mask.transposed.work_tiles(128, 64, BATCH, HEADS, 2, programs, True, 1)
        mask.transposed.ordered_work_tiles(128, 64, BATCH, HEADS, 1, programs, 1)


@pytest.mark.parametrize("num_jumps", [0, 3, 60])
def test_slots_contain_the_masks_that_are_written(num_jumps: int) -> None:
    """Two masks at a time. Tables are padded with zeros to their largest size, which masks of many kinds never exceed."""
    generator = random.Random(num_jumps)
    captured = [random_mask(generator, 1) for _ in range(2)]
    for mask in captured:
        request_tables(mask)
    slots = MaskSlots(captured, torch.device("cpu"))
    addresses = [x.data_ptr() for mask in slots.masks for x in (mask.lo, *mask._tables.values())]
    for _ in range(3):
        masks = [random_mask(generator, num_jumps) for _ in range(2)]
        for mask in masks:
            request_tables(mask)
        slots.write(slots.pack(masks))
        for mask, slot in zip(masks, slots.masks, strict=True):
            for side, found in ((mask, slot), (mask.transposed, slot.transposed)):
                assert torch.equal(side.lo, found.lo)
                assert torch.equal(side.hi, found.hi)
                for key, table in side._tables.items():
                    padding = [(0, large - small) for large, small in zip(found._tables[key].shape, table.shape, strict=True)]
                    assert np.array_equal(np.pad(table.numpy(), padding), found._tables[key].numpy())
                    # The last row of a program must be empty, because a program stops there.
                    assert key[0] == "tiles" or not found._tables[key][-1].any()
    assert addresses == [x.data_ptr() for mask in slots.masks for x in (mask.lo, *mask._tables.values())]


def test_slots_have_only_the_tables_that_were_requested() -> None:
    """Another table would describe the mask that was captured, and not the mask that is written later."""
    mask = random_mask(random.Random(0), 3)
    request_tables(mask)
    (slot,) = MaskSlots([mask], torch.device("cpu")).masks
    slot.tiles(64, 32)
    with pytest.raises(ValueError, match="not enough values to unpack"):
        slot.tiles(32, 32)


def test_kernels_expect_empty_intervals() -> None:
    """A mask without empty intervals may be replaced by one with empty intervals, whose gradients must be set to zero."""
    lo, hi = torch.zeros(1, 8, dtype=torch.int32), torch.full((1, 8), 8)
    assert Intervals.of(lo, hi, 8).num_nonempty_rows == 8
    mask = Intervals.of(lo, hi, 8, is_replaced=True)
    assert mask.num_nonempty_rows == mask.transposed.num_nonempty_rows == 7


def test_tables_have_a_largest_size() -> None:
    """Six work tiles take as long as 150 others. Without a limit, the seventh program would compute all others."""
    rows, keys = 6000, 20_000
    lo, hi = torch.full((1, rows), keys), torch.full((1, rows), keys)
    lo[:, :192] = 0
    arguments = 192, 32, BATCH, HEADS, 1, 7
    sizes = []
    for is_replaced in (False, True):
        mask = Intervals.of(lo, hi, keys, is_replaced=is_replaced)
        size, largest = mask.work_tiles(*arguments).shape, mask.largest_table(("work_tiles", *arguments, False, None, False))
        sizes.append((size[0] <= largest[0], size[1:] == largest[1:]))
    assert sizes == [(False, True), (True, True)]
