"""Launch the Hopper backward kernels, which compute `reference.backward`."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ringattn.kernels.dropout import Dropout
from ringattn.kernels.hopper import NARROW_DIM
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper.backward_common import SCALARS_LAYOUT
from ringattn.kernels.hopper.backward_narrow import KEYS, _main_kernel, dq_columns
from ringattn.kernels.hopper.backward_rows import PREPARED_ROWS, _finish_kernel, _prepare_kernel, _prepare_wide_kernel
from ringattn.kernels.hopper.backward_wide import QUERIES, STEP_KEYS, _key_gradient_kernel, _query_gradient_kernel
from ringattn.kernels.hopper.column_parts import used_columns
from ringattn.kernels.hopper.common import ROWS
from ringattn.kernels.hopper.dq_order import HEADER
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import Accumulators, Delta, Gradients
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton.launcher import launch

# If 64 consecutive keys have more than MOST_QUERIES_TO_SKIP queries, skipping masked steps costs more time than it saves.
MOST_QUERIES_TO_SKIP = 1536

# The kernel for dq computes heads in groups whose K and V take at most KEY_BYTES_IN_L2.
KEY_BYTES_IN_L2 = 32 * 2**20


@dataclass(frozen=True)
class NarrowConfig(hopper_common.KernelConfig):
    """The constants of `backward_narrow`.

    Args:
        deterministic: whether dq is summed in a fixed order.
        skips_steps: whether consumers skip fully masked steps.
    """

    head_dim: int
    add_dq: bool
    add_dk: bool
    add_dv: bool
    deterministic: bool
    skips_steps: bool

    @property
    def entry_size(self) -> int:
        return 12 if self.deterministic else 8

    @property
    def columns(self) -> int:
        return used_columns(self.head_dim, self.value_dim)

    @property
    def keeps_operands(self) -> bool:
        """Keeping K and V in registers saves reads from shared memory, whose bandwidth limits the kernel. With tiles of 64 or
        128 columns, K and V do not fit into registers.
        """
        return self.columns == 96

    @property
    def queries(self) -> int:
        return 64 if self.dim == 128 else 128

    @property
    def chunk_columns(self) -> int:
        return self.dim * self.queries // KEYS.value

    @property
    def chunk_size(self) -> int:
        return ROWS.value * self.chunk_columns

    @property
    def used_size(self) -> int:
        return self.queries * self.columns


@dataclass(frozen=True)
class WideConfig:
    """The constants of `backward_wide`.

    Args:
        dim, padded_value_dim: the head dims of the tiles.
        part: the number of columns of a part of Q and K.
        value_part: the number of columns of a part of V and dO.
        queries: the number of queries per step of the kernel for dk and dv.
        q_slots, dout_slots, p_slots: the number of slots of each ring in the kernel for dk and dv.
        k_slots, v_slots: the number of slots of each ring in the kernel for dq, where the ring of K must hold two tiles.
        pass_after_scores: whether a consumer of the kernel for dq waits for its scores before it passes its turn.
    """

    head_dim: int
    value_dim: int
    num_heads: int
    group: int
    add_dq: bool
    add_dk: bool
    add_dv: bool
    dim: int
    padded_value_dim: int
    part: int
    value_part: int
    queries: int
    q_slots: int
    dout_slots: int
    p_slots: int
    k_slots: int
    v_slots: int
    pass_after_scores: bool

    @property
    def parts(self) -> int:
        return self.dim // self.part

    @property
    def value_parts(self) -> int:
        return self.padded_value_dim // self.value_part

    @property
    def p_tile_layout(self) -> gl.SharedLinearLayout:
        """P, of shape (64 keys, queries), has the same order in shared memory as in registers. This avoids bank conflicts."""
        order = [[0, 1], [8, 0], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [16, 0], [32, 0]]
        return gl.SharedLinearLayout(order + [[0, 16 << i] for i in range((self.queries // 16).bit_length() - 1)], [], 16)


WIDE_TILES = {
    (256, 256): dict(
        part=128, value_part=128, queries=64, q_slots=5, dout_slots=4, p_slots=2, k_slots=4, v_slots=2,
        pass_after_scores=True,
    ),
    (192, 128): dict(
        part=64, value_part=128, queries=128, q_slots=6, dout_slots=2, p_slots=1, k_slots=12, v_slots=3,
        pass_after_scores=False,
    ),
}  # fmt: skip


@lru_cache(maxsize=256)
def configure(
    dims: tuple[int, int], heads: tuple[int, int], add: tuple[bool, bool, bool], deterministic: bool = False,
    skips_steps: bool = False,
) -> NarrowConfig | WideConfig:  # fmt: skip
    """Return the constants of the backward for head dims (D, Dv) and numbers of heads (Hq, Hkv). The flags `add` select which
    of dq, dk and dv are added to existing gradients.
    """
    group = heads[0] // heads[1]
    if max(dims) > NARROW_DIM:
        padded = hopper_common.padded_wide_dims(*dims)
        return WideConfig(*dims, heads[0], group, *add, *padded, **WIDE_TILES[padded])
    return NarrowConfig(hopper_common.padded_dim(*dims), dims[1], heads[0], group, dims[0], *add, deterministic, skips_steps)


def backward(
    q, k, v, dout, lse, delta, intervals, scale, dq=None, dk=None, dv=None,
    *, grad_dtype=None, dropout=None, blocks=None, precision="ieee", shares_sms=False,
):  # fmt: skip
    """Compute `reference.backward` on one sm_90 GPU.

    The restrictions of `forward.forward` apply. `delta` may be (out, dlse).
    """
    if q.numel() == 0 or k.numel() == 0:
        return triton_common.allocate_gradients(q, k, v, (dq, dk, dv), grad_dtype)
    return incremental(q, dout, lse, delta, scale, shares_sms).compute(k, v, intervals, (dq, dk, dv), grad_dtype)


def incremental(
    q: Tensor, dout: Tensor, lse: Tensor, delta: Delta, scale: float, shares_sms: bool = False
) -> "NarrowBackward | WideBackward":
    wide = max(q.shape[3], dout.shape[3]) > NARROW_DIM
    return (WideBackward if wide else NarrowBackward)(q, dout, lse, delta, scale, shares_sms)


class _Backward:
    def __init__(self, q: Tensor, dout: Tensor, lse: Tensor, delta: Delta, scale: float, shares_sms: bool) -> None:
        self._queries, self._scale, self._shares_sms = (q, dout, lse, delta), float(scale), shares_sms
        self._packed: tuple[Tensor, Tensor] | None = None

    def add(
        self, k: Tensor, v: Tensor, intervals: Intervals, dk: Tensor | None = None, dv: Tensor | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See `dispatch.IncrementalBackward.add`."""
        if dropout is not None:
            raise ValueError("the Hopper backward does not support dropout: use dispatch.IncrementalBackward(..., plain=False)")
        return self._accumulate(k, v, intervals, dk, dv, torch.float32)


class NarrowBackward(_Backward):
    def __init__(self, *operands) -> None:
        super().__init__(*operands)
        self._config: NarrowConfig | None = None
        self._deterministic = torch.are_deterministic_algorithms_enabled()

    def compute(
        self, k: Tensor, v: Tensor, intervals: Intervals, given: Accumulators, grad_dtype: torch.dtype | None
    ) -> Gradients:
        dk, dv = self._accumulate(k, v, intervals, *given[1:], grad_dtype)
        return self.finish(given[0], grad_dtype), dk, dv

    def _accumulate(
        self, k: Tensor, v: Tensor, intervals: Intervals, dk: Tensor | None, dv: Tensor | None, grad_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        q, dout, lse, delta = self._queries
        (batch, num_queries, num_heads, _), (num_keys, num_key_heads) = q.shape, v.shape[1:3]
        add = False, dk is not None, dv is not None
        by_key = intervals.transposed
        options = self._deterministic, _skips_steps(by_key)
        config = configure((q.shape[3], v.shape[3]), (num_heads, num_key_heads), add, *options)
        _, *grads = triton_common.allocate_gradients(q, k, v, (q, dk, dv), grad_dtype)
        num_tiles = -(-num_queries // config.queries)
        programs = hopper_common.num_programs(q.device, self._shares_sms)
        work_tiles, progress = _work_tiles(by_key, batch, num_key_heads, num_queries, programs, config)
        with torch.cuda.device_of(q):
            if self._packed is None:
                self._packed, self._config = _prepare(q, dout, lse, delta, config), config
            for grad, accumulator in zip(grads, (dk, dv), strict=True):
                _clear_empty_rows(grad, accumulator, by_key)
            tiles = (q, config.queries), (k, ROWS.value), (v, ROWS.value), (dout, config.queries)
            scratch = _scratch_descriptors(batch * num_heads * num_tiles, config)
            descriptors = (
                *(hopper_common.tma_descriptor(hopper_common.as_addressable(x), rows, config.dim) for x, rows in tiles),
                *map(hopper_common.with_base, scratch, (*self._packed, self._packed[1])),
            )
            # In the deterministic kernel, programs wait for each other, so all programs must run at the same time.
            launch(
                _main_kernel, work_tiles.shape[1], (*descriptors, *grads, by_key.lo, by_key.hi, work_tiles, progress),
                (by_key.batch, num_tiles, num_keys, self._scale), config.deterministic and not self._shares_sms, CONFIG=config,
            )  # fmt: skip
        return tuple(grads)

    def finish(self, dq: Tensor | None = None, grad_dtype: torch.dtype | None = None) -> Tensor:
        q = self._queries[0]
        if self._packed is None:
            return torch.zeros_like(q, dtype=grad_dtype) if dq is None else dq
        batch, num_queries, num_heads, _ = q.shape
        config = replace(self._config, add_dq=dq is not None)
        if dq is None:
            dq = torch.empty_like(q, dtype=grad_dtype, memory_format=torch.contiguous_format)
        num_tiles = -(-num_queries // config.queries)
        arguments = (self._packed[1], dq), (num_tiles, num_queries, self._scale)
        with torch.cuda.device_of(q):
            launch(_finish_kernel, 2 * batch * num_heads * num_tiles, *arguments, CONFIG=config)
        return dq


class WideBackward(_Backward):
    def __init__(self, *operands) -> None:
        super().__init__(*operands)
        self._dq: Tensor | None = None

    def _accumulate(
        self, k: Tensor, v: Tensor, intervals: Intervals, dk: Tensor | None, dv: Tensor | None, grad_dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor]:
        self._dq, dk, dv = self.compute(k, v, intervals, (self._dq, dk, dv), grad_dtype)
        return dk, dv

    def finish(self) -> Tensor:
        q = self._queries[0]
        return torch.zeros_like(q) if self._dq is None else self._dq.to(q.dtype)

    def compute(
        self, k: Tensor, v: Tensor, intervals: Intervals, given: Accumulators, grad_dtype: torch.dtype | None
    ) -> Gradients:
        q, dout, lse, delta = self._queries
        add = tuple(x is not None for x in given)
        config = configure((q.shape[3], v.shape[3]), (q.shape[2], k.shape[2]), add)
        grads = triton_common.allocate_gradients(q, k, v, given, grad_dtype)
        tensors = tuple(map(hopper_common.as_addressable, (q, k, v, dout)))
        by_key = intervals.transposed
        with torch.cuda.device_of(q):
            if self._packed is None:
                self._packed = _prepare_wide(q, dout, lse, delta, config)
            for grad, accumulator, rows in zip(grads, given, (intervals, by_key, by_key), strict=True):
                _clear_empty_rows(grad, accumulator, rows)
            self._launch_key_gradient(tensors, grads[1:], by_key, config)
            self._launch_query_gradient(tensors, grads[0], intervals, config)
        return grads

    def _launch_key_gradient(self, tensors, grads, by_key: Intervals, config: WideConfig) -> None:
        q, k, _v, _dout = tensors
        batch, num_queries = q.shape[:2]
        num_keys, num_key_heads = k.shape[1:3]
        num_head_groups = -(-batch * num_key_heads // max(1, 32768 // num_queries))
        programs = hopper_common.num_programs(q.device, self._shares_sms)
        work_tiles = by_key.work_tiles(
            ROWS.value, config.queries, batch, num_key_heads, num_head_groups, programs, skip_empty=True, group=config.group
        )
        scalars = [_scalar_descriptor(x.numel(), config.queries) for x in self._packed]
        descriptors = (
            *_wide_descriptors(tensors, (config.queries, ROWS.value, ROWS.value, config.queries), config),
            *map(hopper_common.with_base, scalars, self._packed),
        )
        launch(
            _key_gradient_kernel, work_tiles.shape[1], (*descriptors, *grads, by_key.lo, by_key.hi, work_tiles),
            (by_key.batch, -(-num_queries // config.queries), num_keys, self._scale), CONFIG=config,
        )  # fmt: skip

    def _launch_query_gradient(self, tensors, dq: Tensor, intervals: Intervals, config: WideConfig) -> None:
        q, k, v, _dout = tensors
        batch, num_queries, num_heads, _ = q.shape
        bytes_per_key_head = 2 * k.shape[1] * (k.shape[3] + v.shape[3])
        heads_per_group = config.group * max(1, KEY_BYTES_IN_L2 // bytes_per_key_head)
        programs = hopper_common.num_programs(q.device, self._shares_sms)
        sizes = QUERIES.value, STEP_KEYS.value, batch, num_heads, -(-batch * num_heads // heads_per_group)
        work_tiles = intervals.work_tiles(*sizes, programs, skip_empty=True)
        descriptors = _wide_descriptors(tensors, (ROWS.value,) * 4, config)
        padded_queries = self._packed[0].shape[1]
        launch(
            _query_gradient_kernel, work_tiles.shape[1],
            (*descriptors, *self._packed, dq, intervals.lo, intervals.hi, work_tiles),
            (intervals.batch, padded_queries, num_queries, self._scale), CONFIG=config,
        )  # fmt: skip


def _skips_steps(by_key: Intervals) -> bool:
    return by_key.longest_tile <= MOST_QUERIES_TO_SKIP


def _clear_empty_rows(grad: Tensor, accumulator: Tensor | None, rows: Intervals) -> None:
    """The kernels do not write gradients of rows with empty intervals, so a new gradient must be zeroed first."""
    if accumulator is None and rows.num_nonempty_rows < rows.lo.numel():
        grad.zero_()


@lru_cache(maxsize=256)
def _scalar_descriptor(size: int, queries: int) -> TensorDescriptor:
    no_tensor = torch.empty(1, dtype=torch.float32, device="cpu")
    return TensorDescriptor(no_tensor, [size], [1], [queries], SCALARS_LAYOUT)


@lru_cache(maxsize=256)
def _scratch_descriptors(num_head_tiles: int, config: NarrowConfig) -> list[TensorDescriptor]:
    no_tensor = torch.empty(1, dtype=torch.float32, device="cpu")
    num_rows = (config.chunk_size + num_head_tiles * config.queries * config.dim) // 32
    blocks = [(2 * dq_columns(config, consumer), 32) for consumer in range(2)]
    layouts = [hopper_common.shared_layout(block, torch.float32) for block in blocks]
    sums = [TensorDescriptor(no_tensor, [num_rows, 32], [32, 1], list(x), y) for x, y in zip(blocks, layouts, strict=True)]
    return [_scalar_descriptor(num_head_tiles * 2 * config.queries, 2 * config.queries), *sums]


def _wide_descriptors(tensors: tuple[Tensor, ...], rows: tuple[int, ...], config: WideConfig) -> list[TensorDescriptor]:
    columns = config.part, config.part, config.value_part, config.value_part
    return [hopper_common.tma_descriptor(x, *block) for x, *block in zip(tensors, rows, columns, strict=True)]


def _work_tiles(
    by_key: Intervals, batch: int, num_key_heads: int, num_queries: int, programs: int, config: NarrowConfig
) -> tuple[Tensor, Tensor | None]:
    heads_per_group = _heads_per_group(num_queries)
    if config.deterministic:
        table = by_key.ordered_work_tiles(
            KEYS.value, config.queries, batch, num_key_heads, heads_per_group, programs, config.group
        )
        return table, table.new_zeros(HEADER.value + 2 * table.shape[0] * table.shape[1])
    num_head_groups = -(-batch * num_key_heads // heads_per_group)
    table = by_key.work_tiles(
        KEYS.value, config.queries, batch, num_key_heads, num_head_groups, programs, skip_empty=True, group=config.group
    )
    return table, None


def _heads_per_group(num_queries: int) -> int:
    """With short sequences, computing more heads at a time balances the load, and their dq fits into the L2 cache."""
    return 32768 // num_queries if num_queries <= 8192 else 1


def _prepare(q: Tensor, dout: Tensor, lse: Tensor, delta: Delta, config: NarrowConfig) -> tuple[Tensor, Tensor]:
    batch, num_queries, num_heads, _ = q.shape
    num_tiles = -(-num_queries // config.queries)
    num_head_tiles = batch * num_heads * num_tiles
    scalars = lse.new_empty(num_head_tiles * 2 * config.queries)
    dq_sums = lse.new_empty(config.chunk_size + num_head_tiles * config.queries * config.dim)
    rows = lse.contiguous(), *hopper_common.delta_operands(delta, dout)
    launch(_prepare_kernel, num_head_tiles, (*rows, scalars, dq_sums), (num_tiles, num_queries), CONFIG=config)
    return scalars, dq_sums


def _prepare_wide(q: Tensor, dout: Tensor, lse: Tensor, delta: Delta, config: WideConfig) -> tuple[Tensor, Tensor]:
    """Return (log2_lse, row_delta), both (B * Hq, Nq), with Nq rounded up to whole query tiles."""
    batch, num_queries, num_heads, _ = q.shape
    padded_queries = -(-num_queries // config.queries) * config.queries
    packed = tuple(lse.new_empty(batch * num_heads, padded_queries) for _ in range(2))
    rows = lse.contiguous(), *hopper_common.delta_operands(delta, dout)
    num_blocks = padded_queries // PREPARED_ROWS.value
    numbers = num_blocks, num_queries
    launch(_prepare_wide_kernel, batch * num_heads * num_blocks, (*rows, *packed), numbers, CONFIG=config)
    return packed
