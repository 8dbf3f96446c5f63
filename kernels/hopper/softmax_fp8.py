"""The softmax of the Hopper forward with FP8 inputs: the reference max, and the rounding of probabilities to e4m3.

`ringattn.kernels.hopper.softmax` explains the reference max, and why sums and maxima are kept per thread. e4m3 represents
numbers from 2^-9 to 448, so an optimistic reference max would overflow soon. This softmax therefore computes the maximum of
every row in every step, and raises the reference max if the maximum exceeds it by more than SLACK. The kernel computes p =
exp2(score - ref_max + TOP), so that most probabilities are in the range in which e4m3 has four significant bits. p is at most
2^(TOP + SLACK).

Scores are in log2 units, and they contain the exponent of the scale of V.

Rounding. Instead of computing an exponential and rounding it, the kernel rounds the score. If x is the score relative to the
reference max, the byte of the e4m3 number next to 2^x is about 8 x + 56, because e4m3 has 3 bits of mantissa and the exponent
bias 7:

    byte(x) = round(8 x + 56 - 0.46)

Between two powers of two, this formula replaces the exponential by a straight line in the byte, so some scores near the limit
between two bytes are rounded to the other byte. The error of a probability is at most 8%, and 3.0% in the root mean square.
Rounding to nearest has 6.25% and 2.5%. The constant 0.46 makes the mean of the errors 0. The formula needs no exponential. The
unit for exponentials (MUFU) would limit the speed.

Below 2^-6, e4m3 has subnormal numbers, in which the byte is p times 2^9. In this range, a second line falls from 8 at x = -6 to
0 at x = -9. Without this line, the small probabilities of a row with one large score would vanish:

    byte(x) = max(round(8 x + 56 - 0.46), round((8 x + 72 - 0.46) / 3))

Both lines are computed from t = (8 x + 72 - 0.46) / 142, which fp32 computes and clamps to [0, 1]. t = 1 is the byte 126, the
largest number, 448. The lines 142 t - 16 and 142 t / 3 are computed in fp16, two scores per instruction. The sum of 1024 and a
number is an integer in fp16, whose lowest byte is the result.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringattn.kernels.hopper import softmax
from ringattn.kernels.hopper.common import ROWS

# log2 of the largest probability after the reference max was raised.
TOP = gl.constexpr(7.0)

# The maximum of a row may exceed the reference max by this number of log2 units before the reference max is raised.
SLACK = gl.constexpr(1.5)

# The number of bytes per log2 unit, and the constant of the formula that makes the mean of the rounding errors 0.
BYTES = gl.constexpr(8.0)
BIAS = gl.constexpr(-0.46)

# The bytes of 2^0 and of 2^-9, where the second line is 0, if the first line is continued there. t covers this range up to 126.
ONE_BYTE = gl.constexpr(56.0)
LOWEST_BYTE = gl.constexpr(-16.0)
RANGE = gl.constexpr(142.0)


@gluon.jit
def raise_ref_max(scores, ref_max, factors, v_exponent, CONFIG: gl.constexpr):
    """Raise the reference max (64, 4) if necessary. Return (ref_max, alpha).

    Args:
        scores: (64, keys), the products q k^T. Scores that are masked are -inf.
        ref_max: (64, 4), the same number in all four threads of a row.
        factors: (64, 4), positive. They convert the products to log2 units.
        v_exponent: the exponent of the scale of V.

    The caller must multiply l and o by alpha (64, 4). If the reference max of a row does not change, its alpha is 1.
    """
    ASSEMBLY: gl.constexpr = softmax.raise_assembly()
    row_max = gl.max(gl.max(softmax.by_thread(scores, CONFIG.keys), axis=3), axis=1) * factors + v_exponent
    operands = [row_max, ref_max, ref_max + SLACK]
    raised = gl.inline_asm_elementwise(ASSEMBLY, "=&f,=&f,f,f,f,f,f,f", operands, dtype=gl.float32, is_pure=True, pack=2)
    return raised, gl.exp2(ref_max - raised)


@gluon.constexpr_function
def _rounding_assembly():
    """Return the instructions that round four probabilities of a row.

    $2 to $5 are the scores. $6 and $7 are the factor and the offset of the row with which a score becomes t. The results are
    the lowest bytes of the 16-bit halves of $0 and $1.
    """
    code = "{ .reg .f32 t<4>; .reg .b32 upper, lower, slope, offset, third, zero;"
    for i in range(4):
        code += f"fma.rn.sat.f32 t{i}, ${i + 2}, $6, $7;"
    # Each word holds two fp16 numbers: 142, 1008 = 1024 - 16, 142 / 3 and 1024.
    code += "mov.b32 slope, 0x58705870; mov.b32 offset, 0x63E063E0; mov.b32 third, 0x51EB51EB; mov.b32 zero, 0x64006400;"
    for i in range(2):
        code += f"cvt.rn.f16x2.f32 lower, t{2 * i + 1}, t{2 * i};"
        code += "fma.rn.f16x2 upper, lower, slope, offset; fma.rn.f16x2 lower, lower, third, zero;"
        code += f"max.f16x2 ${i}, upper, lower;"
    return code + "}"


@gluon.jit
def round_probabilities(scores, ref_max, factors, v_exponent, CONFIG: gl.constexpr):
    """Round the probabilities to e4m3. Return two tensors int32 (64, keys // 16, 4), which `pack` combines.

    The keys are permuted as in a tile of values, see `ringattn.kernels.fp8`. No number moves to another thread. The arguments
    are those of `raise_ref_max`.
    """
    ASSEMBLY: gl.constexpr = _rounding_assembly()
    LEFT: gl.constexpr = CONFIG.p_layout
    KEYS: gl.constexpr = CONFIG.keys
    # In a group of 32 keys, the dimensions are h, b // 2, t and b % 2. The order of a tile of values is h, t, b // 2 and b % 2.
    tile = scores.reshape([ROWS, KEYS // 32, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5)).reshape([ROWS, KEYS])
    # In this layout, a thread has four consecutive keys.
    tile = gl.convert_layout(tile, LEFT).reshape([ROWS, KEYS // 16, 4, 2, 2])
    even, odd = gl.split(tile)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    NUMBERS: gl.constexpr = gl.SliceLayout(1, first.type.layout)
    slope = factors * (BYTES / RANGE)
    offset = (TOP + v_exponent - ref_max) * (BYTES / RANGE) + (ONE_BYTE - LOWEST_BYTE + BIAS) / RANGE
    zeros = gl.zeros_like(first)
    slope = gl.convert_layout(slope, NUMBERS).expand_dims(1) + zeros
    offset = gl.convert_layout(offset, NUMBERS).expand_dims(1) + zeros
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=&r,=&r,f,f,f,f,f,f", [first, second, third, fourth, slope, offset],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def pack(rounded):
    """Combine the results of `round_probabilities`. Return int32 (64, keys // 16, 4), four e4m3 numbers per word.

    A product P V reads these words from registers. While it runs, the words of the next step must not be defined, or else the
    assembler would serialise all products. Therefore pack the words only after the product.
    """
    left, right = rounded
    code: gl.constexpr = "prmt.b32 $0, $1, $2, 0x6420;"
    return gl.inline_asm_elementwise(code, "=r,r,r", [left, right], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_left_operand(words, CONFIG: gl.constexpr):
    """View words of `pack` as the left operand (64, keys) of P V, without any instruction.

    Between two steps, the loop keeps the words. If it kept the e4m3 tensor, the compiler would use a register per number.
    """
    LEFT: gl.constexpr = CONFIG.p_layout
    even = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    odd = gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8))
    p = gl.join(even, odd).reshape([ROWS, CONFIG.keys]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(p, LEFT)


@gluon.jit
def _or(a, b):
    return a | b


@gluon.jit
def fence_softmax(alpha, rounded):
    """Return alpha unchanged, and prevent the assembler from moving a wait in front of the computation of `rounded`.

    `ringattn.kernels.hopper.softmax.fence_softmax` explains the fence. The byte of a probability is at most 126, and the upper
    byte of its 16 bits is at most 0x64, so no result is the number for which a thread exits.
    """
    left, right = rounded
    word = gl.convert_layout(gl.reduce(left | right, 1, _or), alpha.type.layout)
    return gl.inline_asm_elementwise(
        "{ .reg .pred never; setp.eq.u32 never, $1, 0x7fc0dead; setp.eq.or.u32 never, $2, 0xffffffff, never; @never exit;"
        "mov.b32 $0, $1; }",
        "=f,f,r", [alpha, word], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def plain_ref_max(ref_max):
    """Return the reference max relative to which p is exp2(score - ref_max), without TOP."""
    return gl.where(ref_max == softmax.UNSET_REF_MAX, ref_max, ref_max - TOP)
