"""The softmax of the Hopper forward converts a tile of scores to probabilities in registers.

The probabilities are p = exp2(score - ref_max), with scores in log2 units. The page docs/hopper.md explains why a reference max
`ref_max` replaces the running maximum of each row.

In a wgmma accumulator, four threads hold the columns of each row. Each thread keeps its own sums and maxima, so l and ref_max
are tensors (64, 4).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringattn.kernels.hopper.common import ROWS, is_masked, step_start

# A row without keys has the reference max UNSET_REF_MAX, because -inf would make its probabilities NaN.
UNSET_REF_MAX = gl.constexpr(-3.4028234663852886e38)

# If l = sum(p) is below 2**48 and all |v| are at most 2**79, then o = sum(p * v) fits into fp32.
OVERFLOW_LIMIT = gl.constexpr(2.0**48)

# In fp16, probabilities up to 2**8 are precise, so ref_max may be 8 log2 units too small.
RESCALE_THRESHOLD = gl.constexpr(8.0)


@gluon.jit
def by_thread(tile, COLUMNS: gl.constexpr):
    return tile.reshape([ROWS, COLUMNS // 8, 4, 2])


@gluon.jit
def _along_row(numbers, tile):
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, tile.type.layout))
    return gl.convert_layout(numbers, LAYOUT).expand_dims(1).expand_dims(3)


@gluon.jit
def _bits_below(bound, tile):
    NUMBERS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, tile.type.layout))
    first = 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, NUMBERS)).expand_dims(0)
    distance = gl.maximum(gl.convert_layout(bound, gl.SliceLayout(1, NUMBERS)).expand_dims(1) - first, 0)
    count = gl.minimum(2 * (distance // 8) + gl.minimum(distance % 8, 2), 32)
    # Shifting a 32-bit word by 32 is undefined.
    return ((gl.full_like(count, 1).to(gl.int64) << count) - 1).to(gl.int32)


@gluon.jit
def _index_in_thread(tile):
    LAYOUT: gl.constexpr = tile.type.layout
    pair = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    column = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    return 2 * pair.expand_dims(0).expand_dims(2).expand_dims(3) + column.expand_dims(0).expand_dims(1).expand_dims(2)


@gluon.jit
def mask_scores(scores, lo, hi, start):
    """Replace scores (64, keys) outside [lo, hi) by -inf, where column 0 is key `start`."""
    KEYS: gl.constexpr = scores.shape[1]
    SCORES: gl.constexpr = scores.type.layout
    tile = by_thread(scores, KEYS)
    seen = _bits_below(hi - start, tile) & ~_bits_below(lo - start, tile)
    seen = (seen.expand_dims(1).expand_dims(3) >> _index_in_thread(tile)) & 1
    return gl.convert_layout(gl.where(seen != 0, tile, float("-inf")).reshape([ROWS, KEYS]), SCORES)


@gluon.jit
def mask_edge(scores, bound, start, COLUMNS: gl.constexpr, BELOW: gl.constexpr):
    """In the first COLUMNS columns, mask keys below `bound` if BELOW is set, and otherwise keys from `bound` on."""
    tile = by_thread(scores, scores.shape[1])
    NUMBERS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, tile.type.layout))
    first = start + 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, NUMBERS)).expand_dims(0)
    bound = gl.convert_layout(bound, gl.SliceLayout(1, NUMBERS)).expand_dims(1) - first
    index = _index_in_thread(tile)
    column = 4 * (index - index % 2) + index % 2
    hidden = (column < bound.expand_dims(1).expand_dims(3)) == BELOW
    return gl.convert_layout(
        gl.where(hidden & (column < COLUMNS), float("-inf"), tile).reshape(scores.shape), scores.type.layout
    )


@gluon.constexpr_function
def _rescale_assembly(count):
    # Of every four accumulator registers of a thread, the first two belong to one row and the last two to another.
    alphas = [f"${2 * count + i % 4 // 2 * 2}" for i in range(count)]
    products = "".join(f"mul.f32 ${i}, ${i}, {alpha};" for i, alpha in enumerate(alphas))
    return (
        "{ .reg .pred changed;"
        f"setp.neu.f32 changed, {alphas[0]}, 0f3F800000; setp.neu.or.f32 changed, {alphas[2]}, 0f3F800000, changed;"
        f"vote.sync.any.pred changed, changed, -1; @!changed bra DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def in_place_constraints(count, kind):
    return ",".join([f"={kind}"] * count + [str(i) for i in range(count)] + [kind] * count)


@gluon.jit
def rescale(o, alpha):
    """Multiply each row of o (64, columns) by its factor in alpha (64, 4). A warp skips the multiplication if all of its
    factors are 1.
    """
    COUNT: gl.constexpr = o.shape[1] // 2
    ASSEMBLY: gl.constexpr = _rescale_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = in_place_constraints(COUNT, "f")
    tile = by_thread(o, o.shape[1])
    factors = _along_row(alpha, tile) + gl.zeros_like(tile)
    tile = gl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, [tile, factors], dtype=gl.float32, is_pure=True, pack=COUNT)
    return gl.convert_layout(tile.reshape(o.shape), o.type.layout)


@gluon.jit
def rescale_parts(o, alpha, PARTS: gl.constexpr):
    rescaled = ()
    for part in gl.static_range(PARTS):
        rescaled = rescaled + (rescale(o[part], alpha),)
    return rescaled


@gluon.constexpr_function
def raise_assembly():
    # The outputs $0 and $1 are the new reference max of a thread's two rows. The inputs $2 and $3 are the largest scores, $4
    # and $5 the old reference max, and $6 and $7 the thresholds.
    exchange, choose = "", ""
    for row in ("0", "1"):
        # After two butterfly shuffles, all four threads of a row hold the maximum of the row.
        for lane in ("1", "2"):
            exchange += f"shfl.sync.bfly.b32 other, top{row}, {lane}, 31, -1; max.f32 top{row}, top{row}, other;"
    for new, top, old, limit in (("$0", "top0", "$4", "$6"), ("$1", "top1", "$5", "$7")):
        choose += f"setp.gt.f32 ahead, {top}, {limit}; selp.f32 {new}, {top}, {old}, ahead;"
    return (
        "{ .reg .pred ahead; .reg .f32 top0, top1, other;"
        "setp.gt.f32 ahead, $2, $6; setp.gt.or.f32 ahead, $3, $7, ahead; mov.f32 $0, $4; mov.f32 $1, $5;"
        "vote.sync.any.pred ahead, ahead, -1; @!ahead bra DONE;"
        f"mov.f32 top0, $2; mov.f32 top1, $3; {exchange} {choose} DONE: }}"
    )


@gluon.jit
def _raise_ref_max(ref_max, thread_max):
    ASSEMBLY: gl.constexpr = raise_assembly()
    operands = [thread_max, ref_max, ref_max + RESCALE_THRESHOLD]
    return gl.inline_asm_elementwise(ASSEMBLY, "=&f,=&f,f,f,f,f,f,f", operands, dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def initialise_ref_max(scores, ref_max, log2_scale, CONFIG: gl.constexpr):
    """Set each unset ref_max (64, 4) to the largest score of its row in this tile."""
    row_max = gl.max(gl.max(gl.max(by_thread(scores, CONFIG.keys), axis=3), axis=1), axis=1) * log2_scale
    return gl.where(ref_max == UNSET_REF_MAX, gl.maximum(row_max, UNSET_REF_MAX).expand_dims(1), ref_max)


@gluon.jit
def update_ref_max(scores, ref_max, log2_scale, CONFIG: gl.constexpr):
    """If a score exceeds ref_max by more than RESCALE_THRESHOLD, raise ref_max to the maximum of the row. Return (ref_max,
    alpha), both (64, 4).

    The caller must multiply l and o of earlier tiles by alpha.
    """
    raised = _raise_ref_max(ref_max, gl.max(gl.max(by_thread(scores, CONFIG.keys), axis=3), axis=1) * log2_scale)
    return raised, gl.exp2(ref_max - raised)


@gluon.jit
def exp_scores(scores, ref_max, l, log2_scale, CONFIG: gl.constexpr):
    tile = by_thread(scores, CONFIG.keys)
    p = gl.exp2(tile * log2_scale - _along_row(ref_max, tile))
    return gl.convert_layout(p.reshape([ROWS, CONFIG.keys]), CONFIG.scores_layout), l + gl.sum(gl.sum(p, axis=3), axis=1)


@gluon.jit
def first_probabilities(scores, row_bounds, loop, step, log2_scale, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr):
    """Return (probabilities (64, keys), ref_max, l) of the first tile of keys. The argument `row_bounds` is from
    `load_consumer_tile`.
    """
    lo, hi, _, ref_max = row_bounds
    if is_masked(loop, step):
        scores = mask_scores(scores, lo, hi, step_start(loop, step, CONFIG.keys))
    BY_THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, by_thread(scores, CONFIG.keys).type.layout))
    zero_sum = gl.zeros([ROWS, 4], gl.float32, BY_THREAD)
    ref_max = gl.convert_layout(ref_max, gl.SliceLayout(1, BY_THREAD)).expand_dims(1) + zero_sum
    if UPDATE_REF_MAX:
        ref_max, _ = update_ref_max(scores, ref_max, log2_scale, CONFIG)
    else:
        ref_max = initialise_ref_max(scores, ref_max, log2_scale, CONFIG)
    p, l = exp_scores(scores, ref_max, zero_sum, log2_scale, CONFIG)
    return p, ref_max, l


@gluon.jit
def probabilities(scores, ref_max, l, row_bounds, loop, step, log2_scale, UPDATE_REF_MAX: gl.constexpr, CONFIG: gl.constexpr):
    """Return (probabilities (64, keys), ref_max, l, alpha) of a later tile of keys. With UPDATE_REF_MAX, the caller must
    multiply o by alpha.
    """
    lo, hi, all_initialised, _ = row_bounds
    _, num_masked_prefix, num_unmasked, num_masked = loop
    alpha = ref_max
    if is_masked(loop, step):
        scores = mask_scores(scores, lo, hi, step_start(loop, step, CONFIG.keys))
    if UPDATE_REF_MAX:
        ref_max, alpha = update_ref_max(scores, ref_max, log2_scale, CONFIG)
        l *= alpha
    # In an unmasked tile, every row attends to a key, so every row has a reference max afterwards.
    elif (step <= gl.where(num_unmasked > 0, num_masked_prefix, num_masked)) & ~all_initialised:
        ref_max = initialise_ref_max(scores, ref_max, log2_scale, CONFIG)
    p, l = exp_scores(scores, ref_max, l, log2_scale, CONFIG)
    return p, ref_max, l, alpha


@gluon.jit
def combine_threads(numbers, CONFIG: gl.constexpr):
    return gl.convert_layout(gl.max(numbers, axis=1), gl.SliceLayout(1, CONFIG.scores_layout))


@gluon.jit
def fence_softmax(l, CONFIG: gl.constexpr):
    """Return l, and keep ptxas from moving later instructions in front of the computation of l.

    Without this fence, ptxas would move the wait for P V in front of the softmax. The assembler ptxas moves no wait across an
    instruction that may end the thread. The `exit` below never runs, because l is never the NaN 0x7fc0dead.
    """
    if CONFIG.fence_softmax:
        l = gl.inline_asm_elementwise(
            "{ .reg .pred never; setp.eq.u32 never, $1, 0x7fc0dead; @never exit; mov.b32 $0, $1; }",
            "=f,f", [l], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return l
