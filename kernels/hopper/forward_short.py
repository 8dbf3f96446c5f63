"""The forward kernel for head dims up to 64 and short intervals, such as windows of 128 keys.

A work tile is 64 queries of all query heads that share a key head. All keys of a work tile fit into shared memory, so K and V
are loaded once for all heads. If possible, the 64 rows of a product are 8 queries of 8 heads. Compared with 64 queries of one
head, 8 queries attend to fewer keys. Each product has these steps:

      wait for Q | S = Q K^T, two tiles | load the next Q | softmax of S | O = sum of P V, two tiles | store O

The softmax subtracts the largest score of each row, so no row can overflow. Three programs share an SM, so that one program
computes while another program waits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from ringattn.kernels.hopper import column_parts, softmax
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import ROWS, allocate_barrier, load_work_tile, tile_view, tma_load
from ringattn.kernels.hopper.epilogue import finish_work_tile

# In shared memory, a wgmma operand can begin at every eighth row of K or V.
GROUP_ROWS = gl.constexpr(8)
KEYS = gl.constexpr(128)


@gluon.jit
def _groups(buffers, first, COUNT: gl.constexpr):
    # Before Triton 3.9, the number of buffers of a slice must be a power of two.
    return buffers.slice(first, COUNT) if hopper_common.NEEDS_SLICES else buffers.index(first)


@gluon.jit
def _load_keys(tensor, tile, buffers, full, CONFIG: gl.constexpr):
    COPIES: gl.constexpr = CONFIG.stages
    if tile[3] > 0:
        mbarrier.expect(full, COPIES * tensor.block_type.nbytes)
        for i in gl.static_range(COPIES):
            view = tile_view(_groups(buffers, i * (CONFIG.keys // GROUP_ROWS), CONFIG.keys // GROUP_ROWS), tensor)
            tma_load(tensor, [tile[0], tile[4][0] + i * CONFIG.keys, tile[1], 0], full, view)


@gluon.jit
def _load_queries(tensor, rows, queries, full, slot):
    batch, head, first, end, _ = rows
    if end > 0:
        mbarrier.expect(full.index(slot), tensor.block_type.nbytes)
        tma_load(tensor, [batch, first, head, 0], full.index(slot), tile_view(queries.index(slot), tensor))


@gluon.jit
def _rows_of(tile, product, CONFIG: gl.constexpr):
    batch, key_head, first, end, loop = tile
    PRODUCTS: gl.constexpr = CONFIG.group // CONFIG.heads_per_row  # per query
    head = key_head * CONFIG.group + product % PRODUCTS * CONFIG.heads_per_row
    return batch, head, first + product // PRODUCTS * (ROWS // CONFIG.heads_per_row), end, loop[0]


@gluon.jit
def _load_bounds(lo, hi, rows, num_masks, num_queries, CONFIG: gl.constexpr):
    batch, _, first, end, _ = rows
    row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores_layout)) // CONFIG.heads_per_row
    offset = gl.minimum(batch, num_masks - 1) * num_queries
    row_lo = gl.load(lo + offset + row, mask=row < end, other=0)
    row_hi = gl.load(hi + offset + row, mask=row < end, other=0)
    first_lo = gl.load(lo + offset + first, mask=first < end, other=0)
    first_hi = gl.load(hi + offset + first, mask=first < end, other=0)
    last = gl.minimum(first + ROWS // CONFIG.heads_per_row, end) - 1
    return row_lo, row_hi, first_lo, first_hi, gl.load(lo + offset + last, mask=first < end, other=0)


@gluon.jit
def _rows_view(buffers, first, COUNT: gl.constexpr, DIM: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COUNT, DIM], buffers.dtype)
    return hopper_common.reinterpret(_groups(buffers, first, COUNT // GROUP_ROWS), buffers.dtype, [COUNT, DIM], LAYOUT)


@gluon.jit
def _tiles_from(buffers, first, CONFIG: gl.constexpr):
    tail = _rows_view(buffers, first + KEYS // GROUP_ROWS, CONFIG.tail_keys, CONFIG.dim)
    return _rows_view(buffers, first, KEYS, CONFIG.dim), tail


@gluon.jit
def _tiles(buffers, group, CONFIG: gl.constexpr):
    LAST_GROUP: gl.constexpr = (ROWS - ROWS // CONFIG.heads_per_row) // GROUP_ROWS
    if hopper_common.NEEDS_SLICES:  # The index of the first buffer of a slice must be a constant.
        keys, tail = _tiles_from(buffers, 0, CONFIG)
        for i in gl.static_range(1, LAST_GROUP + 1):
            if group == i:
                keys, tail = _tiles_from(buffers, i, CONFIG)
    else:
        keys, tail = _tiles_from(buffers, group, CONFIG)
    return keys, tail


@gluon.jit(do_not_specialize=["num_masks", "num_queries"])
def _forward_kernel(
    q, k, v, state_tiles, out_tiles, lo, hi, work_tiles, state_m, state_l, state_o, lse, out,
    num_masks, num_queries, log2_scale, CONFIG: gl.constexpr,
):  # fmt: skip
    """Compute all work tiles.

    The arguments are those of `forward_narrow._forward_kernel`, but the head of a work tile is a key head. There is no state.
    """
    COLUMNS: gl.constexpr = CONFIG.columns
    QUERIES: gl.constexpr = ROWS // CONFIG.heads_per_row
    LAST_GROUP: gl.constexpr = (ROWS - QUERIES) // GROUP_ROWS
    GROUPS: gl.constexpr = CONFIG.stages * CONFIG.keys // GROUP_ROWS
    EMPTY_GROUPS: gl.constexpr = LAST_GROUP + (KEYS + CONFIG.tail_keys) // GROUP_ROWS - GROUPS
    MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_ROWS, CONFIG.dim], q.dtype)
    Q_MATRIX: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, CONFIG.dim], q.dtype)
    queries = gl.allocate_shared_memory(q.dtype, [2, ROWS, CONFIG.dim], Q_MATRIX)
    keys = gl.allocate_shared_memory(k.dtype, [GROUPS + EMPTY_GROUPS, GROUP_ROWS, CONFIG.dim], MATRIX)
    values = gl.allocate_shared_memory(v.dtype, [GROUPS + EMPTY_GROUPS, GROUP_ROWS, CONFIG.dim], MATRIX)
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    for i in gl.static_range(EMPTY_GROUPS):  # Uninitialised values of masked keys could add NaN to the output.
        values.index(GROUPS + i).store(gl.full([GROUP_ROWS, CONFIG.dim], 0.0, gl.float32, BY_ROW).to(v.dtype))
    full = allocate_barrier(4, 1)
    fence_async_shared()
    hopper_common.thread_barrier()
    k_full, v_full = full.index(2), full.index(3)
    results = state_m, state_l, state_o, state_tiles, lse, out, out_tiles, num_queries
    index, count, phase = gl.program_id(0), gl.to_tensor(0), gl.to_tensor(0)
    tile = load_work_tile(work_tiles, index)
    rows = _rows_of(tile, gl.to_tensor(0), CONFIG)
    bounds = _load_bounds(lo, hi, rows, num_masks, num_queries, CONFIG)
    _load_queries(q, rows, queries, full, 0)
    _load_keys(k, tile, keys, k_full, CONFIG)
    _load_keys(v, tile, values, v_full, CONFIG)
    while tile[3] > 0:
        index += gl.num_programs(0)
        next_tile = load_work_tile(work_tiles, index)
        products = (tile[3] - tile[2] + QUERIES - 1) // QUERIES * (CONFIG.group // CONFIG.heads_per_row)
        mbarrier.wait(k_full, phase)
        for product in range(products):
            batch, head, first, end, begin = rows
            row_lo, row_hi, first_lo, first_hi, last_lo = bounds
            slot = count & 1
            group = gl.minimum(gl.maximum(first_lo - begin, 0) // GROUP_ROWS, LAST_GROUP)
            start = begin + group * GROUP_ROWS
            mbarrier.wait(full.index(slot), count // 2 & 1)
            query = column_parts.split_tile(queries.index(slot), COLUMNS)
            key_tiles = _tiles(keys, group, CONFIG)
            scores = column_parts.multiply_rows(query, key_tiles[0], COLUMNS)
            tail = column_parts.multiply_rows(query, key_tiles[1], COLUMNS)
            scores, tail = warpgroup_mma_wait(0, deps=(scores, tail))
            hopper_common.tma_store_wait(0)
            hopper_common.thread_barrier()  # All warps have read K, and TMA has read the previous output.
            if product == products - 1:
                rows = _rows_of(next_tile, gl.to_tensor(0), CONFIG)
                _load_keys(k, next_tile, keys, k_full, CONFIG)
            else:
                rows = _rows_of(tile, product + 1, CONFIG)
            _load_queries(q, rows, queries, full, slot ^ 1)
            bounds = _load_bounds(lo, hi, rows, num_masks, num_queries, CONFIG)
            if (last_lo <= start + QUERIES) & (first_hi >= start + KEYS):
                scores = softmax.mask_edge(scores, row_lo, start, QUERIES, True)
                tail = softmax.mask_edge(tail, row_hi, start + KEYS, CONFIG.tail_keys, False)
            else:
                scores = softmax.mask_scores(scores, row_lo, row_hi, start)
                tail = softmax.mask_scores(tail, row_lo, row_hi, start + KEYS)
            TAIL_ROWS: gl.constexpr = gl.SliceLayout(1, tail.type.layout)
            tail_max = gl.convert_layout(gl.max(tail, axis=1), row_lo.type.layout)
            ref_max = gl.maximum(gl.maximum(gl.max(scores, axis=1), tail_max) * log2_scale, softmax.UNSET_REF_MAX)
            p = gl.exp2(scores * log2_scale - ref_max[:, None])
            tail_p = gl.exp2(tail * log2_scale - gl.convert_layout(ref_max, TAIL_ROWS)[:, None])
            l = gl.sum(p, axis=1) + gl.convert_layout(gl.sum(tail_p, axis=1), row_lo.type.layout)
            if product == 0:
                mbarrier.wait(v_full, phase)
            value_tiles = _tiles(values, group, CONFIG)
            o = column_parts.zero_parts(COLUMNS)
            o = column_parts.add_product(gl.convert_layout(p.to(q.dtype), CONFIG.p_layout), value_tiles[0], o, COLUMNS)
            o = column_parts.add_product(gl.convert_layout(tail_p.to(q.dtype), CONFIG.p_layout), value_tiles[1], o, COLUMNS)
            o = column_parts.join_parts(column_parts.wait_for_parts(o, 0, column_parts.num_parts(COLUMNS)), COLUMNS)
            row_range = batch, head, first, end
            finish_work_tile(ref_max, l, o, queries.index(slot), None, None, results, row_range, 0, True, CONFIG)
            if product == products - 1:
                hopper_common.thread_barrier()  # All warps have read V.
                _load_keys(v, next_tile, values, v_full, CONFIG)
            count += 1
        tile, phase = next_tile, phase ^ 1
    hopper_common.tma_store_wait(0)
