"""Split-KV decoding computes attention of a few new queries to a long cache of keys and values (Flash-Decoding, Dao et al.
2023).

The key tiles of all batch entries form one sequence, which is divided into *runs* of equal length. Each program computes,
for one key head, attention to the keys of one run:

    tiles of keys    [ entry 0                           ][ entry 1          ]
    runs             [ run 0            ][ run 1             ][ run 2        ]
    parts            [ 0                ][ 1             ][ 2 ][ 3           ]        part = run + entry

For each batch entry in its run, a program stores a partial softmax state, called a *part*. The program that stores the last
part of a batch entry and key head merges all of their parts. The rows of a tile are the queries of all query heads that share a
key head.

Before the queries are ready, each program prefetches its first key tile into the L2 cache.

The launches depend only on shapes, so that a CUDA graph can replay them.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from ringattn.kernels.reference import State
from ringattn.kernels.triton.common import LN_2, LOG2_E, as_addressable, pad_dim
from ringattn.kernels.triton.forward import add_tile
from ringattn.kernels.triton.launcher import PreparedLaunch
from ringattn.kernels.triton.scratch import MAX_COUNTERS, ScratchPool

MERGE_ELEMENTS = 4096  # a program of `_merge_kernel` loads at most this many elements of o at once
# With more `_merge_kernel` programs per SM, an early start of the next kernel would distribute its programs unevenly.
MAX_MERGE_PROGRAMS_PER_SM = 4
# Merging more than MAX_MERGED_ELEMENTS elements of o is faster in a second launch than in one program.
MAX_MERGED_ELEMENTS = 8192
# For small KV caches, a launch may take longer than the kernel, so one launch is faster than two.
SMALL_CACHE_BYTES = 48 * 2**20
# Above 4 TB/s of memory bandwidth, as on the H200, decoding needs two programs per SM or one more pipeline stage.
FAST_MEMORY = 4e12
# With fewer than 128 keys per program, merging would cost more time than splitting saves.
MIN_RUN_KEYS = 128
# If strides are passed in units of 8 elements, Triton can generate 16-byte loads.
STRIDE_UNIT = 8
PREFETCH_BYTES = tl.constexpr(128)  # bytes that one instruction prefetches into the L2 cache
INTERPRETER_SMS = 8  # for Triton's interpreter; any number gives correct results

_scratch = ScratchPool()  # the memory of `parts`


class Tile(NamedTuple):
    rows: int
    keys: int
    num_warps: int
    num_stages: int


# These tile sizes were the fastest for fp16 and bf16 on sm_90.
TILES_16_BIT = {64: Tile(64, 128, 4, 3), 128: Tile(64, 64, 4, 3), 256: Tile(32, 64, 4, 3)}
TILE_FP32 = Tile(16, 32, 4, 2)


@dataclass(frozen=True)
class Config:
    """The constants of the two kernels. The numbers padded_batch, parts and merged_rows are powers of two.

    Args:
        parts: the maximum number of parts per query.
        merged_rows: the number of rows that a program of the first launch merges.
        merged_columns: the columns of o that a program of the second launch computes.
        page_tiles: the tiles of keys per page, or 0.
        pdl: whether the kernels use programmatic dependent launch.
        prefetch: whether programs prefetch tiles, on NVIDIA GPUs without pages.
        prefetch_early: whether programs prefetch a tile before they wait for earlier kernels, and whether the second launch
            lets the next kernel start early.
    """

    queries: int
    key_heads: int
    group: int
    dim: int
    value_dim: int
    rows: int
    keys: int
    min_tiles: int
    padded_batch: int
    parts: int
    merged_rows: int
    merged_columns: int
    stride_unit: int
    page_tiles: int
    pdl: bool
    prefetch: bool
    prefetch_early: bool
    precision: str = "ieee"


@triton.jit
def _load_ranges(bounds, entry, CONFIG: tl.constexpr, VOLATILE: tl.constexpr = False):
    """Return the two ranges of key tiles to which the queries of a batch entry attend.

    The first range is the tiles [0, sink_tiles). It contains the attention sinks, which are the keys [0, num_sinks). The second
    range begins with the tile `first_tile`, and ends before the key `end`.

    Args:
        bounds: (lo, hi, sinks, bound_stride, sink_stride, num_keys), as for `_attend_kernel`.
        VOLATILE: whether to bypass the L1 cache, because another kernel may still be writing the bounds.

    Returns:
        (num_sinks, sink_tiles, first_tile, end, number of tiles in both ranges).
    """
    lo, hi, sinks, bound_stride, sink_stride, num_keys = bounds
    lo += entry * bound_stride
    first = tl.load(lo, volatile=VOLATILE)
    end = tl.load(hi + entry * bound_stride + (CONFIG.queries - 1), volatile=VOLATILE)
    end = tl.minimum(tl.maximum(end, 0), num_keys)
    first_tile = tl.maximum(first, 0) // CONFIG.keys
    num_tiles = tl.where(first < end, tl.cdiv(end, CONFIG.keys) - first_tile, 0)
    num_sinks, sink_tiles = tl.zeros_like(first), tl.zeros_like(first)
    if sinks is not None:
        num_sinks = tl.load(sinks + entry * sink_stride, volatile=VOLATILE)
        num_sinks = tl.minimum(num_sinks, tl.load(lo + (CONFIG.queries - 1), volatile=VOLATILE))
        num_sinks = tl.maximum(tl.minimum(num_sinks, end), 0)
        sink_tiles = tl.cdiv(num_sinks, CONFIG.keys)
        num_tiles += sink_tiles
    return num_sinks, sink_tiles, first_tile, end, num_tiles


@triton.jit
def _divide_into_runs(bounds, batch, num_runs, CONFIG: tl.constexpr, VOLATILE: tl.constexpr = False):
    """Return (batch entries, key tiles per batch entry, key tiles per run)."""
    entries = tl.arange(0, CONFIG.padded_batch)
    _, _, _, _, tiles = _load_ranges(bounds, tl.minimum(entries, batch - 1), CONFIG, VOLATILE)
    tiles = tl.where(entries < batch, tiles, 0)
    return entries, tiles, tl.maximum(tl.cdiv(tl.sum(tiles, 0), num_runs), CONFIG.min_tiles)


@triton.jit
def _query_index(entry, head, row, CONFIG: tl.constexpr):
    token, head_in_group = row // CONFIG.group, row % CONFIG.group
    return ((entry * CONFIG.queries + token) * CONFIG.key_heads + head) * CONFIG.group + head_in_group


@triton.jit
def _load_queries(q, bounds, entry, head, row, CONFIG: tl.constexpr):
    columns = tl.arange(0, pad_dim(CONFIG.dim))
    inside = row < CONFIG.queries * CONFIG.group
    pointers = q + _query_index(entry, head, row, CONFIG).to(tl.int64)[:, None] * CONFIG.dim + columns[None, :]
    tile = tl.load(pointers, mask=inside[:, None] & (columns < CONFIG.dim)[None, :], other=0.0)
    lo, hi, _, bound_stride, _, num_keys = bounds
    bound = entry * bound_stride + row // CONFIG.group
    row_hi = tl.load(hi + bound, mask=inside, other=0)
    return tile, tl.load(lo + bound, mask=inside, other=0), tl.minimum(row_hi, num_keys)


@triton.jit
def _tile_at(t, ranges, HAS_SINKS: tl.constexpr):
    _, sink_tiles, first_tile, _, _ = ranges
    return tl.where(t < sink_tiles, t, first_tile + t - sink_tiles) if HAS_SINKS else first_tile + t


@triton.jit
def _at_page(x, page, first_tile, batch_stride, row_stride, CONFIG: tl.constexpr):
    offset = page.to(tl.int64) * batch_stride - first_tile.to(tl.int64) * CONFIG.keys * row_stride
    return x + offset * CONFIG.stride_unit


@triton.jit
def _prefetch_rows(x, row_stride, first, end, DIM: tl.constexpr, ROWS: tl.constexpr):
    ELEMENT_BYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    SEGMENTS: tl.constexpr = (pad_dim(DIM) * ELEMENT_BYTES + PREFETCH_BYTES - 1) // PREFETCH_BYTES
    i = tl.arange(0, ROWS * SEGMENTS)
    row = tl.maximum(tl.minimum(first + i // SEGMENTS, end - 1), 0)
    column = tl.minimum(i % SEGMENTS * (PREFETCH_BYTES // ELEMENT_BYTES), DIM - 1)
    pointers = x + row.to(tl.int64) * row_stride + column
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_tile(cache, strides, ranges, entry, head, t, HAS_SINKS: tl.constexpr, CONFIG: tl.constexpr):
    UNIT: tl.constexpr = CONFIG.stride_unit
    k, v, _, _ = cache
    k_batch, k_row, k_head, v_batch, v_row, v_head = strides
    entry, head = entry.to(tl.int64), head.to(tl.int64)
    row, end = _tile_at(t, ranges, HAS_SINKS) * CONFIG.keys, ranges[3]
    _prefetch_rows(k + (entry * k_batch + head * k_head) * UNIT, k_row * UNIT, row, end, CONFIG.dim, CONFIG.keys)
    _prefetch_rows(v + (entry * v_batch + head * v_head) * UNIT, v_row * UNIT, row, end, CONFIG.value_dim, CONFIG.keys)


@triton.jit
def _attend_to_tiles(
    query, cache, strides, ranges, entry, head, begin, end, scale, HAS_SINKS: tl.constexpr, CONFIG: tl.constexpr
):
    TILE_ROWS: tl.constexpr = CONFIG.rows
    PADDED: tl.constexpr = pad_dim(CONFIG.value_dim)
    query_tile, row_lo, row_hi = query
    k, v, page_table, table_stride = cache
    k_batch, k_row, k_head, v_batch, v_row, v_head = strides
    num_sinks, sink_tiles, _, end_key, _ = ranges
    head_index = head.to(tl.int64) * CONFIG.stride_unit
    tile_k, tile_v = k + head_index * k_head, v + head_index * v_head
    head_k, head_v, page = tile_k, tile_v, 0
    if page_table is None:
        batch_index = entry.to(tl.int64) * CONFIG.stride_unit
        tile_k += batch_index * k_batch
        tile_v += batch_index * v_batch
    else:
        page_table += entry * table_stride
        page = tl.load(page_table + _tile_at(begin, ranges, HAS_SINKS) // CONFIG.page_tiles, mask=begin < end, other=0)

    m = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    l = tl.zeros([TILE_ROWS], tl.float32)
    o = tl.zeros([TILE_ROWS, PADDED], tl.float32)
    for t in range(begin, end):
        tile, tile_lo, tile_hi = _tile_at(t, ranges, HAS_SINKS), row_lo, row_hi
        if HAS_SINKS:
            tile_lo = tl.where(t < sink_tiles, 0, row_lo)
            tile_hi = tl.where(t < sink_tiles, tl.minimum(tl.minimum(row_lo, num_sinks), row_hi), row_hi)
        if page_table is not None:
            first_tile = tile // CONFIG.page_tiles * CONFIG.page_tiles
            tile_k = _at_page(head_k, page, first_tile, k_batch, k_row, CONFIG)
            tile_v = _at_page(head_v, page, first_tile, v_batch, v_row, CONFIG)
            # Load the number of the next page in advance, because Triton would otherwise wait for all earlier loads.
            page = tl.load(page_table + _tile_at(t + 1, ranges, HAS_SINKS) // CONFIG.page_tiles, mask=t + 1 < end, other=0)
        # Memory bandwidth limits this kernel, so masking every tile costs no time. Rows from `end_key` on may contain NaN and
        # are not read.
        operands = (
            query_tile, tile_k, tile_v, k_row * CONFIG.stride_unit, v_row * CONFIG.stride_unit, end_key, tile_lo, tile_hi,
            head, scale * LOG2_E,
        )  # fmt: skip
        m, l, o = add_tile(operands, None, (m, l, o), tile * CONFIG.keys, 0, True, CONFIG)
    return m, l, o


@triton.jit
def _prefetch_first_tile(cache, strides, bounds, batch, num_runs, head, run, HAS_SINKS: tl.constexpr, CONFIG: tl.constexpr):
    """An earlier kernel may still be writing the bounds, but prefetching a wrong tile costs little time."""
    entries, tiles, length = _divide_into_runs(bounds, batch, num_runs, CONFIG, True)
    begin = run * length
    entry = tl.minimum(_entry_of_tile(tiles, begin), batch - 1)
    tiles_before = tl.sum(tl.where(entries < entry, tiles, 0), 0)
    ranges = _load_ranges(bounds, entry, CONFIG, True)
    _prefetch_tile(cache, strides, ranges, entry, head, begin - tiles_before, HAS_SINKS, CONFIG)


@triton.jit
def _entry_of_tile(tiles, t):
    return tl.sum((tl.cumsum(tiles, 0) <= t).to(tl.int32), 0)


@triton.jit
def _find_parts(tiles_before, num_tiles, length):
    first_run = tiles_before // length
    return first_run, tl.where(num_tiles > 0, (tiles_before + num_tiles - 1) // length - first_run + 1, 0)


@triton.jit
def _load_parts(parts, num_part_rows, first_part, num_parts, head, row, columns, CONFIG: tl.constexpr):
    """Return m (rows,) in log2 units, l (rows,) and o (rows, columns)."""
    ROWS: tl.constexpr = CONFIG.queries * CONFIG.group
    index = tl.arange(0, CONFIG.parts)[:, None]
    used = (index < num_parts) & (row < ROWS)[None, :]
    part_row = ((first_part + index) * CONFIG.key_heads + head) * ROWS + row[None, :]
    scalars = parts + num_part_rows.to(tl.int64) * CONFIG.value_dim + part_row
    part_m = tl.load(scalars, mask=used, other=float("-inf"))
    part_l = tl.load(scalars + num_part_rows, mask=used, other=0.0)
    mask = used[:, :, None] & (columns < CONFIG.value_dim)[None, None, :]
    elements = part_row.to(tl.int64)[:, :, None] * CONFIG.value_dim + columns[None, None, :]
    part_o = tl.load(parts + elements, mask=mask, other=0.0)
    m = tl.max(part_m, 0)
    weight = tl.exp2(part_m - tl.where(m == float("-inf"), 0.0, m)[None, :])
    return m, tl.sum(part_l * weight, 0), tl.sum(part_o * weight[:, :, None], 0)


@triton.jit
def _store_results(results, state, entry, head, row, columns, CONFIG: tl.constexpr):
    result_m, result_l, result_o, lse = results
    m, l, o = state
    inside = row < CONFIG.queries * CONFIG.group
    query_index = _query_index(entry, head, row, CONFIG)
    if result_m is None:
        divisor = tl.where(l == 0.0, 1.0, l)
        o /= divisor[:, None]
        if lse is not None:
            tl.store(lse + query_index, (m + tl.log2(divisor)) * LN_2, mask=inside)
    else:
        tl.store(result_m + query_index, m * LN_2, mask=inside)
        tl.store(result_l + query_index, l, mask=inside)
    pointers = result_o + query_index.to(tl.int64)[:, None] * CONFIG.value_dim + columns[None, :]
    mask = inside[:, None] & (columns < CONFIG.value_dim)[None, :]
    tl.store(pointers, o.to(result_o.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(parts, num_part_rows, state, part, head, row, CONFIG: tl.constexpr):
    ROWS: tl.constexpr = CONFIG.queries * CONFIG.group
    m, l, o = state
    part_row = (part * CONFIG.key_heads + head) * ROWS + row
    columns, inside = tl.arange(0, pad_dim(CONFIG.value_dim)), row < ROWS
    mask = inside[:, None] & (columns < CONFIG.value_dim)[None, :]
    tl.store(parts + part_row.to(tl.int64)[:, None] * CONFIG.value_dim + columns[None, :], o, mask=mask)
    scalars = parts + num_part_rows.to(tl.int64) * CONFIG.value_dim + part_row
    tl.store(scalars, m, mask=inside)
    tl.store(scalars + num_part_rows, l, mask=inside)


@triton.jit
def _is_last_part(counter, num_parts):
    """Count a stored part, and return whether it completes the parts of its batch entry. The atomic addition has acquire and
    release semantics, so that the last program can read all parts.
    """
    # Only one thread executes the atomic addition, so first wait until all threads have stored the part.
    tl.debug_barrier()
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_parts - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def _finish_entry(
    parts, num_part_rows, counter, results, state, run, first_run, num_parts, entry, head, row, CONFIG: tl.constexpr
):
    if num_parts == 1:
        _store_results(results, state, entry, head, row, tl.arange(0, pad_dim(CONFIG.value_dim)), CONFIG)
    elif num_parts > 1:
        _store_part(parts, num_part_rows, state, run + entry, head, row, CONFIG)
        if _is_last_part(counter, num_parts):
            columns, first_row = tl.arange(0, pad_dim(CONFIG.value_dim)), tl.program_id(2) * CONFIG.rows
            merged = first_row + tl.arange(0, CONFIG.merged_rows)
            merged_state = _load_parts(parts, num_part_rows, first_run + entry, num_parts, head, merged, columns, CONFIG)
            _store_results(results, merged_state, entry, head, merged, columns, CONFIG)


@triton.jit
def _store_empty_entries(results, tiles, entries, batch, head, row, CONFIG: tl.constexpr):
    TILE_ROWS: tl.constexpr = CONFIG.rows
    PADDED: tl.constexpr = pad_dim(CONFIG.value_dim)
    if tl.sum(((tiles == 0) & (entries < batch)).to(tl.int32), 0) > 0:
        m, l = tl.full([TILE_ROWS], float("-inf"), tl.float32), tl.zeros([TILE_ROWS], tl.float32)
        o = tl.zeros([TILE_ROWS, PADDED], tl.float32)
        for entry in range(0, batch):
            if tl.sum(tl.where(entries == entry, tiles, 0), 0) == 0:
                _store_results(results, (m, l, o), entry, head, row, tl.arange(0, PADDED), CONFIG)


@triton.jit(
    do_not_specialize=[
        "batch", "bound_stride", "sink_stride", "num_keys", "num_runs", "num_part_rows", "table_stride",
        "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head",
    ]
)  # fmt: skip
def _attend_kernel(
    q, k, v, page_table, lo, hi, sinks, parts, counters, m, l, o, lse,
    batch, bound_stride, sink_stride, num_keys, num_runs, num_part_rows, table_stride,
    k_batch, k_row, k_head, v_batch, v_row, v_head, scale, CONFIG: tl.constexpr,
):  # fmt: skip
    """Compute the partial states for one run, one key head and one tile of query rows. The grid is (Hkv, runs, tiles of rows).

    Args:
        k, v: (B, Nk, Hkv, D) and (B, Nk, Hkv, Dv), or with a page table (pages, rows of a page, ...). k_batch to v_head are
            their first three strides in units of CONFIG.stride_unit.
        page_table: int32 (B, table_stride) or None, for pages of CONFIG.page_tiles tiles.
        lo, hi, sinks: see `reference.decode`. bound_stride is 0 or Nq, and sink_stride 0 or 1.
        parts: fp32: o (num_part_rows, Dv), followed by m (log2 units) and l (num_part_rows,), with rows ordered by part, key
            head and query row.
        counters: int32 (B * Hkv * tiles of rows,), zeros before and after the launch, or None if `_merge_kernel` merges the
            parts, in which case m, l, o and lse must be None.
        m, l: the results, or None to store o / l in `o` instead of the state.
    """
    head, run = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * CONFIG.rows + tl.arange(0, CONFIG.rows)
    bounds = lo, hi, sinks, bound_stride, sink_stride, num_keys
    cache, strides = (k, v, page_table, table_stride), (k_batch, k_row, k_head, v_batch, v_row, v_head)
    if CONFIG.prefetch_early:
        _prefetch_first_tile(cache, strides, bounds, batch, num_runs, head, run, sinks is not None, CONFIG)
    if CONFIG.pdl:
        gdc_wait()  # wait for the inputs
        gdc_launch_dependents()  # the next kernel may start now, before this kernel has ended
    entries, tiles, length = _divide_into_runs(bounds, batch, num_runs, CONFIG)
    if counters is not None and run == 0:
        _store_empty_entries((m, l, o, lse), tiles, entries, batch, head, row, CONFIG)
    begin = run * length
    end = tl.minimum(begin + length, tl.sum(tiles, 0))
    first_entry, last_entry = _entry_of_tile(tiles, begin), _entry_of_tile(tiles, end - 1)
    for i in range(0, last_entry - first_entry + 1):
        entry = first_entry + i
        ranges = _load_ranges(bounds, entry, CONFIG)
        tiles_before = tl.sum(tl.where(entries < entry, tiles, 0), 0)
        first_tile, end_tile = tl.maximum(begin - tiles_before, 0), tl.minimum(end - tiles_before, ranges[4])
        if CONFIG.prefetch and (i > 0 or not CONFIG.prefetch_early):
            _prefetch_tile(cache, strides, ranges, entry, head, first_tile, sinks is not None, CONFIG)
        state = _attend_to_tiles(
            _load_queries(q, bounds, entry, head, row, CONFIG), cache, strides, ranges, entry, head, first_tile, end_tile,
            scale, sinks is not None, CONFIG,
        )  # fmt: skip
        if counters is None:
            _store_part(parts, num_part_rows, state, run + entry, head, row, CONFIG)
        else:
            first_run, num_parts = _find_parts(tiles_before, ranges[4], length)
            counter = counters + (entry * CONFIG.key_heads + head) * tl.num_programs(2) + tl.program_id(2)
            _finish_entry(
                parts, num_part_rows, counter, (m, l, o, lse), state, run, first_run, num_parts, entry, head, row, CONFIG
            )


@triton.jit(do_not_specialize=["batch", "bound_stride", "sink_stride", "num_keys", "num_runs", "num_part_rows"])
def _merge_kernel(
    lo, hi, sinks, parts, m, l, o, lse,
    batch, bound_stride, sink_stride, num_keys, num_runs, num_part_rows, CONFIG: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query row. The grid is (query rows * slices of columns, Hkv, B). See `_attend_kernel`."""
    SLICES: tl.constexpr = pad_dim(CONFIG.value_dim) // CONFIG.merged_columns
    row, head, entry = tl.program_id(0) // SLICES, tl.program_id(1), tl.program_id(2)
    columns = tl.program_id(0) % SLICES * CONFIG.merged_columns + tl.arange(0, CONFIG.merged_columns)
    bounds = lo, hi, sinks, bound_stride, sink_stride, num_keys
    entries, tiles, length = _divide_into_runs(bounds, batch, num_runs, CONFIG)
    tiles_before = tl.sum(tl.where(entries < entry, tiles, 0), 0)
    num_tiles = tl.sum(tl.where(entries == entry, tiles, 0), 0)
    first_run, num_parts = _find_parts(tiles_before, num_tiles, length)
    if CONFIG.pdl:
        # The parts are complete only after `gdc_wait`.
        gdc_wait()
        if CONFIG.prefetch_early:
            gdc_launch_dependents()  # the next kernel may start now and prefetch its first tiles
    rows = row + tl.arange(0, 1)
    state = _load_parts(parts, num_part_rows, first_run + entry, num_parts, head, rows, columns, CONFIG)
    _store_results((m, l, o, lse), state, entry, head, rows, columns, CONFIG)


@dataclass(frozen=True)
class _Plan:
    config: Config
    attend: dict[str, PreparedLaunch]  # by result: "state", "out" or "out and lse"
    merge: dict[str, PreparedLaunch]
    parts_size: int  # the number of elements of `parts`
    num_counters: int  # the number of elements of `counters`, or 0 if the second launch merges the parts


def choose_tile(dtype: torch.dtype, head_dim: int) -> Tile:
    return TILE_FP32 if dtype == torch.float32 else TILES_16_BIT[max(head_dim, 64)]


def choose_num_runs(num_sms: int, programs: int) -> int:
    """One program per SM reads memory fastest. Plan for two if one would leave more than a quarter of the SMs idle."""
    num_runs = max(num_sms // programs, 1)
    return num_runs if 4 * num_runs * programs >= 3 * num_sms else max(2 * num_sms // programs, 1)


@lru_cache(maxsize=256)
def _plan(
    q_shape: torch.Size,
    k_shape: torch.Size,
    value_dim: int,
    k_strides: tuple[int, ...],
    v_strides: tuple[int, ...],
    pages: int,
    bounds: int,
    sinks: int,
    scale: float,
    dtype: torch.dtype,
    device: torch.device,
) -> _Plan:
    (batch, num_queries, num_heads, dim), (_, num_keys, key_heads, _) = q_shape, k_shape
    group, padded_dim = num_heads // key_heads, pad_dim(value_dim)
    tile = choose_tile(dtype, max(pad_dim(dim), padded_dim))
    page_tiles = 0
    if pages:
        tile = tile._replace(keys=math.gcd(tile.keys, num_keys))
        page_tiles, num_keys = num_keys // tile.keys, pages * num_keys
    rows = num_queries * group
    tile_rows = min(max(triton.next_power_of_2(rows), 16), tile.rows)
    row_tiles = triton.cdiv(rows, tile_rows)
    min_tiles = max(MIN_RUN_KEYS // tile.keys, 1)
    runs_per_entry = triton.cdiv(triton.cdiv(num_keys, tile.keys) + (sinks > 0), min_tiles)
    fast_memory = dtype.itemsize == 2 and has_fast_memory(device)
    num_runs = choose_num_runs(_num_sms(device), key_heads * row_tiles)
    shares_sms = fast_memory and batch >= num_runs
    if shares_sms:
        num_runs = choose_num_runs(2 * _num_sms(device), key_heads * row_tiles)
    num_runs = min(num_runs, max(batch * runs_per_entry, 1))
    # A batch entry that begins in the middle of a run may need one more run.
    parts = triton.next_power_of_2(max(min(num_runs, runs_per_entry + (batch > 1)), 1))
    merged_rows = triton.next_power_of_2(min(rows, tile_rows))
    num_counters = batch * key_heads * row_tiles
    is_small = batch * num_keys * key_heads * (dim + value_dim) * dtype.itemsize <= SMALL_CACHE_BYTES
    fits = num_counters <= MAX_COUNTERS and parts * merged_rows * padded_dim <= MAX_MERGED_ELEMENTS
    num_counters = num_counters if fits and (is_small or batch >= num_runs) else 0
    if fast_memory and not shares_sms and num_counters == 0 and max(pad_dim(dim), padded_dim) <= 128:
        tile = tile._replace(num_stages=tile.num_stages + 1)
    merged_columns = min(padded_dim, max(16, MERGE_ELEMENTS // parts))
    merge_grid = rows * padded_dim // merged_columns, key_heads, batch
    pdl = supports_pdl(device)
    prefetch = pdl and not pages
    prefetch_early = prefetch and num_counters == 0 and math.prod(merge_grid) <= MAX_MERGE_PROGRAMS_PER_SM * _num_sms(device)
    strides = *k_strides[:3], *v_strides[:3]
    unit = STRIDE_UNIT if all(stride % STRIDE_UNIT == 0 for stride in strides) else 1
    config = Config(
        num_queries, key_heads, group, dim, value_dim, tile_rows, tile.keys, min_tiles, triton.next_power_of_2(batch), parts,
        merged_rows, merged_columns, unit, page_tiles, pdl, prefetch, prefetch_early,
    )  # fmt: skip
    num_part_rows = (num_runs + batch - 1) * key_heads * rows
    sizes = batch, num_queries * (bounds > 1), int(sinks > 1), num_keys, num_runs, num_part_rows
    numbers = *sizes, pages, *(stride // unit for stride in strides), float(scale)
    dependent = {"launch_pdl": True} if pdl else {}
    attend_options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **dependent}
    merge_options = {"num_warps": 2, **dependent}
    attend, merge = (
        {results: PreparedLaunch(kernel, grid, options, fixed, CONFIG=config) for results in ("state", "out", "out and lse")}
        for kernel, grid, options, fixed in (
            (_attend_kernel, (key_heads, num_runs, row_tiles), attend_options, numbers),
            (_merge_kernel, merge_grid, merge_options, sizes),
        )
    )
    return _Plan(config, attend, merge, num_part_rows * (value_dim + 2), num_counters)


def supports_pdl(device: torch.device) -> bool:
    """Return whether the device supports programmatic dependent launch, as NVIDIA GPUs since sm_90 do."""
    # PyTorch also calls AMD GPUs "cuda", so check that PyTorch was built for CUDA.
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


def has_fast_memory(device: torch.device) -> bool:
    if not supports_pdl(device):
        return False
    properties = torch.cuda.get_device_properties(device)
    # The clock is in kHz, and the bus width in bits. The memory transfers data twice per cycle.
    return 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8 > FAST_MEMORY


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETER_SMS


class Decoder:
    """A `Decoder` repeats decoding calls that share the cache, the query shape and the scale.

    For a short cache, the host limits the speed, so the constructor computes everything that the calls share. The last
    dimension of k and v must be contiguous.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lo: Tensor,
        scale: float,
        final: bool = False,
        sinks: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse: bool = False,
    ) -> None:
        self.cache = k, v, page_table
        self.out_shape = *q.shape[:3], v.shape[3]
        self.results = ("out and lse" if return_lse else "out") if final else "state"
        self.plan = None
        if q.numel():
            pages = 0 if page_table is None else page_table.shape[1]
            rows = len(lo), 0 if sinks is None else len(sinks)
            self.plan = _plan(q.shape, k.shape, v.shape[3], k.stride(), v.stride(), pages, *rows, scale, q.dtype, q.device)
            if q.is_cuda:
                _scratch.reserve_counters(q)

    def __call__(
        self, q: Tensor, lo: Tensor, hi: Tensor, sinks: Tensor | None = None
    ) -> State | tuple[Tensor, Tensor] | Tensor:
        stream = None
        if q.is_cuda:
            device = q.get_device()
            if device != torch.cuda.current_device():
                with torch.cuda.device_of(q):
                    return self(q, lo, hi, sinks)
            stream = driver.active.get_current_stream(device)
        q, plan, m, l, lse = q.contiguous(), self.plan, None, None, None
        if self.results == "state":
            m, l = (q.new_empty(self.out_shape[:3], dtype=torch.float32) for _ in range(2))
            o = m.new_empty(self.out_shape)
        else:
            o = torch.empty_like(q) if q.shape == self.out_shape else q.new_empty(self.out_shape)
            if self.results == "out and lse":
                lse = q.new_empty(self.out_shape[:3], dtype=torch.float32)
        if plan is not None:
            key, memory = _scratch.take(plan.parts_size, plan.num_counters, q, stream)
            parts, counters = memory
            attend = plan.attend[self.results]
            if plan.num_counters:
                attend(stream, q, *self.cache, lo, hi, sinks, parts, counters, m, l, o, lse)
            else:
                attend(stream, q, *self.cache, lo, hi, sinks, parts, None, None, None, None, None)
                plan.merge[self.results](stream, lo, hi, sinks, parts, m, l, o, lse)
            _scratch.give_back(key, memory)
        if self.results == "state":
            return m, l, o
        return o if lse is None else (o, lse)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    scale: float,
    final: bool = False,
    sinks: Tensor | None = None,
    page_table: Tensor | None = None,
    return_lse: bool = False,
) -> State | tuple[Tensor, Tensor] | Tensor:
    """Compute `reference.decode` in one or two launches. The host does not wait for the GPU.

    After one call, calls with the same shapes can be captured in a CUDA graph. Replays of the graph read the current `lo`, `hi`
    and `sinks`. If the last dimension of k or v is not contiguous, the tensor is copied. Cache rows at or beyond the largest
    `hi` of a batch entry are not read. The page size must be a multiple of 16. The fastest page sizes are multiples of 64, or
    of 128 for head dims of up to 64. With `final` and `return_lse`, the result is (out, lse).
    """
    k, v = as_addressable(k), as_addressable(v)
    return Decoder(q, k, v, lo, scale, final, sinks, page_table, return_lse)(q, lo, hi, sinks)
