"""For FP8 inputs, the softmax of the Hopper forward rounds probabilities to e4m3.

The largest e4m3 number is 448, so a row's reference max rises if a probability would exceed 448. With the offset TOP in p =
exp2(score - ref_max + TOP), e4m3 has four significant bits for most probabilities.

The GPU's unit for exponentials (MUFU) would limit the speed, so the kernel computes p without exponentials. An e4m3 number has
3 mantissa bits and the exponent bias 7. For x = score - ref_max + TOP, the byte of the e4m3 number nearest to 2^x is about:

    byte(x) = round(8 x + 56 - 0.46)

The formula interpolates 2^x linearly between neighbouring powers of two. The relative error of a probability is at most 8%,
with mean 0 and root mean square 3.0%. Exact rounding to e4m3 has relative errors of up to 6.25%, with root mean square 2.5%. If
a probability p is below 2^-6, it is subnormal in e4m3, and its byte is p * 2^9. The maximum of two linear functions
approximates normal and subnormal numbers:

    level(x) = max(round(8 x + 72 - 0.46), 0)
    byte(x) = max(level(x) - 16, round(level(x) / 3))

In fp16, the number n * 2^-24 has the bits of the integer n, for n up to 2048. Converting x * 2^-24 from fp32 to fp16 therefore
rounds x to an integer. One instruction converts two numbers to fp16, and replaces negative numbers by 0.

The first reference max is set in fp32, because levels relative to UNSET_REF_MAX would overflow fp16.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringattn.kernels.hopper import softmax
from ringattn.kernels.hopper.common import ROWS

TOP = gl.constexpr(7.0)

# If a score exceeds ref_max by SLACK log2 units, p is 2**8.5 = 362, which e4m3 still represents.
SLACK = gl.constexpr(1.5)

BYTES = gl.constexpr(8.0)
BIAS = gl.constexpr(-0.46)

# The levels (see above) of 1 and of the largest e4m3 number, 448.
ONE_LEVEL = gl.constexpr(72.0)
MAX_LEVEL = gl.constexpr(142)

# If a level exceeds MAX_LEVEL, the reference max rises so that the largest level of the row is TOP_LEVEL. TOP_LEVEL represents
# 1.75 * 2^6, where the rounding errors average to 0.
TOP_LEVEL = gl.constexpr(126)

UNIT = gl.constexpr(2.0**-24)


@gluon.jit
def raise_ref_max(scores, ref_max, factors, v_exponent, CONFIG: gl.constexpr):
    """Return (ref_max, alpha) like `softmax.update_ref_max`.

    The positive `factors` (64, 4) convert scores to log2 units.
    """
    ASSEMBLY: gl.constexpr = softmax.raise_assembly()
    row_max = gl.max(gl.max(softmax.by_thread(scores, CONFIG.keys), axis=3), axis=1) * factors + v_exponent
    operands = [row_max, ref_max, ref_max + SLACK]
    raised = gl.inline_asm_elementwise(ASSEMBLY, "=&f,=&f,f,f,f,f,f,f", operands, dtype=gl.float32, is_pure=True, pack=2)
    return raised, gl.exp2(ref_max - raised)


@gluon.constexpr_function
def _level_assembly():
    """Compute the levels s * $6 + $7 of four scores s. The scores are in $2 to $5, and the packed levels in $0 and $1."""
    code = "{ .reg .f32 t<4>;"
    for i in range(4):
        code += f"fma.rn.f32 t{i}, ${i + 2}, $6, $7;"
    for i in range(2):
        code += f"cvt.rn.relu.f16x2.f32 ${i}, t{2 * i + 1}, t{2 * i};"
    return code + "}"


@gluon.jit
def compute_levels(scores, ref_max, factors, v_exponent, CONFIG: gl.constexpr):
    """Return the levels as int32 (64, keys // 16, 4, 2), with two levels per word.

    The keys have the same order as in a tile of V (see `ringattn.kernels.fp8`). Threads therefore exchange no data.
    """
    ASSEMBLY: gl.constexpr = _level_assembly()
    LEFT: gl.constexpr = CONFIG.p_layout
    KEYS: gl.constexpr = CONFIG.keys
    # In each group of 32 keys, change the order (h, b // 2, t, b % 2) to (h, t, b // 2, b % 2).
    tile = scores.reshape([ROWS, KEYS // 32, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)).reshape([ROWS, KEYS])
    tile = gl.convert_layout(tile, LEFT).reshape([ROWS, KEYS // 16, 4, 2, 2])
    even, odd = gl.split(tile)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    NUMBERS: gl.constexpr = gl.SliceLayout(1, first.type.layout)
    slope = factors * (BYTES * UNIT)
    # UNSET_REF_MAX * BYTES would be infinite, so compute BYTES * UNIT first.
    offset = (TOP + v_exponent - ref_max) * (BYTES * UNIT) + (ONE_LEVEL + BIAS) * UNIT
    zeros = gl.zeros_like(first)
    slope = gl.convert_layout(slope, NUMBERS).expand_dims(1) + zeros
    offset = gl.convert_layout(offset, NUMBERS).expand_dims(1) + zeros
    left, right = gl.inline_asm_elementwise(
        ASSEMBLY, "=&r,=&r,f,f,f,f,f,f", [first, second, third, fourth, slope, offset],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(left, right)


@gluon.jit
def _larger_levels(a, b):
    return gl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _limit_assembly():
    """These PTX instructions raise the reference max of a thread's two rows.

    $0 and $1 are the new reference max, and $2 and $3 are alpha. $4 and $5 are added to the levels, and contain two equal fp16
    numbers each. $6 and $7 are the thread's largest levels, and $8 and $9 are the old reference max.
    """
    code = (
        "{ .reg .pred above; .reg .b32 low, high, other, top0, top1; .reg .b16 level, top; .reg .f32 change;"
        "mov.f32 $0, $8; mov.f32 $1, $9; mov.f32 $2, 0f3F800000; mov.f32 $3, 0f3F800000; mov.b32 $4, 0; mov.b32 $5, 0;"
        f"max.s16x2 other, $6, $7; cvt.s32.s16 low, other; shr.s32 high, other, 16; max.s32 low, low, high;"
        f"setp.gt.s32 above, low, {MAX_LEVEL.value}; vote.sync.any.pred above, above, -1; @!above bra DONE;"
        f"mov.b16 top, {TOP_LEVEL.value};"
    )
    for row in range(2):
        code += f"prmt.b32 other, ${6 + row}, 0, 0x1032; max.s16x2 top{row}, ${6 + row}, other;"
        for lane in (1, 2):
            code += f"shfl.sync.bfly.b32 other, top{row}, {lane}, 31, -1; max.s16x2 top{row}, top{row}, other;"
        # The factor 2^21 = 1 / (BYTES * UNIT) converts the change to log2 units.
        code += f"cvt.u16.u32 level, top{row}; setp.gt.s16 above, level, {MAX_LEVEL.value}; sub.rn.f16 level, top, level;"
        code += f"cvt.f32.f16 change, level; mul.f32 change, change, 0f4A000000; @above mov.b32 ${4 + row}, {{level, level}};"
        code += f"@above sub.f32 ${row}, ${8 + row}, change; @above ex2.approx.ftz.f32 ${2 + row}, change;"
    return code + "DONE: }"


@gluon.constexpr_function
def _shift_assembly(count):
    code = "{ .reg .pred changed; .reg .b32 any, one; mov.b32 any, 0; mov.b32 one, 0x3C003C00;"
    code += "".join(f"or.b32 any, any, ${2 * count + i};" for i in range(count))
    code += "setp.ne.b32 changed, any, 0; vote.sync.any.pred changed, changed, -1; @!changed bra DONE;"
    code += "".join(f"fma.rn.relu.f16x2 ${i}, ${i}, one, ${2 * count + i};" for i in range(count))
    return code + "DONE: }"


@gluon.jit
def limit_levels(levels, ref_max):
    LIMIT: gl.constexpr = _limit_assembly()
    COUNT: gl.constexpr = levels.shape[1] * 4
    SHIFT: gl.constexpr = _shift_assembly(COUNT)
    CONSTRAINTS: gl.constexpr = softmax.in_place_constraints(COUNT, "r")
    NUMBERS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, levels.type.layout))
    largest = gl.reduce(gl.reduce(levels, 3, _larger_levels), 1, _larger_levels)
    raised, alpha, addend = gl.inline_asm_elementwise(
        LIMIT, "=&f,=&f,=&f,=&f,=&r,=&r,r,r,f,f", [gl.convert_layout(largest, ref_max.type.layout), ref_max],
        dtype=(gl.float32, gl.float32, gl.int32), is_pure=True, pack=2,
    )  # fmt: skip
    addends = gl.convert_layout(addend, NUMBERS).expand_dims(1).expand_dims(3) + gl.zeros_like(levels)
    levels = gl.inline_asm_elementwise(SHIFT, CONSTRAINTS, [levels, addends], dtype=gl.int32, is_pure=True, pack=COUNT)
    return levels, raised, alpha


@gluon.constexpr_function
def _byte_assembly():
    # 0x3555 is 1/3 in fp16, and 0xFFF0 is the 16-bit integer -16.
    return (
        "{ .reg .b32 normal, third; mov.b32 third, 0x35553555; mov.b32 normal, 0xFFF0FFF0;"
        "mul.rn.f16x2 third, $1, third; add.s16x2 normal, $1, normal; max.s16x2 $0, normal, third; }"
    )


@gluon.jit
def to_bytes(levels):
    """Each 16-bit half of a result word contains one e4m3 byte."""
    ASSEMBLY: gl.constexpr = _byte_assembly()
    return gl.inline_asm_elementwise(ASSEMBLY, "=r,r", [levels], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def pack(rounded):
    """Return int32 (64, keys // 16, 4), with four e4m3 numbers per word.

    The previous product P V must be complete, because it reads the previous P from the same registers.
    """
    left, right = gl.split(rounded)
    code: gl.constexpr = "prmt.b32 $0, $1, $2, 0x6420;"
    return gl.inline_asm_elementwise(code, "=r,r,r", [left, right], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_left_operand(words, CONFIG: gl.constexpr):
    """View the result of `pack` as P (64, keys), the left operand of the product P @ V. A loop must carry the packed words,
    because the unpacked P needs four times as many registers.
    """
    LEFT: gl.constexpr = CONFIG.p_layout
    even = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    odd = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    p = gl.join(even, odd).reshape([ROWS, CONFIG.keys]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(p, LEFT)


@gluon.jit
def plain_ref_max(ref_max):
    return gl.where(ref_max == softmax.UNSET_REF_MAX, ref_max, ref_max - TOP)
