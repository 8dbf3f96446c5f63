"""The softmax of the Hopper forward: from one tile of scores to probabilities, in the registers of a consumer.

p = exp2(score - ref_max), with the score and the reference max in log2 units. Softmax gives the same result for any number that
is subtracted from all scores of a row. FlashAttention subtracts the running maximum, so that exp2 never overflows. This kernel
subtracts an optimistic reference max instead:

- It is the m of the incoming state. If that state is empty, it is the maximum of the first tile in which the row sees a key.
- It then stays, so that no later step has to compute maxima or rescale l and o. fp32 and bf16 represent a probability of 2**40
  as precisely as a probability of 1.
- If later scores exceed it by so much that l, the sum of p, reaches OVERFLOW_LIMIT, the row has overflowed and its result is
  invalid. The program then repeats all its work tiles in a retry pass.
- In the retry pass, and always in fp16, `update_ref_max` raises the reference max to the running maximum, from the first tile
  on. To rescale rarely, it does so only once the maximum is more than RESCALE_THRESHOLD ahead.

A wgmma accumulator spreads every row over the four threads of a quad. Sums and maxima are kept per thread, as tensors (64, 4),
until they are needed per row. That saves an exchange between threads in every step.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringattn.kernels.hopper.common import ROWS

# The reference max of a row that has not seen a key: the most negative fp32 number. It is finite, so that
# exp2(-inf - UNSET_REF_MAX) is 0. With -inf, it would be NaN.
UNSET_REF_MAX = gl.constexpr(-3.4028234663852886e38)

# A row overflows if its l reaches this limit. Below it, o fits fp32 for values up to 2**79.
OVERFLOW_LIMIT = gl.constexpr(2.0**48)

# The number of log2 units by which the maximum of a row may exceed a reference max before that is raised. Up to 2**8,
# probabilities are precise in fp16, too.
RESCALE_THRESHOLD = gl.constexpr(8.0)


@gluon.jit
def by_thread(tile, COLUMNS: gl.constexpr):
    """Reshape an accumulator (64, COLUMNS) to (64, COLUMNS // 8, 4, 2), with the four threads of a row in the third dimension.

    Reductions over the second and the fourth dimension give one number (64, 4) per row and thread, and need no exchange between
    threads.
    """
    return tile.reshape([ROWS, COLUMNS // 8, 4, 2])


@gluon.jit
def _along_row(numbers, tile):
    """Convert numbers (64, 4) per row and thread so that they can be broadcast over a tile from `by_thread`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, tile.type.layout))
    return gl.convert_layout(numbers, LAYOUT).expand_dims(1).expand_dims(3)


@gluon.jit
def _bits_below(bound, tile):
    """Return a word (64, 4) per row and thread whose bit i is 1 if the thread's i-th column of the row lies below the bound.

    Args:
        bound: (64,), counted from the first column of the tile.
        tile: from `by_thread`. A thread has up to 32 columns of a row.
    """
    NUMBERS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, tile.type.layout))
    # A thread has two neighbouring columns of every eight, the first thread of a quad columns 0 and 1, the second 2 and 3.
    first = 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, NUMBERS)).expand_dims(0)
    distance = gl.maximum(gl.convert_layout(bound, gl.SliceLayout(1, NUMBERS)).expand_dims(1) - first, 0)
    count = gl.minimum(2 * (distance // 8) + gl.minimum(distance % 8, 2), 32)
    # Shift in 64 bits, because a shift of a 32-bit word by 32 is undefined.
    return ((gl.full_like(count, 1).to(gl.int64) << count) - 1).to(gl.int32)


@gluon.jit
def _index_in_thread(tile):
    """Return (1, COLUMNS // 8, 1, 2): for every column of a tile, its index among the columns of its row in the same thread."""
    LAYOUT: gl.constexpr = tile.type.layout
    pair = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    column = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    return 2 * pair.expand_dims(0).expand_dims(2).expand_dims(3) + column.expand_dims(0).expand_dims(1).expand_dims(2)


@gluon.jit
def mask_scores(scores, lo, hi, start, CONFIG: gl.constexpr):
    """Replace the scores outside the intervals by -inf.

    Args:
        scores: (64, keys) of one tile.
        lo, hi: (64,), the interval [lo, hi) of keys that each row may attend to.
        start: the first key of the tile.

    A thread computes one word of bits per row and tests one bit per score, which takes two instructions. Comparisons of every
    column with both bounds would take four.
    """
    KEYS: gl.constexpr = CONFIG.keys
    SCORES: gl.constexpr = CONFIG.scores_layout
    tile = by_thread(scores, KEYS)
    seen = _bits_below(hi - start, tile) & ~_bits_below(lo - start, tile)
    seen = (seen.expand_dims(1).expand_dims(3) >> _index_in_thread(tile)) & 1
    return gl.convert_layout(gl.where(seen != 0, tile, float("-inf")).reshape([ROWS, KEYS]), SCORES)


@gluon.constexpr_function
def _rescale_assembly(count):
    # A thread has two rows. Of every four consecutive registers of its accumulator, the first two belong to one row and the
    # last two to the other row.
    alphas = [f"${2 * count + i % 4 // 2 * 2}" for i in range(count)]
    products = "".join(f"mul.f32 ${i}, ${i}, {alpha};" for i, alpha in enumerate(alphas))
    # 0f3F800000 is 1.0. The warp votes and jumps over the products if no thread has an alpha other than 1.
    return (
        "{ .reg .pred changed;"
        f"setp.neu.f32 changed, {alphas[0]}, 0f3F800000; setp.neu.or.f32 changed, {alphas[2]}, 0f3F800000, changed;"
        f"vote.sync.any.pred changed, changed, -1; @!changed bra DONE; {products} DONE: }}"
    )


@gluon.constexpr_function
def _rescale_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescale(o, alpha, CONFIG: gl.constexpr):
    """Multiply o (64, dim) by alpha (64, 4) per row. A warp whose alphas are all 1, as in most steps, skips the products."""
    # The number of registers of o in a thread: a warpgroup of 128 threads holds 64 rows.
    COUNT: gl.constexpr = CONFIG.dim // 2
    ASSEMBLY: gl.constexpr = _rescale_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = _rescale_constraints(COUNT)
    tile = by_thread(o, CONFIG.dim)
    factors = _along_row(alpha, tile) + gl.zeros_like(tile)
    tile = gl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, [tile, factors], dtype=gl.float32, is_pure=True, pack=COUNT)
    return gl.convert_layout(tile.reshape([ROWS, CONFIG.dim]), CONFIG.output_layout)


@gluon.constexpr_function
def _raise_assembly():
    # A thread has two rows. Operands: $0 and $1 are the new reference maxima, $2 and $3 the maxima of the thread's scores, $4
    # and $5 the reference maxima, $6 and $7 the thresholds.
    exchange, choose = "", ""
    for row in ("0", "1"):
        # Two butterfly shuffles give all four threads of a row its maximum.
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
    """Return ref_max (64, 4), raised to the maximum of the row where that is ahead by more than RESCALE_THRESHOLD.

    `thread_max` (64, 4) holds the maxima of the scores in each thread. A warp in which no thread is ahead skips the exchange
    between threads.
    """
    ASSEMBLY: gl.constexpr = _raise_assembly()
    operands = [thread_max, ref_max, ref_max + RESCALE_THRESHOLD]
    return gl.inline_asm_elementwise(ASSEMBLY, "=&f,=&f,f,f,f,f,f,f", operands, dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def initialise_ref_max(scores, ref_max, log2_scale, CONFIG: gl.constexpr):
    """Return ref_max (64, 4), with the maximum of this tile's scores for the rows whose reference max is still unset.

    All four threads of a row get the same number. A row that sees no key of the tile stays unset.
    """
    row_max = gl.max(gl.max(gl.max(by_thread(scores, CONFIG.keys), axis=3), axis=1), axis=1) * log2_scale
    return gl.where(ref_max == UNSET_REF_MAX, gl.maximum(row_max, UNSET_REF_MAX).expand_dims(1), ref_max)


@gluon.jit
def update_ref_max(scores, ref_max, log2_scale, CONFIG: gl.constexpr):
    """Return (ref_max, alpha) after the scores of this tile, both (64, 4).

    The reference max is raised where the maximum of a row is ahead by more than RESCALE_THRESHOLD. The l and o of earlier tiles
    must be multiplied by alpha, which is 1 where the reference max stays.
    """
    raised = _raise_ref_max(ref_max, gl.max(gl.max(by_thread(scores, CONFIG.keys), axis=3), axis=1) * log2_scale)
    return raised, gl.exp2(ref_max - raised)


@gluon.jit
def exp_scores(scores, ref_max, l, log2_scale, CONFIG: gl.constexpr):
    """Return (p, l): the probabilities p = exp2(score - ref_max), and l (64, 4) with the sums of p added."""
    tile = by_thread(scores, CONFIG.keys)
    p = gl.exp2(tile * log2_scale - _along_row(ref_max, tile))
    return gl.convert_layout(p.reshape([ROWS, CONFIG.keys]), CONFIG.scores_layout), l + gl.sum(gl.sum(p, axis=3), axis=1)


@gluon.jit
def fence_softmax(l, CONFIG: gl.constexpr):
    """Return l, and make sure that the assembler starts nothing that follows before l is computed.

    The instruction that waits for a wgmma has no operands. Without this fence, ptxas moves the wait for P V up in front of the
    softmax, which then no longer overlaps with P V. ptxas moves no wait across a possible exit of the thread, so this fence
    exits if l is one particular NaN. No sum of probabilities is that NaN.
    """
    if CONFIG.fence_softmax:
        l = gl.inline_asm_elementwise(
            "{ .reg .pred never; setp.eq.u32 never, $1, 0x7fc0dead; @never exit; mov.b32 $0, $1; }",
            "=f,f", [l], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return l
