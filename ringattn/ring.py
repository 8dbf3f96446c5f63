"""Runs a schedule over a transport: the four ring passes, forward and backward of the state ring and of the KV ring.

`circulate` below is the whole of the communication. The passes say what travels, what one visit computes and how results are
merged; partial results stay fp32 (fp64 for fp64 inputs) from the kernel to the last hop.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.dropout import Dropout
from kernels.reference import state_dtype
from ringattn.plan import Plan, backward_bytes, forward_bytes
from ringattn.schedule import Schedule
from ringattn.state import PartialState
from ringattn.transport import Transport

Block = tuple[Tensor, ...]  # tensors of one rank's rows, which stand in dimension 1


def _blank(like: Block, rows: int) -> Block:
    return tuple(x.new_empty(x.shape[0], rows, *x.shape[2:]) for x in like)


def circulate(
    schedule: Schedule,
    transport: Transport,
    rows: list[int],
    traveller: Block,
    visit: Callable[[int, Block], Block | None],
    result_like: Block = (),
    merge: Callable[[Block, Block], Block] | None = None,
) -> Block | None:
    """Carry every rank's `traveller` along the schedule; return this rank's merged result, if its traveller earned one.

    Args:
        rows: rows of every rank's block.
        traveller: this rank's block, contiguous.
        visit: visit(owner, traveller) computes at this rank, and returns the visitor's partial result (None: none).
        result_like: a block with a result's trailing shapes and dtypes.
        merge: two results of the same owner into one.
    """
    rank = transport.rank
    held: dict[int, Block] = {rank: traveller}
    results: dict[int, Block] = {}
    like = {"traveller": traveller, "result": result_like}
    for step in schedule.by_rank[rank]:
        departing = [
            (message, held[message.owner] if message.kind == "traveller" else results.pop(message.owner))
            for message in step.outgoing
        ]
        arriving = [(message, _blank(like[message.kind], rows[message.owner])) for message in step.incoming]
        pending = transport.exchange(
            [(x, message.dst) for message, block in departing for x in block],
            [(x, message.src) for message, block in arriving for x in block],
        )
        for owner in step.owners:
            partial = visit(owner, held[owner])
            if partial is not None:
                results[owner] = merge(results[owner], partial) if owner in results else partial
        pending.wait()
        held = {rank: traveller}
        for message, block in arriving:
            owner = message.owner
            if message.kind == "traveller":
                held[owner] = block
            else:
                results[owner] = merge(block, results[owner]) if owner in results else block
    return results.get(rank)


def _add(a: Block, b: Block) -> Block:
    return tuple(x.add_(y) for x, y in zip(a, b, strict=True))


def _zeros(*like: Tensor) -> Block:
    return tuple(torch.zeros_like(x, dtype=state_dtype(x.dtype)) for x in like)


@dataclass(frozen=True)
class Ring:
    """Everything about a ring pass but its tensors.

    The tensors of every method are contiguous and hold this rank's rows: q (B, N, Hq, D), k (B, N, Hkv, D), v (B, N, Hkv, Dv),
    out and dout (B, N, Hq, Dv), lse and delta (B, N, Hq).
    """

    plan: Plan
    transport: Transport
    scale: float
    dropout_p: float = 0.0
    seed: int = 0
    backend: str = "auto"
    precision: str = "ieee"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, schedule: str = "auto") -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse in fp32)."""
        chosen = self.plan.choose(schedule, forward_bytes(q, k, v), "forward")
        return (self._forward_state if chosen == "state" else self._forward_kv)(q, k, v)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, schedule: str = "auto"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in fp32."""
        chosen = self.plan.choose(schedule, backward_bytes(q, k, v), "backward")
        return (self._backward_state if chosen == "state" else self._backward_kv)(q, k, v, dout, lse, delta)

    def _options(self, query_rank: int, key_rank: int) -> dict[str, Any]:
        """What the kernels are told about a block of one rank's queries and another's keys, besides its intervals."""
        positions = self.plan.positions
        dropout = Dropout(self.dropout_p, self.seed, positions[query_rank], positions[key_rank]) if self.dropout_p else None
        return {"dropout": dropout, "backend": self.backend, "precision": self.precision}

    def _forward_state(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        def visit(owner: int, traveller: Block) -> PartialState:
            block = owner, self.transport.rank
            interval = self.plan.intervals(*block)
            return PartialState(*dispatch.forward(*traveller, k, v, *interval, self.scale, **self._options(*block)))

        def merge(a: Block, b: Block) -> PartialState:
            return PartialState(*a).merge(PartialState(*b))

        schedule = self.plan.schedule("state", results=True)
        nothing = PartialState.empty(q, v.shape[-1])
        state = circulate(schedule, self.transport, self.plan.rows, (q,), visit, nothing, merge)
        return (nothing if state is None else state).finalize(q.dtype)

    def _forward_kv(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        schedule = self.plan.schedule("kv", results=False)
        last = schedule.last_owner(self.transport.rank)
        state = PartialState.empty(q, v.shape[-1])

        def visit(owner: int, traveller: Block) -> None:
            nonlocal state
            block = self.transport.rank, owner
            interval, final = self.plan.intervals(*block), owner == last
            state = dispatch.forward(q, *traveller, *interval, self.scale, state, final, **self._options(*block))

        circulate(schedule, self.transport, self.plan.rows, (k, v), visit)
        return state.finalize(q.dtype) if last is None else state

    def _backward_state(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dk, dv = _zeros(k, v)

        def visit(owner: int, traveller: Block) -> Block:
            q, dout, lse, delta = traveller
            (dq,) = _zeros(q)
            block = owner, self.transport.rank
            interval = self.plan.intervals(*block)
            dispatch.backward(q, k, v, dout, lse, delta, *interval, self.scale, dq, dk, dv, **self._options(*block))
            return (dq,)

        schedule = self.plan.schedule("state", results=True)
        nothing = _zeros(q)
        dq = circulate(schedule, self.transport, self.plan.rows, (q, dout, lse, delta), visit, nothing, _add)
        return *(nothing if dq is None else dq), dk, dv

    def _backward_kv(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        (dq,) = _zeros(q)

        def visit(owner: int, traveller: Block) -> Block:
            k, v = traveller
            dk, dv = _zeros(k, v)
            block = self.transport.rank, owner
            interval = self.plan.intervals(*block)
            dispatch.backward(q, k, v, dout, lse, delta, *interval, self.scale, dq, dk, dv, **self._options(*block))
            return dk, dv

        schedule = self.plan.schedule("kv", results=True)
        nothing = _zeros(k, v)
        dkv = circulate(schedule, self.transport, self.plan.rows, (k, v), visit, nothing, _add)
        return dq, *(nothing if dkv is None else dkv)
