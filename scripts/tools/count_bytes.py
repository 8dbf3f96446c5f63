r"""Predict the memory traffic of the GPU kernels with the formulas of docs/io.md, or run the kernels under ncu.

    python -m scripts.tools.count_bytes --predict --length 16384 --head-dim 128 --mask causal

    ncu --metrics dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_op_read.sum,lts__t_sectors_op_write.sum \
        --clock-control none --kernel-name 'regex:_(forward|key_gradient|query_gradient)_kernel' --csv --log-file bytes.csv \
        python -m scripts.tools.count_bytes --length 16384 --head-dim 128 --mask causal

With --backend hopper, both commands use the Hopper kernels, whose names are _forward_kernel, _prepare_kernel, _main_kernel and
_finish_kernel. The command `python -m scripts.labs.counted_bytes` runs the profiler ncu for both backends and draws the result.

The first command prints the prediction. In the second command, ncu writes one line per kernel and counter to bytes.csv. A
sector has 32 bytes. The profiler empties the caches before every kernel, so the inputs are read from DRAM at least once.
Results that stay in the L2 cache are not counted as written to DRAM. Without --predict, the script requires a CUDA device, and
ncu requires the permission to read the counters.
"""

import sys
from typing import NamedTuple

import torch

from ringattn import Mask
from ringattn.kernels import dispatch
from ringattn.kernels.hopper import NARROW_DIM
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import row_delta
from ringattn.kernels.triton import common as triton_common
from scripts import command
from scripts.tables import markdown_table

BF16_BYTES, FP32_BYTES, SECTOR_BYTES = 2, 4, 32
NUM_SMS = 132  # an H200 has 132 SMs, and each SM processes one tile at a time
L2_BYTES = 50e6
MASKS = {"causal": Mask.causal(), "full": Mask.full()}


class Traffic(NamedTuple):
    """The bytes that a kernel moves. The field `l2_reduce` counts the bytes of additions in the L2 cache."""

    l2_read: int
    dram_read: int
    dram_write: int
    l2_reduce: int = 0


def total_loop_rows(intervals: Intervals, tile_rows: int, step: int) -> int:
    """Return the total number of rows that the loops of all tiles load.

    Args:
        intervals: the mask.
        tile_rows: rows per tile.
        step: rows per iteration of the loop.
    """
    _, _, begin, _, num_unmasked, num_masked = intervals.tiles(tile_rows, step).long().flatten(0, 1).unbind(1)
    end = (begin + (num_unmasked + num_masked) * step).clamp(max=intervals.num_keys)
    return int((end - begin).sum())


def forward_loads(
    intervals: Intervals, heads: int, head_dim: int, tile_queries: int, tile_keys: int, number_bytes: int = BF16_BYTES
) -> int:
    """Return the bytes of q, k and v that all tiles of a forward load.

    Args:
        intervals: the mask, with B = 1 and as many key heads as query heads.
        tile_queries: queries per tile.
        tile_keys: keys per iteration of the loop.
    """
    keys = total_loop_rows(intervals, tile_queries, tile_keys)
    return heads * head_dim * number_bytes * (intervals.num_rows + 2 * keys)


def forward_traffic(intervals: Intervals, heads: int, head_dim: int, tile_queries: int, tile_keys: int) -> Traffic:
    """Predict the traffic of a forward in bf16. Arguments as in `forward_loads`."""
    all_rows, row = heads * intervals.num_rows, head_dim * BF16_BYTES
    reads = dram_reads(intervals.num_rows, head_dim, tile_queries)
    return Traffic(
        l2_read=forward_loads(intervals, heads, head_dim, tile_queries, tile_keys),
        dram_read=round(all_rows * (row + 2 * row * reads)),
        dram_write=all_rows * (row + FP32_BYTES),
    )


def predict(length: int, heads: int, head_dim: int, mask: Mask) -> dict[str, Traffic]:
    """Predict the traffic of each Triton kernel with the formulas of docs/io.md.

    The prediction is for bf16 self-attention with B = 1 and one key head per query head.
    """
    intervals = Intervals.of(*mask.intervals(length), length)
    all_rows, row = heads * length, head_dim * BF16_BYTES
    stats = 2 * FP32_BYTES  # bytes of lse and delta of a row

    tile = triton_common.choose_tile("forward", torch.bfloat16, head_dim)
    forward = forward_traffic(intervals, heads, head_dim, tile.queries, tile.keys)

    tile = triton_common.choose_tile("key_gradient", torch.bfloat16, head_dim)
    queries = heads * total_loop_rows(intervals.transposed, tile.keys, tile.queries)
    reads = dram_reads(length, head_dim, tile.keys)
    grads = 2 * head_dim * FP32_BYTES  # bytes of a row of dk and a row of dv, which are both read and written
    key_gradient = Traffic(
        l2_read=queries * (2 * row + stats) + all_rows * (2 * row + grads),
        dram_read=round(all_rows * (2 * row + grads + (2 * row + stats) * reads)),
        dram_write=all_rows * grads,
    )

    tile = triton_common.choose_tile("query_gradient", torch.bfloat16, head_dim)
    keys = heads * total_loop_rows(intervals, tile.queries, tile.keys)
    reads = dram_reads(length, head_dim, tile.queries)
    grads = head_dim * FP32_BYTES  # bytes of a row of dq
    query_gradient = Traffic(
        l2_read=keys * 2 * row + all_rows * (2 * row + stats + grads),
        dram_read=round(all_rows * (2 * row + stats + grads + 2 * row * reads)),
        dram_write=all_rows * grads,
    )
    return {"forward": forward, "key_gradient": key_gradient, "query_gradient": query_gradient}


def predict_hopper(length: int, heads: int, head_dim: int, mask: Mask) -> dict[str, Traffic]:
    """Predict the traffic of each Hopper kernel, like `predict`. The head dim must be 64 or 128."""
    from ringattn.kernels.hopper import backward as hopper_backward
    from ringattn.kernels.hopper import forward as hopper_forward

    intervals = Intervals.of(*mask.intervals(length), length)
    all_rows, row = heads * length, head_dim * BF16_BYTES
    stats, sums = 2 * FP32_BYTES, head_dim * FP32_BYTES  # bytes of lse and delta of a row, and bytes of a row of dq in fp32

    few_rows = intervals.num_nonempty_rows * heads <= hopper_forward.FEW_ROWS
    config = hopper_forward.configure((head_dim,) * 2, (heads,) * 2, torch.bfloat16, False, True, few_rows)
    forward = forward_traffic(intervals, heads, head_dim, config.queries, config.keys)
    # The kernel `prepare` reads out, dout and lse, writes pairs of lse and delta, and sets dq to zero. Reading a single lse
    # transfers a whole sector of 32 bytes.
    prepare = Traffic(
        l2_read=all_rows * (2 * row + SECTOR_BYTES),
        dram_read=all_rows * (2 * row + FP32_BYTES),
        dram_write=all_rows * (stats + sums),
    )
    tile_keys = hopper_backward.KEYS.value
    tile_queries = hopper_backward.configure((head_dim,) * 2, (heads,) * 2, (False,) * 3).queries
    queries = heads * total_loop_rows(intervals.transposed, tile_keys, tile_queries)
    reads = dram_reads(length, head_dim, tile_keys)
    main_kernel = Traffic(
        l2_read=queries * (2 * row + stats) + all_rows * 2 * row,
        dram_read=round(all_rows * (2 * row + sums + (2 * row + stats) * reads)),
        dram_write=all_rows * (2 * row + sums),
        l2_reduce=queries * sums,
    )
    finish = Traffic(l2_read=all_rows * sums, dram_read=all_rows * sums, dram_write=all_rows * row)
    return {"forward": forward, "prepare": prepare, "main": main_kernel, "finish": finish}


PREDICTIONS = {"triton": predict, "hopper": predict_hopper}


def dram_reads(length: int, head_dim: int, tile_rows: int) -> float:
    """Return how often a loop's operands are read from DRAM. Operands that fit into L2 are read once. All other operands are
    read once per wave of tiles. A mask may reduce the number of reads.
    """
    fits = 2 * length * head_dim * BF16_BYTES <= L2_BYTES
    return 1.0 if fits else max(1.0, length / tile_rows / NUM_SMS)


def launch(length: int, heads: int, head_dim: int, mask: Mask, backend: str = "triton") -> None:
    """Run the forward and the backward of the backend "triton" or "hopper"."""
    q, k, v, dout = (torch.randn(1, length, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    intervals = Intervals.of(*mask.intervals(length), length, "cuda")
    options = {"scale": head_dim**-0.5, "backend": backend}
    out, lse = dispatch.forward(q, k, v, intervals, final=True, **options)[:2]
    if backend == "hopper":
        dispatch.backward(q, k, v, dout, lse, (out, None), intervals, **options)
    else:
        # Accumulate gradients in fp32, as on a ring.
        grads = [torch.zeros(x.shape, device="cuda") for x in (q, k, v)]
        dispatch.backward(q, k, v, dout, lse, row_delta(out, dout), intervals, dq=grads[0], dk=grads[1], dv=grads[2], **options)
    torch.cuda.synchronize()


@command.exit_without_memory()
def main(argv: list[str]) -> None:
    parser = command.new_parser(__doc__)
    parser.add_argument("--predict", action="store_true", help="print the prediction and launch nothing")
    parser.add_argument("--length", type=command.at_least(1), default=16384, help="tokens (default: 16384)")
    parser.add_argument("--heads", type=command.at_least(1), default=16, help="query heads and key heads (default: 16)")
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128, 256), help="default: 128")
    parser.add_argument("--mask", choices=MASKS, default="causal", help="default: causal")
    parser.add_argument("--backend", choices=PREDICTIONS, default="triton", help="the kernels; default: triton")
    args = parser.parse_args(argv)
    if not (args.predict or torch.cuda.is_available()):
        parser.error("a CUDA device is required; --predict works without one")
    if args.backend == "hopper" and args.head_dim > NARROW_DIM:
        parser.error(f"--head-dim {args.head_dim}: the Hopper prediction covers head dims 64 and 128, use --backend triton")
    case = args.length, args.heads, args.head_dim, MASKS[args.mask]
    if not args.predict:
        launch(*case, args.backend)
        return
    columns = "kernel | L2 reads, MB | L2 read sectors | DRAM reads, MB | DRAM writes, MB | L2 reductions, MB"
    rows = []
    for kernel, traffic in PREDICTIONS[args.backend](*case).items():
        megabytes = [f"{count / 1e6:,.0f}" for count in traffic]
        rows.append([kernel, megabytes[0], f"{traffic.l2_read // SECTOR_BYTES:,}", *megabytes[1:]])
    print(markdown_table(columns, rows), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
