"""Launch the Hopper forward kernels, which compute `reference.forward`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ringattn.kernels import fp8
from ringattn.kernels.hopper import NARROW_DIM, forward_fp8, forward_narrow, forward_short, forward_wide
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.column_parts import used_columns
from ringattn.kernels.hopper.common import LOG2_E, ROWS, accumulator_layout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import State
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton.launcher import launch

# Heads are computed in groups whose K and V take at most L2_BYTES of the L2 cache.
L2_BYTES = 32 * 2**20
# On an H100, smaller groups of heads were faster with an incoming state or head dims above 128.
SMALL_L2_BYTES = 16 * 2**20

# With at most FEW_ROWS non-empty rows over all heads, work tiles of 128 instead of 192 rows keep more SMs busy.
FEW_ROWS = 2**16


@dataclass(frozen=True)
class ForwardConfig(hopper_common.KernelConfig):
    """The constants of all forward kernels.

    Args:
        has_state: whether the call continues from an incoming state.
        final: whether (out, lse) is written instead of a state.
        keys: the number of keys per step.
        stages: the number of stages of the K/V pipeline.
        registers: the number of registers per thread of a consumer.
        ping_pong: whether the consumers issue their products in turns.
        fence_softmax: whether to use `softmax.fence_softmax`.
        update_ref_max: whether the first pass updates the reference max in every step, so that there is no retry pass.
    """

    has_state: bool
    final: bool
    consumers: int
    keys: int
    stages: int
    registers: int
    ping_pong: bool
    fence_softmax: bool
    update_ref_max: bool

    q_slots: ClassVar[int] = 1  # buffers for Q in shared memory
    tails: ClassVar[int] = 0  # buffers for the last columns of K, see `forward_wide`
    state_stages: ClassVar[int] = 0  # buffers of K and V that hold o after the last step of a work tile
    stores_by_tma: ClassVar[bool] = False  # whether TMA stores the results
    loads_early: ClassVar[bool] = True  # whether COMPUTE loads the next work tile
    stages_per_step: ClassVar[int] = 1  # buffers of K and V that a consumer releases per step
    extra_steps: ClassVar[int] = 0  # additional ping-pong turns per work tile
    skips_steps: ClassVar[bool] = False  # whether consumers skip fully masked steps
    programs: ClassVar[int] = 1  # programs per SM
    heads_per_tile: ClassVar[int] = 1  # query heads of a work tile
    heads_per_row: ClassVar[int] = 1  # query heads that a consumer computes for each query
    max_registers: ClassVar[int | None] = None  # registers per thread at the start of a program; None: as many as possible

    @property
    def queries(self) -> int:
        return self.consumers * ROWS.value

    @property
    def partitions(self) -> gl.tuple:
        """Gluon iterates only over constants."""
        return gl.tuple([gl.constexpr(number) for number in range(self.consumers + 1)])

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        return accumulator_layout(self.keys)

    @property
    def updates_state(self) -> bool:
        return self.has_state and not self.final


@dataclass(frozen=True)
class NarrowConfig(ForwardConfig):
    """The constants of `forward_narrow`.

    Args:
        columns: the multiplied columns of a tile (64, 96 or 128).
        joint_release: whether K and V of a stage are released together.
    """

    columns: int
    joint_release: bool

    stores_by_tma: ClassVar[bool] = True
    skips_steps: ClassVar[bool] = True

    @property
    def q_in_registers(self) -> bool:
        """With 64 keys per step, reading Q from shared memory limits the speed of S = Q K^T. At 128 columns, Q does not fit
        into the registers.
        """
        return self.columns == 96

    @property
    def heads_per_tile(self) -> int:
        """`forward_short` has one consumer, and TILES_MEDIUM has four."""
        return {1: self.group, 4: 4}.get(self.consumers, 1)

    @property
    def queries(self) -> int:
        return ROWS.value if self.heads_per_tile > 1 else self.consumers * ROWS.value

    @property
    def max_registers(self) -> int | None:
        return {1: self.registers, 4: 96}.get(self.consumers)

    @property
    def q_slots(self) -> int:
        """Shared memory has at most two buffers for Q, because one bit selects the buffer."""
        return 2 if self.final else 1

    @property
    def o_parts(self) -> int:
        return 2 * ROWS.value // self.keys

    @property
    def state_stages(self) -> int:
        return -(-self.consumers * self.o_parts // 2) if self.has_state or not self.final else 0


@dataclass(frozen=True)
class ShortConfig(NarrowConfig):
    """The constants of `forward_short`.

    Args:
        packed_heads: a product has packed_heads query heads and 64 / packed_heads queries.
        keys, stages: TMA loads K and V of a work tile in `stages` copies of `keys` rows.
    """

    packed_heads: int

    programs: ClassVar[int] = 3

    @property
    def heads_per_row(self) -> int:
        return self.packed_heads

    @property
    def tail_keys(self) -> int:
        return TAIL_KEYS[self.packed_heads]

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        return accumulator_layout(128)


@dataclass(frozen=True)
class WideConfig(ForwardConfig):
    """The constants of `forward_wide`.

    Args:
        dim: the number of columns of a stage and of o, 128 or 256, to which Dv is padded.
        key_dim: the number of columns of Q and K, 192 or 256, to which D is padded.
        overlap: whether the softmax of a step overlaps with P V of the previous step.
    """

    key_dim: int
    overlap: bool

    stages_per_step: ClassVar[int] = 2

    @property
    def skips_steps(self) -> bool:
        return not self.overlap

    @property
    def tail(self) -> int:
        return self.key_dim - self.dim

    @property
    def tails(self) -> int:
        """Return the largest number of K tiles that shared memory holds at the same time."""
        return (self.stages + self.overlap + 1) // 2

    @property
    def q_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(operand_index=0, parent=self.scores_layout, k_width=2)


@dataclass(frozen=True)
class Fp8Config(ForwardConfig):
    """The constants of `forward_fp8`.

    Args:
        part_columns: the number of columns of one product P V.
        overlap: whether the softmax of a step overlaps with P V of the previous step, so that O has one part.
        stages: the number of stages, each with a tile of K and a tile of V.
    """

    part_columns: int
    overlap: bool

    extra_steps: ClassVar[int] = 1
    loads_early: ClassVar[bool] = False

    @property
    def num_parts(self) -> int:
        return self.dim // self.part_columns

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        return accumulator_layout(self.keys, 8)

    @property
    def output_layout(self) -> gl.NVMMADistributedLayout:
        return accumulator_layout(self.dim, 8)

    @property
    def part_layout(self) -> gl.NVMMADistributedLayout:
        return accumulator_layout(self.part_columns, 8)

    @property
    def p_layout(self) -> gl.DotOperandLayout:
        return gl.DotOperandLayout(operand_index=0, parent=self.part_layout, k_width=4)


# The tile sizes for 64 and 128 columns were the fastest on an H200, and those for 96 columns on an H100.
TILES = {
    64: dict(consumers=3, keys=128, stages=3, joint_release=False, registers=160, ping_pong=True, fence_softmax=False),
    96: dict(consumers=3, keys=64, stages=4, joint_release=True, registers=160, ping_pong=True, fence_softmax=True),
    128: dict(consumers=3, keys=64, stages=3, joint_release=True, registers=160, ping_pong=False, fence_softmax=True),
}
_FEW = dict(consumers=2, keys=128, stages=2, joint_release=False, registers=240, ping_pong=True, fence_softmax=True)
TILES_FEW_ROWS = TILES | {96: _FEW, 128: _FEW}

# If 64 consecutive queries attend to at most MEDIUM_KEYS keys, work tiles of four heads are faster.
MEDIUM_KEYS = 1088
TILES_MEDIUM = dict(consumers=4, keys=64, stages=8, joint_release=False, registers=112, ping_pong=False, fence_softmax=False)

# If 64 consecutive queries attend to at most SHORT_KEYS keys, `forward_short` is faster.
SHORT_KEYS = 192
# In `forward_short`, a product of h heads has 64 / h queries and 128 + TAIL_KEYS[h] keys.
TAIL_KEYS = {8: 16, 4: 32, 1: 64}
TILES_SHORT = dict(consumers=1, keys=64, stages=3, joint_release=False, registers=168, ping_pong=False, fence_softmax=False)

# These tile sizes were the fastest on an H100, on average over causal and full masks.
WIDE_TILES = {
    (192, 128): dict(keys=128, stages=4, overlap=True, fence_softmax=True),
    (256, 256): dict(keys=64, stages=5, overlap=False, fence_softmax=False),
}
WIDE_SETTINGS = dict(consumers=2, registers=240, ping_pong=True)

FP8_TILES = {
    64: dict(stages=12, part_columns=64, overlap=True, ping_pong=True),
    128: dict(stages=6, part_columns=128, overlap=True, ping_pong=False),
    256: dict(stages=3, part_columns=32, overlap=False, ping_pong=True),
}
FP8_SETTINGS = dict(consumers=2, keys=fp8.BLOCK, registers=240, update_ref_max=True, fence_softmax=False)


@lru_cache(maxsize=256)
def configure(
    dims: tuple[int, int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    has_state: bool,
    final: bool,
    few_rows: bool = False,
    short: int = 0,
    medium: bool = False,
) -> NarrowConfig | WideConfig | Fp8Config:
    """Return the constants of the forward for head dims (D, Dv) and numbers of heads (Hq, Hkv)."""
    call = dict(value_dim=dims[1], num_heads=heads[0], group=heads[0] // heads[1], has_state=has_state, final=final)
    if dtype == torch.float8_e4m3fn:
        return Fp8Config(dims[0], **call, **FP8_TILES[dims[0]], **FP8_SETTINGS)
    # Without updates of the reference max, probabilities may exceed the range of fp16.
    call["update_ref_max"] = dtype != torch.bfloat16
    if max(dims) > NARROW_DIM:
        key_dim, dim = hopper_common.padded_wide_dims(*dims)
        return WideConfig(dim, **call, key_dim=key_dim, **WIDE_TILES[key_dim, dim], **WIDE_SETTINGS)
    columns = used_columns(*dims)
    if short:
        return ShortConfig(64, **call, columns=columns, packed_heads=short, **TILES_SHORT)
    tiles = TILES_MEDIUM if medium else (TILES_FEW_ROWS if few_rows else TILES)[columns]
    config = NarrowConfig(hopper_common.padded_dim(*dims), **call, columns=columns, **tiles)
    # To load the next K and V early, the producer needs a K/V buffer that does not hold o. With one buffer for Q instead of
    # two, shared memory has room for one more K/V buffer.
    return replace(config, stages=max(config.stages, config.state_stages + 3 - config.q_slots))


def forward(
    q, k, v, intervals, scale, state=None, final=False,
    *, dropout=None, blocks=None, precision="ieee", shares_sms=False,
) -> State:  # fmt: skip
    """Compute `reference.forward` on one sm_90 GPU.

    q, k and v are fp16 or bf16. There must be at least one key, and head dims must be multiples of 8 up to 256. Tensors whose
    strides TMA cannot use are copied.
    """
    m, l, o, out, lse = results = triton_common.allocate_results(q, v, state, final)
    if q.numel() > 0:
        (batch, _, num_heads, head_dim), (num_key_heads, value_dim) = q.shape, v.shape[2:]
        few_rows = intervals.num_nonempty_rows * (batch // intervals.batch) * num_heads <= FEW_ROWS
        heads = num_heads, num_key_heads
        short = _packed_heads(heads, intervals) if state is None and final and max(head_dim, value_dim) <= 64 else 0
        medium = state is None and final and not few_rows and _uses_medium_tiles(q, v, intervals)
        config = configure((head_dim, value_dim), heads, q.dtype, state is not None, final, few_rows, short, medium)
        q, k, v = [hopper_common.as_addressable(x) for x in (q, k, v)]
        if isinstance(config, WideConfig):
            tiles = (q, ROWS.value, config.dim), (q, ROWS.value, config.tail), (k, config.keys, config.dim)
            tiles += (k, config.keys, config.tail), (v, config.keys, config.dim)
            kernel, stored_o = forward_wide._forward_kernel, o
        else:
            stored_o = o if state is None else hopper_common.as_addressable(o)
            query_block = ROWS.value // config.heads_per_row, config.dim, config.heads_per_row
            tiles = (q, *query_block), (k, config.keys, config.dim), (v, config.keys, config.dim)
            tiles += (stored_o, ROWS.value, config.dim // config.o_parts), (out, *query_block)
            kernel = (forward_short if short else forward_narrow)._forward_kernel
        descriptors = [None if x is None or block[1] == 0 else hopper_common.tma_descriptor(x, *block) for x, *block in tiles]
        work_tiles = _assign_work_tiles(config, intervals, q, v, shares_sms)
        _launch(kernel, config, descriptors, intervals, work_tiles, (m, l, stored_o, out, lse), q, scale)
        if config.updates_state and stored_o is not o:
            o.copy_(stored_o)
    return results[3:] if final else results[:3]


def _packed_heads(heads: tuple[int, int], intervals: Intervals) -> int:
    """Return the number of heads per product of `forward_short`, or 0 if the kernel cannot run."""
    if intervals.longest_tile > SHORT_KEYS or hopper_common.TRITON_VERSION == (3, 8):
        return 0
    eight_rows, sixteen_rows = intervals.longest_small_tiles
    # A product starts at a multiple of 8 keys, so up to 7 of its first keys may be masked.
    fits = {8: eight_rows <= 128 + TAIL_KEYS[8] - 7, 4: sixteen_rows <= 128 + TAIL_KEYS[4] - 7}
    return next((count for count in fits if fits[count] and heads[0] // heads[1] % count == 0), 1)


def _uses_medium_tiles(q: Tensor, v: Tensor, intervals: Intervals) -> bool:
    is_measured = q.dtype == torch.bfloat16 and max(q.shape[3], v.shape[3]) <= 64 and q.shape[2] // v.shape[2] % 4 == 0
    return is_measured and intervals.longest_tile <= MEDIUM_KEYS


def forward_quantized(
    q: fp8.QuantizedRows,
    k: fp8.QuantizedRows,
    v: fp8.QuantizedValues,
    intervals: Intervals,
    scale: float,
    state: State | None = None,
    final: bool = False,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shares_sms: bool = False,
) -> State | tuple[Tensor, Tensor]:
    """Compute `dispatch.forward_fp8` on one sm_90 GPU. The head dims of q and v must be equal and in FP8_TILES."""
    results = triton_common.allocate_results(q.data, k.data, state, final, dtype)
    if q.data.numel() > 0:
        (_, _, num_heads, dim), num_key_heads = q.data.shape, k.data.shape[2]
        config = configure((dim, dim), (num_heads, num_key_heads), q.data.dtype, state is not None, final)
        blocks = (1, ROWS.value, 1, dim), (1, config.keys, 1, dim), (1, 1, 1, dim, config.keys)
        data = [hopper_common.as_addressable(x.data) for x in (q, k, v)]
        operands = [hopper_common.block_descriptor(x, block) for x, block in zip(data, blocks, strict=True)]
        scales = [x.scales.contiguous() for x in (q, k, v)]
        work_tiles = _assign_work_tiles(config, intervals, q.data, k.data, shares_sms, aligned=True)
        numbers = scales[0].shape[1], scales[1].shape[1]
        kernel = forward_fp8._forward_kernel
        _launch(kernel, config, [*operands, *scales], intervals, work_tiles, results, q.data, scale, numbers)
    return results[3:] if final else results[:3]


def _launch(
    kernel: Any,
    config: ForwardConfig,
    inputs: Sequence[Any],
    intervals: Intervals,
    work_tiles: Tensor,
    results: tuple[Tensor | None, ...],
    q: Tensor,
    scale: float,
    numbers: tuple[int, ...] = (),
) -> None:
    m, l, o, out, lse = results
    with torch.cuda.device_of(q):
        launch(
            kernel, work_tiles.shape[1], (*inputs, intervals.lo, intervals.hi, work_tiles, m, l, o, lse, out),
            (intervals.batch, q.shape[1], *numbers, float(scale) * LOG2_E.value),
            max_registers=config.max_registers, CONFIG=config,
        )  # fmt: skip


def _assign_work_tiles(
    config: ForwardConfig, intervals: Intervals, q: Tensor, v: Tensor, shares_sms: bool, aligned: bool = False
) -> Tensor:
    (batch, _, num_heads, head_dim), (num_keys, _, value_dim) = q.shape, v.shape[1:]
    l2_bytes = SMALL_L2_BYTES if config.has_state or max(head_dim, value_dim) > NARROW_DIM else L2_BYTES
    heads_per_group = max(1, l2_bytes // (num_keys * (head_dim + value_dim) * q.element_size())) * config.group
    num_heads, heads_per_group = num_heads // config.heads_per_tile, max(1, heads_per_group // config.heads_per_tile)
    num_head_groups = -(-num_heads * batch // heads_per_group)
    programs = hopper_common.num_programs(q.device, shares_sms) * config.programs
    # Work tiles without keys do not change the state, so an in-place update of the state skips them.
    sizes = config.queries, config.keys, batch, num_heads, num_head_groups
    return intervals.work_tiles(*sizes, programs, skip_empty=config.updates_state, aligned=aligned)
