"""Merge the partial softmax states (m, l, o) of several ranks in one pass over memory."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels.reference import State
from ringattn.kernels.triton.launcher import launch

ELEMENTS = 4096  # elements of o per program
MAX_PARTS = 3  # parameters of the kernel


@triton.jit
def _merge_part(state, part, tokens, batch, row, columns, inside, HEADS: tl.constexpr, DIM: tl.constexpr):
    m, l, o = state
    part_m, part_l, part_o = part
    if part_m is not None:
        first, end = tokens
        covered = inside & (row >= first * HEADS) & (row < end * HEADS)
        index = batch.to(tl.int64) * (end - first) * HEADS + (row - first * HEADS)
        other_m = tl.load(part_m + index, mask=covered, other=float("-inf"))
        other_l = tl.load(part_l + index, mask=covered, other=0.0)
        elements = index[:, None] * DIM + columns[None, :]
        other_o = tl.load(part_o + elements, mask=covered[:, None] & (columns < DIM)[None, :], other=0.0)
        new_m = tl.maximum(m, other_m)
        reference_max = tl.where(new_m == float("-inf"), 0.0, new_m)
        alpha, other_alpha = tl.exp(m - reference_max), tl.exp(other_m - reference_max)
        m = new_m
        l = alpha * l + other_alpha * other_l
        o = alpha[:, None] * o + other_alpha[:, None] * other_o
    return m, l, o


@triton.jit(do_not_specialize=["num_tokens", "start", "end", "a_first", "a_end", "b_first", "b_end", "c_first", "c_end"])
def _merge_kernel(
    m, l, o, a_m, a_l, a_o, b_m, b_l, b_o, c_m, c_l, c_o, out, lse,
    num_tokens, start, end, a_first, a_end, b_first, b_end, c_first, c_end,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """In this kernel, a row is one head of one token.

    The kernel writes (out, lse), or overwrites the base with the merged state if `out` is None.
    """
    blocks = tl.cdiv((end - start) * HEADS, ROWS)
    batch = tl.program_id(0) // blocks
    row = start * HEADS + tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, PADDED_DIM)
    inside = row < end * HEADS
    index = batch.to(tl.int64) * num_tokens * HEADS + row
    elements = index[:, None] * DIM + columns[None, :]
    mask = inside[:, None] & (columns < DIM)[None, :]
    state = (
        tl.load(m + index, mask=inside, other=float("-inf")),
        tl.load(l + index, mask=inside, other=0.0),
        tl.load(o + elements, mask=mask, other=0.0, eviction_policy="evict_first"),
    )
    state = _merge_part(state, (a_m, a_l, a_o), (a_first, a_end), batch, row, columns, inside, HEADS, DIM)
    state = _merge_part(state, (b_m, b_l, b_o), (b_first, b_end), batch, row, columns, inside, HEADS, DIM)
    state = _merge_part(state, (c_m, c_l, c_o), (c_first, c_end), batch, row, columns, inside, HEADS, DIM)
    new_m, new_l, new_o = state
    if out is None:
        # All warps must have loaded m and l before any warp overwrites them.
        tl.debug_barrier()
        tl.store(m + index, new_m, mask=inside)
        tl.store(l + index, new_l, mask=inside)
        tl.store(o + elements, new_o, mask=mask, eviction_policy="evict_first")
    else:
        divisor = tl.where(new_l == 0.0, 1.0, new_l)
        tl.store(out + elements, (new_o / divisor[:, None]).to(out.dtype.element_ty), mask=mask)
        tl.store(lse + index, new_m + tl.log(new_l), mask=inside)


def merge_states(
    base: State, parts: Sequence[tuple[int, State]], dtype: torch.dtype | None = None
) -> State | tuple[Tensor, Tensor]:
    """Compute `reference.merge_states` for contiguous fp32 states."""
    while len(parts) > MAX_PARTS:
        base, parts = merge_states(base, parts[:MAX_PARTS]), parts[MAX_PARTS:]
    m, _, o = base
    batch, num_tokens, heads, dim = o.shape
    ranges = [(first, first + state[0].shape[1]) for first, state in parts]
    start, end = (0, num_tokens) if dtype else (min(x for x, _ in ranges), max(x for _, x in ranges)) if parts else (0, 0)
    results = (torch.empty_like(o, dtype=dtype), torch.empty_like(m)) if dtype else (None, None)
    if start < end and o.numel() > 0:
        missing = MAX_PARTS - len(parts)
        padded_dim = triton.next_power_of_2(dim)
        rows = max(ELEMENTS // padded_dim, 1)
        with torch.cuda.device_of(o):
            launch(
                _merge_kernel, batch * -(-(end - start) * heads // rows),
                (*base, *(x for _, state in parts for x in state), *3 * missing * [None], *results),
                (num_tokens, start, end, *(bound for each in ranges for bound in each), *missing * [0, 0]),
                HEADS=heads, DIM=dim, PADDED_DIM=padded_dim, ROWS=rows,
            )  # fmt: skip
    return results if dtype else base


@triton.jit(do_not_specialize=["num_rows"])
def _merge_packed_kernel(
    states, out, num_rows, RANKS: tl.constexpr, PADDED_RANKS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr
):
    """Merge the states of all ranks for one head of one token. The grid is (num_rows,)."""
    row, rank, columns = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED_RANKS), tl.arange(0, PADDED_DIM)
    used = rank < RANKS
    o = states + rank.to(tl.int64) * num_rows * (DIM + 2)
    m = o + num_rows.to(tl.int64) * DIM
    part_m = tl.load(m + row, mask=used, other=float("-inf"))
    part_l = tl.load(m + num_rows + row, mask=used, other=0.0)
    inside = columns < DIM
    part_o = tl.load(o[:, None] + row * DIM + columns[None, :], mask=used[:, None] & inside[None, :], other=0.0)
    new_m = tl.max(part_m, 0)
    weight = tl.exp(part_m - tl.where(new_m == float("-inf"), 0.0, new_m))
    new_l = tl.sum(part_l * weight, 0)
    new_o = tl.sum(part_o * weight[:, None], 0) / tl.where(new_l == 0.0, 1.0, new_l)
    tl.store(out + row * DIM + columns, new_o.to(out.dtype.element_ty), mask=inside)


def merge_packed(states: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Compute `reference.merge_packed` for fp32 states."""
    out = states.new_empty(shape, dtype=dtype)
    if out.numel() > 0:
        num_rows, dim = shape[:3].numel(), shape[3]
        with torch.cuda.device_of(states):
            launch(
                _merge_packed_kernel, num_rows, (states, out), (num_rows,),
                RANKS=len(states), PADDED_RANKS=triton.next_power_of_2(len(states)),
                DIM=dim, PADDED_DIM=triton.next_power_of_2(dim),
            )  # fmt: skip
    return out
