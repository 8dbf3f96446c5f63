r"""Bytes that the Triton kernels move: what the model of docs/io.md predicts, or a launch for a profiler to count.

    python -m scripts.tools.count_bytes --predict --length 16384 --head-dim 128 --mask causal

    ncu --metrics dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_op_read.sum,lts__t_sectors_op_write.sum \
        --clock-control none --kernel-name 'regex:_(forward|key_gradient|query_gradient)_kernel' --csv --log-file bytes.csv \
        python -m scripts.tools.count_bytes --length 16384 --head-dim 128 --mask causal

The second prints nothing itself: ncu writes one line a kernel and counter to bytes.csv. A sector is 32 bytes. ncu empties the
caches before every kernel, so the inputs come from DRAM once; results still in L2 at the end of a kernel are not counted as
written to DRAM. Without --predict this needs a CUDA device, and ncu the right to read its counters.
"""

import argparse
from typing import NamedTuple

import torch

from ringattn import Mask
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import row_delta
from ringattn.kernels.triton import common as triton_common

HALF, SINGLE, SECTOR = 2, 4, 32  # bytes of a bf16 number, of an fp32 number, of a sector
MULTIPROCESSORS = 132  # of an H200, one tile on each at a time
L2_BYTES = 50e6
MASKS = {"causal": Mask.causal(), "full": Mask.full()}


class Bytes(NamedTuple):
    """What a kernel is predicted to move."""

    l2_read: int
    dram_read: int
    dram_write: int


def rows_walked(intervals: Intervals, rows: int, step: int) -> int:
    """Rows that all tiles of `rows` rows load together, in steps of `step`."""
    _, _, begin, _, num_unmasked, num_masked = intervals.tiles(rows, step).long().flatten(0, 1).unbind(1)
    end = (begin + (num_unmasked + num_masked) * step).clamp(max=intervals.num_keys)
    return int((end - begin).sum())


def predict(length: int, heads: int, head_dim: int, mask: Mask) -> dict[str, Bytes]:
    """The model of docs/io.md for bf16 self-attention with as many key as query heads, B = 1."""
    intervals = Intervals.of(*mask.intervals(length), length)
    all_rows, row = heads * length, head_dim * HALF
    numbers = 2 * SINGLE  # lse and delta of a row; those of a head lie side by side
    tile = triton_common.choose_tile("forward", torch.bfloat16, head_dim)
    keys = heads * rows_walked(intervals, tile.queries, tile.keys)
    waves = refetches(length, head_dim, tile.queries)
    forward = Bytes(
        l2_read=keys * 2 * row + all_rows * row,
        dram_read=round(all_rows * row * (1 + 2 * waves)),
        dram_write=all_rows * (row + SINGLE),
    )
    tile = triton_common.choose_tile("key_gradient", torch.bfloat16, head_dim)
    queries = heads * rows_walked(intervals.transposed, tile.keys, tile.queries)
    sums = 2 * head_dim * SINGLE  # a row of the fp32 dk and dv, read and written
    waves = refetches(length, head_dim, tile.keys)
    key_gradient = Bytes(
        l2_read=queries * (2 * row + numbers) + all_rows * (2 * row + sums),
        dram_read=round(all_rows * (2 * row + sums + (2 * row + numbers) * waves)),
        dram_write=all_rows * sums,
    )
    tile = triton_common.choose_tile("query_gradient", torch.bfloat16, head_dim)
    keys = heads * rows_walked(intervals, tile.queries, tile.keys)
    sums = head_dim * SINGLE  # of dq
    waves = refetches(length, head_dim, tile.queries)
    query_gradient = Bytes(
        l2_read=keys * 2 * row + all_rows * (2 * row + numbers + sums),
        dram_read=round(all_rows * (2 * row + numbers + sums + 2 * row * waves)),
        dram_write=all_rows * sums,
    )
    return {"forward": forward, "key_gradient": key_gradient, "query_gradient": query_gradient}


def refetches(length: int, head_dim: int, rows: int) -> float:
    """How often the walked pair of operands of a head comes from DRAM: once if L2 holds it, else once a wave of tiles.

    An upper estimate for masks: every wave is taken to walk all rows.
    """
    fits = 2 * length * head_dim * HALF <= L2_BYTES
    return 1.0 if fits else max(1.0, length / rows / MULTIPROCESSORS)


def launch(length: int, heads: int, head_dim: int, mask: Mask) -> None:
    """One forward and one backward by the Triton kernels."""
    from ringattn.kernels.triton import backward as triton_backward
    from ringattn.kernels.triton import forward as triton_forward

    q, k, v, dout = (torch.randn(1, length, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    intervals = Intervals.of(*mask.intervals(length), length, "cuda")
    scale = head_dim**-0.5
    out, lse = triton_forward.forward(q, k, v, intervals, scale, final=True)
    grads = [torch.zeros(x.shape, device="cuda") for x in (q, k, v)]
    triton_backward.backward(q, k, v, dout, lse, row_delta(out, dout), intervals, scale, *grads)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="print the model's bytes and launch nothing")
    parser.add_argument("--length", type=int, default=16384, help="rows (default: 16384)")
    parser.add_argument("--heads", type=int, default=16, help="query heads, and key heads (default: 16)")
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128, 256), help="default: 128")
    parser.add_argument("--mask", choices=MASKS, default="causal", help="default: causal")
    arguments = parser.parse_args()
    if not (arguments.predict or torch.cuda.is_available()):
        parser.error("needs a CUDA device; --predict launches nothing")
    case = arguments.length, arguments.heads, arguments.head_dim, MASKS[arguments.mask]
    if not arguments.predict:
        launch(*case)
        return
    print("| kernel | L2 reads, MB | L2 read sectors | DRAM reads, MB | DRAM writes, MB |\n|---|---|---|---|---|")
    for kernel, x in predict(*case).items():
        print(f"| {kernel} | {x.l2_read / 1e6:,.0f} | {x.l2_read // SECTOR:,} | {x.dram_read / 1e6:,.0f} ", end="")
        print(f"| {x.dram_write / 1e6:,.0f} |")


if __name__ == "__main__":
    main()
