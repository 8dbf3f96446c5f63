"""What the Hopper forward kernels have in common: configurations, ping-pong, overflow reports and the rows of a consumer.

`ringattn.kernels.hopper.forward` explains the terms. `ringattn.kernels.hopper.forward_wide` is the kernel for head dims above
128.
"""

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringattn.kernels.hopper import NARROW_DIM
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import ROWS, step_start
from ringattn.kernels.hopper.epilogue import load_ref_max
from ringattn.kernels.interval_mask import Intervals

# The number of the named barrier of consumer 0 for ping-pong. Consumer c uses FIRST_PING_PONG_BARRIER + c. Triton itself uses
# the lower numbers.
FIRST_PING_PONG_BARRIER = gl.constexpr(8)

# The number of threads that arrive at a named barrier for ping-pong. 128 threads belong to the consumer that waits, and 128
# belong to the consumer before it.
PING_PONG_THREADS = gl.constexpr(256)

# The number of registers per thread of the producer. The producer computes nothing, so it needs few registers.
PRODUCER_REGISTERS = gl.constexpr(24)

# Triton 3.8 comes with a different assembler. That assembler would serialise all matrix products of a kernel that uses
# `fence_softmax`, so the fence is off from Triton 3.8 on.
FENCE_SOFTMAX = hopper_common.TRITON_VERSION < (3, 8)

# Head groups are sets of heads whose work tiles are processed one group after another. This number is the maximal total size of
# K and V of all heads in a head group, in bytes. K and V of a head group should stay in the L2 cache. The output passes through
# this cache, too. If a state comes in, its o passes through the cache as well. This o is in fp32, and an update in place both
# reads and writes it. K and V then get only half of this size. The same size was faster for head dims above 128 on an H100.
L2_BYTES = 32 * 2**20
SMALL_L2_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ForwardConfig(hopper_common.Config):
    """The constants that both forward kernels have.

    Args:
        dim, value_dim, num_heads, group: see `ringattn.kernels.hopper.common.Config`.
        has_state: whether the call continues from an incoming state.
        final: whether (out, lse) is written instead of a state.
        consumers: number of consumers, 2 or 3.
        keys: number of keys per step.
        stages: number of stages of the K/V pipeline.
        registers: number of registers per thread of a consumer.
        ping_pong: whether consumers take turns to issue their products.
        fence_softmax: whether to use the function `fence_softmax` of `ringattn.kernels.hopper.softmax`.
        update_ref_max: whether all passes update the reference max. Otherwise only the retry pass updates the reference max.
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

    @property
    def queries(self) -> int:
        """The number of rows of a work tile."""
        return self.consumers * ROWS.value

    @property
    def partitions(self) -> gl.tuple:
        """The numbers of the partitions as constants that Gluon can iterate over: first the consumers, then the producer."""
        return gl.tuple([gl.constexpr(number) for number in range(self.consumers + 1)])

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        """The layout of a consumer's scores (64, keys) in registers."""
        return hopper_common.accumulator_layout(self.keys)

    @property
    def updates_state(self) -> bool:
        """Whether the incoming state is updated in place."""
        return self.has_state and not self.final


@gluon.jit
def advance_stage(stage, phase, CONFIG: gl.constexpr):
    """Return the next stage and the phase of its barriers."""
    last = stage == CONFIG.stages - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def allocate_overflow(CONFIG: gl.constexpr):
    """Return the flags and the barrier with which the consumers report overflows to all partitions."""
    flags = gl.allocate_shared_memory(gl.int32, [CONFIG.consumers, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    reported = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(reported, count=CONFIG.consumers)
    return flags, reported


@gluon.jit
def any_overflow(overflow, WARPS: gl.constexpr, CONFIG: gl.constexpr):
    """Wait until every consumer has reported, and return whether any row of any consumer has overflowed.

    WARPS is the number of warps of the calling partition.
    """
    flags, reported = overflow
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    CONSUMERS: gl.constexpr = CONFIG.consumers
    mbarrier.wait(reported, 0)
    overflowed = flags.index(0).load(LAYOUT)
    for c in gl.static_range(1, CONSUMERS):
        overflowed |= flags.index(c).load(LAYOUT)
    return gl.max(overflowed, axis=0) > 0


@gluon.jit
def report_overflow(overflow, overflowed, CONSUMER: gl.constexpr):
    """Report to all partitions whether any row of this consumer has overflowed in any of its work tiles."""
    flags, reported = overflow
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    flags.index(CONSUMER).store(gl.zeros([32], gl.int32, LAYOUT) + gl.max(overflowed.to(gl.int32), axis=0))
    mbarrier.arrive(reported, count=1)


@gluon.jit
def wait_for_ping_pong(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Wait until the previous consumer has issued its products."""
    # Triton 3.6 can pass an f-string to another function only if the string is a named constant.
    SYNC: gl.constexpr = f"bar.sync {FIRST_PING_PONG_BARRIER + CONSUMER}, {PING_PONG_THREADS}; mov.b32 $0, $1;"
    if CONFIG.ping_pong:
        hopper_common.execute(SYNC)


@gluon.jit
def pass_ping_pong(CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Let the next consumer issue its products, by arriving at the barrier of the next consumer without waiting."""
    NEXT: gl.constexpr = FIRST_PING_PONG_BARRIER + (CONSUMER + 1) % CONFIG.consumers
    ARRIVE: gl.constexpr = f"bar.arrive {NEXT}, {PING_PONG_THREADS}; mov.b32 $0, $1;"
    if CONFIG.ping_pong:
        hopper_common.execute(ARRIVE)


@gluon.jit
def load_consumer_tile(arguments, index, CONSUMER: gl.constexpr, CONFIG: gl.constexpr):
    """Load the numbers that describe a work tile and a consumer's rows of this work tile.

    Returns:
        (batch entry, head, first row of this consumer, end, loop, row_bounds). `end` is the end of the work tile's rows.
        row_bounds is the tuple (lo, hi, all_initialised, ref_max). lo and hi (64,) are the intervals of the rows.
        all_initialised tells whether the first step sets the reference max of every row that sees any key. ref_max (64,) is the
        initial reference max of each row.
    """
    lo, hi, work_tiles, num_masks, num_queries, results, buffers, barriers, log2_scale = arguments
    batch, head, first, end, loop = hopper_common.load_work_tile(work_tiles, index)
    first_row = first + CONSUMER * ROWS
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, CONFIG.scores_layout))
    # One mask may serve all batch entries.
    offset = gl.minimum(batch, num_masks - 1) * num_queries
    row_lo = gl.load(lo + offset + rows, mask=rows < end, other=0)
    row_hi = gl.load(hi + offset + rows, mask=rows < end, other=0)
    start = step_start(loop, 0, CONFIG.keys)
    # Bounds never decrease from row to row. Every interval that is not empty contains a key of the first tile of keys if two
    # conditions are met. The hi of the first row must be greater than the start of this tile, and the lo of the last row must
    # be less than the end of this tile.
    first_hi = gl.load(hi + offset + first_row, mask=first_row < end, other=0)
    last_lo = gl.load(lo + offset + gl.minimum(first_row + ROWS, end) - 1, mask=first_row < end, other=0)
    all_initialised = (first_hi > start) & (last_lo < start + CONFIG.keys)
    ref_max = load_ref_max(results, (batch, head, first_row, end), CONFIG)
    return batch, head, first_row, end, loop, (row_lo, row_hi, all_initialised, ref_max)


def assign_work_tiles(
    config: ForwardConfig, intervals: Intervals, q: Tensor, v: Tensor, shares_sms: bool, aligned: bool = False
) -> Tensor:
    """Return the table of `Intervals.work_tiles` for a call, int32 (n, programs, 8).

    `aligned` tells whether every loop begins at a multiple of `config.keys`. The other arguments are those of `forward`. Of v,
    only the shape matters, so k may be passed instead if both have the same head dim.
    """
    (batch, _, num_heads, head_dim), (num_keys, _, value_dim) = q.shape, v.shape[1:]
    l2_bytes = SMALL_L2_BYTES if config.has_state or max(head_dim, value_dim) > NARROW_DIM else L2_BYTES
    heads_per_group = max(1, l2_bytes // (num_keys * (head_dim + value_dim) * q.element_size())) * config.group
    num_head_groups = -(-num_heads * batch // heads_per_group)
    programs = hopper_common.num_programs(q.device, shares_sms)
    # An in-place update does not change the state of a row that sees no key, so work tiles without keys are skipped.
    sizes = config.queries, config.keys, batch, num_heads, num_head_groups
    return intervals.work_tiles(*sizes, programs, skip_empty=config.updates_state, aligned=aligned)
