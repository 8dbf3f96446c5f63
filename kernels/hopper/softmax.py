"""The softmax of the Hopper forward: a consumer's scores of one tile to probabilities, in registers.

p = exp2(score - origin), in log2 units. A row's origin is the m of the state that it is added to or, if that has seen nothing,
its maximum over the first tile in which it sees a key. There it stays, so that no step has to look for maxima, nor to rescale
what there is: in bf16 and fp32 a probability is as precise at 2**40 as at 1. Only where later scores are so far ahead that l,
the sum of p, reaches LIMIT, has the row failed. Then the origin must `follow` the maximum, from the first tile on: as in every
other kernel, but not before it is SLACK behind.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringattn.kernels.hopper.common import ROWS

UNSET = gl.constexpr(-3.4028234663852886e38)  # the origin of a row that has seen nothing: exp2(-inf - UNSET) is 0
LIMIT = gl.constexpr(2.0**48)  # of l, if the origin stays: values may be up to 2**79 then
SLACK = gl.constexpr(8.0)  # by which an origin that follows may be behind: in fp16 probabilities are then precise


@gluon.jit
def by_thread(tile, COLUMNS: gl.constexpr):
    """An accumulator (64, COLUMNS) as (64, COLUMNS // 8, 4, 2), whose third dimension is the four threads that share a row.

    Sums and maxima over the others are numbers (64, 4) of each thread alone: no exchange between threads.
    """
    return tile.reshape([ROWS, COLUMNS // 8, 4, 2])


@gluon.jit
def _along_row(numbers, tile):
    """Numbers (64, 4) of rows and threads, to be broadcast over a tile from `by_thread`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, tile.type.layout))
    return gl.convert_layout(numbers, LAYOUT).expand_dims(1).expand_dims(3)


@gluon.jit
def _below(bound, tile):
    """Which of its columns of a row, of up to 32, a thread has below a bound, counted from the tile's first: bits (64, 4)."""
    NUMBERS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, tile.type.layout))
    first = 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, NUMBERS)).expand_dims(0)
    distance = gl.maximum(gl.convert_layout(bound, gl.SliceLayout(1, NUMBERS)).expand_dims(1) - first, 0)
    count = gl.minimum(2 * (distance // 8) + gl.minimum(distance % 8, 2), 32)
    return ((gl.full_like(count, 1).to(gl.int64) << count) - 1).to(gl.int32)


@gluon.jit
def _place_in_row(tile):
    """Which of a thread's columns of a row each column is: (1, COLUMNS // 8, 1, 2)."""
    LAYOUT: gl.constexpr = tile.type.layout
    pair = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))))
    column = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))))
    return 2 * pair.expand_dims(0).expand_dims(2).expand_dims(3) + column.expand_dims(0).expand_dims(1).expand_dims(2)


@gluon.jit
def mask(scores, lo, hi, start, CONFIG: gl.constexpr):
    """Scores of a tile where the rows see its keys, -inf elsewhere.

    A thread looks its columns up in a word of bits a row: two instructions a score, and not the four of comparisons.
    """
    KEYS: gl.constexpr = CONFIG.keys
    SCORES: gl.constexpr = CONFIG.scores
    tile = by_thread(scores, KEYS)
    seen = _below(hi - start, tile) & ~_below(lo - start, tile)
    seen = (seen.expand_dims(1).expand_dims(3) >> _place_in_row(tile)) & 1
    return gl.convert_layout(gl.where(seen != 0, tile, float("-inf")).reshape([ROWS, KEYS]), SCORES)


@gluon.constexpr_function
def _rescale_assembly(count):
    # of four consecutive registers of an accumulator two belong to one row and two to another, all the way
    alphas = [f"${2 * count + i % 4 // 2 * 2}" for i in range(count)]
    products = "".join(f"mul.f32 ${i}, ${i}, {alpha};" for i, alpha in enumerate(alphas))
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
    """o * alpha by row, which a warp skips if all its alphas are 1: they mostly are."""
    COUNT: gl.constexpr = CONFIG.dim // 2  # registers of a thread
    ASSEMBLY: gl.constexpr = _rescale_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = _rescale_constraints(COUNT)
    tile = by_thread(o, CONFIG.dim)
    factors = _along_row(alpha, tile) + gl.zeros_like(tile)
    tile = gl.inline_asm_elementwise(ASSEMBLY, CONSTRAINTS, [tile, factors], dtype=gl.float32, is_pure=True, pack=COUNT)
    return gl.convert_layout(tile.reshape([ROWS, CONFIG.dim]), CONFIG.output)


@gluon.constexpr_function
def _move_assembly():
    # two rows a thread: $0, $1 the new origins; $2, $3 the tops, $4, $5 the origins, $6, $7 the limits
    exchange, choose = "", ""
    for row in ("0", "1"):
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
def _move(origin, top):
    """The origin, or the largest top of a row's threads where that is ahead of it by more than SLACK.

    A warp that has no such row passes by the exchange between threads.
    """
    ASSEMBLY: gl.constexpr = _move_assembly()
    operands = [top, origin, origin + SLACK]
    return gl.inline_asm_elementwise(ASSEMBLY, "=&f,=&f,f,f,f,f,f,f", operands, dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def settle(scores, origin, log2_scale, CONFIG: gl.constexpr):
    """The origin, or the maximum of a tile's scores for rows that had none: in log2 units, the same for a row's threads."""
    top = gl.max(gl.max(gl.max(by_thread(scores, CONFIG.keys), axis=3), axis=1), axis=1) * log2_scale
    return gl.where(origin == UNSET, gl.maximum(top, UNSET).expand_dims(1), origin)


@gluon.jit
def follow(scores, origin, log2_scale, CONFIG: gl.constexpr):
    """(origin, alpha) where the origin follows the maximum of a row when that is ahead by more than SLACK: else alpha is 1."""
    moved = _move(origin, gl.max(gl.max(by_thread(scores, CONFIG.keys), axis=3), axis=1) * log2_scale)
    return moved, gl.exp2(origin - moved)


@gluon.jit
def weigh(scores, origin, l, log2_scale, CONFIG: gl.constexpr):
    """(p, l): p = exp2(score - origin) in log2 units, and l (64, 4), by row and thread, with its sum added."""
    tile = by_thread(scores, CONFIG.keys)
    p = gl.exp2(tile * log2_scale - _along_row(origin, tile))
    return gl.convert_layout(p.reshape([ROWS, CONFIG.keys]), CONFIG.scores), l + gl.sum(gl.sum(p, axis=3), axis=1)


@gluon.jit
def hold(l, CONFIG: gl.constexpr):
    """`l`, but nothing that follows is started before it is there.

    The assembler moves waits for tensor cores up past the arithmetic that they should overlap with; past a thread's possible
    end it may not. No sum of probabilities is this NaN.
    """
    if CONFIG.hold:
        l = gl.inline_asm_elementwise(
            "{ .reg .pred never; setp.eq.u32 never, $1, 0x7fc0dead; @never exit; mov.b32 $0, $1; }",
            "=f,f", [l], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return l
