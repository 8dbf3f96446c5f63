"""In the deterministic backward, programs add to dq in a fixed order.

The order comes from `ringattn.kernels.tile_order`. The page docs/hopper.md explains the two writer warps.

      CONSUMERS                       WRITER OF THIS STEP

                                      wait until the predecessor has added to the same query tile
      store dQ in `staging`
      arrive at `staged` -----------> wait for `staged`
                                      send dQ by TMA's reduce-add, and wait until TMA has read `staging`
      wait for `released` <---------- arrive at `released`
      store the next dQ               wait until the additions of both consumers are complete
                                      publish the progress of the work tile

In global memory, each work tile has a counter for its even steps and another for its odd steps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.common import tile_view, tma_reduce_add

# The tensor `progress` begins with two integers: the number of programs that have started, and an unused number.
HEADER = gl.constexpr(2)

# After n steps of query head h, a work tile's counter in `progress` is h * PER_HEAD + n. Every query head has fewer than
# PER_HEAD steps.
PER_HEAD = gl.constexpr(2**20)

WRITER_REGISTERS = gl.constexpr(24)


@gluon.jit
def take_number(progress):
    """Number the programs in the order of their starts, and return this program's number."""
    number = gl.atomic_add(progress, 1, sem="relaxed")
    # Triton broadcasts `number` through shared memory, so wait until every thread has read it.
    hopper_common.thread_barrier()
    return number


@gluon.jit
def _wait_for(pointer, count, seen):
    """Lane 0 loads the counter for the warp, because the compiler assumes that all lanes leave this loop together."""
    while seen < count:
        seen = gl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; mov.b32 $0, 0; "
            "@first ld.acquire.gpu.global.b32 $0, [$1]; shfl.sync.idx.b32 $0, $0, 0, 31, -1; }",
            "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    return seen


@gluon.jit
def _publish(pointer, progress):
    """Store `progress` after this warp's additions to dq are complete.

    The store needs release semantics, because waiting for the additions to dq does not order the store after them. Without
    release semantics, the last bits of dq changed in almost every test.
    """
    hopper_common.execute("cp.async.bulk.wait_group 0; mov.b32 $0, $1;")
    # Only one thread of the warp waits for the additions, so synchronise the warp before the store.
    hopper_common.execute("bar.warp.sync -1; mov.b32 $0, $1;")
    gl.inline_asm_elementwise(
        "st.release.gpu.global.b32 [$1], $2; mov.b32 $0, $2;", "=r,l,r", [pointer, progress],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _load_order(work_tiles, index, CONFIG: gl.constexpr):
    """The returned `order` contains the last four columns of `tile_order.order_work_tiles`."""
    entry = work_tiles + index * gl.num_programs(0) * CONFIG.entry_size
    end, begin, num_steps = gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 4) + gl.load(entry + 5)
    first_head = gl.load(entry + 7) * CONFIG.num_heads + gl.load(entry + 6) * CONFIG.group
    order = gl.load(entry + 8), gl.load(entry + 9), gl.load(entry + 10), gl.load(entry + 11)
    return end, first_head, begin // CONFIG.queries, num_steps, order


@gluon.jit
def write_in_order(arguments, WRITER: gl.constexpr, CONFIG: gl.constexpr):
    dq_sums, work_tiles, progress, num_tiles, staging = arguments
    progress += HEADER
    phase = gl.to_tensor(0)
    # Writer warp 0 discards the first dQ of a program, which is uninitialised.
    skip = gl.to_tensor(1 - WRITER)
    if WRITER == 0:
        for consumer in gl.static_range(2):
            mbarrier.wait(staging[2].index(2 * consumer), 0)
            mbarrier.arrive(staging[3].index(consumer), count=1)
        phase ^= 1
    index = gl.to_tensor(0)
    end, first_head, tile, num_steps, order = _load_order(work_tiles, index, CONFIG)
    while end > 0:
        direction, own, predecessor, num_free = order
        for member in range(CONFIG.group):
            chunk = ((first_head + member) * num_tiles + tile + skip * direction) * 2 + 1
            own_progress = progress + 2 * own + skip
            # The counter `own_progress` equals `earlier` once the counted steps of the previous query head are complete. Either
            # writer warp may have stored this value.
            earlier = (member - 1) * PER_HEAD + num_steps - ((num_steps - 1 - skip) & 1)
            awaited = progress + 2 * predecessor + ((skip ^ num_free) & 1)
            seen = gl.to_tensor(0)
            for step in range(skip, num_steps, 2):
                finished = member * PER_HEAD + step + 1
                if step >= num_free:
                    seen = _wait_for(awaited, finished - num_free, seen)
                _send(dq_sums, staging, chunk, phase, WRITER, CONFIG)
                if CONFIG.group > 1:  # noqa: SIM102 - the compiler evaluates this condition, which is a constant
                    if (member > 0) & (step == skip):
                        _wait_for(own_progress, earlier, gl.to_tensor(0))
                _publish(own_progress, finished)
                phase ^= 1
                chunk += 4 * direction
            skip = (skip ^ num_steps) & 1
        index += 1
        end, first_head, tile, num_steps, order = _load_order(work_tiles, index, CONFIG)


@gluon.jit
def _send(dq_sums, staging, chunk, phase, WRITER: gl.constexpr, CONFIG: gl.constexpr):
    for consumer in gl.static_range(2):
        sums = dq_sums[consumer]
        mbarrier.wait(staging[2].index(2 * consumer + WRITER), phase)
        row = (chunk + consumer) * (2 * CONFIG.chunk_columns)
        tma_reduce_add(sums, [row, 0], tile_view(staging[consumer].index(0), sums))
        hopper_common.tma_store_wait(0)
        mbarrier.arrive(staging[3].index(consumer), count=1)
