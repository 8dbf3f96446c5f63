"""Runs a schedule over a transport: the four ring passes, forward and backward of the state ring and of the KV ring.

`circulate` below is the whole of the communication. The passes say what travels, what one visit computes and how results are
merged; partial results stay fp32 (fp64 for fp64 inputs) from the kernel to the last hop.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from ringattn.comm.transport import Block, Transport, completed, cut, watched
from ringattn.kernels import dispatch
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import state_dtype
from ringattn.planning import rank_plan as planning
from ringattn.planning.rank_plan import Plan, part_of_heads
from ringattn.planning.schedule import Schedule, Visit
from ringattn.state import PartialState


def circulate(
    schedule: Schedule,
    transport: Transport,
    traveller: Block,
    visit: Callable[[Visit, Block, Block | None], Block | None],
    home: Block = (),
    merge: Callable[[Block, Block], Block] | None = None,
    settle: Callable[[list[tuple[range, Block]]], None] | None = None,
    label: str = "ring pass",
) -> None:
    """Carry every rank's `traveller` along the schedule, and gather what it earns in `home`.

    Args:
        traveller: this rank's block, contiguous.
        visit: visit(visit, traveller, into) computes at this rank with the visit's rows of a traveller. It returns the
            visitor's partial result (None: none); given `into`, rows of `home`, it merges the result into them instead.
        home: this rank's own result, to be updated in place: at first that of seeing nothing.
        merge: merge(a, b) updates the result `a` by the result `b` of the same rows, and returns it.
        settle: settle(arrived) is called at the end, with the results that have come home, (rows, block), but have not been
            merged: all of them if the transport can hold as many, or else none.
        label: what the pass is called in messages to people.
    """
    rank, steps = transport.rank, schedule.by_rank[transport.rank]
    journey = transport.begin(schedule, {"traveller": traveller, "result": home})
    held: dict[int, Block] = {rank: traveller}
    results: dict[int, Block] = {}
    arrived: list[tuple[range, Block]] = []
    for t, step in enumerate(steps):
        departing = [results.pop(m.owner) if m.kind == "result" else held[m.owner] for m in step.outgoing]
        hop = transport.watchdog.start(label, t, len(steps), step.incoming)
        try:
            arrive = watched(partial(journey.exchange, t, departing), transport, hop)
            for here in step.visits:
                if here.owner == rank:
                    visit(here, cut(traveller, here.rows), cut(home, here.rows))
                elif (earned := visit(here, held[here.owner], None)) is not None:
                    earned = tuple(x.contiguous() for x in earned)
                    results[here.owner] = merge(results[here.owner], earned) if here.owner in results else earned
        except BaseException:
            transport.watchdog.withdraw(hop)
            raise
        held = {rank: traveller}
        for message, block in zip(step.incoming, completed(arrive, transport, hop), strict=True):
            owner = message.owner
            if message.kind == "traveller":
                held[owner] = block
            elif owner == rank and settle is not None and journey.holds_results:
                arrived.append((message.rows, block))
            elif owner == rank:
                merge(cut(home, message.rows), block)
            else:
                results[owner] = merge(block, results[owner]) if owner in results else block
    if settle is not None:
        settle(arrived)
    journey.end()


def _add(a: Block, b: Block) -> Block:
    return tuple(x.add_(y) for x, y in zip(a, b, strict=True))


def _merge(a: Block, b: Block) -> Block:
    for x, y in zip(a, PartialState(*a).merge(PartialState(*b)), strict=True):
        x.copy_(y)
    return a


class _Total:
    """Gradients at home with all that came for them, in the dtypes of `like`."""

    def __init__(self, home: Block, like: Block) -> None:
        self.home, self.like = home, like
        self.rounded: Block = ()

    def settle(self, arrived: list[tuple[range, Block]]) -> None:
        parts = [[(rows.start, block[i]) for rows, block in arrived] for i in range(len(self.home))]
        self.rounded = tuple(dispatch.total(*x, y.dtype) for *x, y in zip(self.home, parts, self.like, strict=True))


def _zeros(*like: Tensor) -> Block:
    flat = torch.zeros(sum(x.numel() for x in like), dtype=state_dtype(like[0].dtype), device=like[0].device)
    return tuple(part.view(x.shape) for part, x in zip(flat.split([x.numel() for x in like]), like, strict=True))


def _by_heads(run: Callable[..., Block]) -> Callable[..., Block]:
    """A method of `Ring` that works off a part of the heads after the other, as many as `Plan.passes` says."""

    @wraps(run)
    def in_passes(ring: "Ring", *inputs: Tensor | None, schedule: str = "auto") -> Block:
        q, k, v, *_ = inputs
        count = ring.plan.passes(q, k, v)
        if count == 1:
            return run(ring, *inputs, schedule=schedule)
        results: Block = ()
        for i in range(count):
            one = replace(ring, first_head=ring.first_head + i * (q.shape[2] // count))
            part = run(one, *(x if x is None else part_of_heads(x, count, i).contiguous() for x in inputs), schedule=schedule)
            results = results or tuple(x.new_empty(*x.shape[:2], count * x.shape[2], *x.shape[3:]) for x in part)
            for x, y in zip(results, part, strict=True):
                part_of_heads(x, count, i).copy_(y)
            del part, x, y  # before the next pass asks for memory
        return results

    return in_passes


@dataclass(frozen=True)
class Ring:
    """Everything about a ring pass but its tensors.

    The tensors of every method are contiguous and hold this rank's rows: q (B, N, Hq, D), k (B, N, Hkv, D), v (B, N, Hkv, Dv),
    out and dout (B, N, Hq, Dv), lse and dlse (B, N, Hq).
    """

    plan: Plan
    transport: Transport
    scale: float
    dropout_p: float = 0.0
    seed: int = 0
    first_head: int = 0
    backend: str = "auto"
    precision: str = "ieee"
    beside_kernels: bool = False  # whether other kernels move messages meanwhile, on processors that attention would use

    @property
    def shares_sms(self) -> bool:
        """Whether processors are shared, see `ringattn.kernels.dispatch.forward`."""
        return self.beside_kernels or self.transport.fabric.on_processors

    @_by_heads
    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, schedule: str = "auto") -> tuple[Tensor, Tensor]:
        """(out in q's dtype, lse in fp32)."""
        chosen = self.plan.choose(schedule, planning.forward_work(q, k, v), self.transport.fabric)
        return (self._forward_state if chosen == "state" else self._forward_kv)(q, k, v)

    @_by_heads
    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None = None,
        *,
        schedule: str = "auto",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the dtypes of q, k, v."""
        if self.transport.size == 1:
            return self._backward_alone(q, k, v, dout, lse, (out, dlse))
        chosen = self.plan.choose(schedule, planning.backward_work(q, k, v), self.transport.fabric)
        grads = (self._backward_state if chosen == "state" else self._backward_kv)(q, k, v, dout, lse, (out, dlse))
        return tuple(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))

    def _visits(self, name: str, results: bool) -> tuple[Schedule, dict[Visit, tuple[Intervals, dict[str, Any]]]]:
        """The schedule, and for each of this rank's visits the intervals and the options that the kernels are told."""
        schedule = self.plan.schedule(name, results, self.transport.fabric.all_pairs)
        blocks = self.plan.blocks(name, schedule)
        return schedule, {visit: (block.intervals, self._options(block)) for visit, block in blocks.items()}

    def _options(self, block: planning.Block) -> dict[str, Any]:
        dropout = Dropout(self.dropout_p, self.seed, *block.positions, self.first_head) if self.dropout_p else None
        return {"dropout": dropout, "backend": self.backend, "precision": self.precision, "shares_sms": self.shares_sms}

    def _forward_state(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        schedule, visits = self._visits("state", results=True)
        home = PartialState.empty(q, v.shape[-1])

        def visit(here: Visit, traveller: Block, into: Block | None) -> Block:
            intervals, options = visits[here]
            earned = dispatch.forward(*traveller, k, v, intervals, self.scale, **options)
            return earned if into is None else _merge(into, earned)

        circulate(schedule, self.transport, (q,), visit, home, _merge, label="forward of the state ring")
        return home.finalize(q.dtype)

    def _forward_kv(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        schedule, visits = self._visits("kv", results=False)
        last = schedule.last_owner(self.transport.rank)
        state = None

        def visit(here: Visit, traveller: Block, into: Block | None) -> None:
            nonlocal state
            intervals, options = visits[here]
            final = here.owner == last
            state = dispatch.forward(q, *traveller, intervals, self.scale, state, final, **options)

        circulate(schedule, self.transport, (k, v), visit, label="forward of the KV ring")
        return PartialState.empty(q, v.shape[-1]).finalize(q.dtype) if last is None else state

    def _backward_alone(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """On a ring of one there is nothing to add up."""
        _, visits = self._visits("kv", results=False)
        if not visits:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        ((intervals, options),) = visits.values()
        return dispatch.backward(q, k, v, dout, lse, delta, intervals, self.scale, **options)

    def _backward_state(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        schedule, visits = self._visits("state", results=True)
        (home,) = _zeros(q)
        dk = dv = None
        dtype = state_dtype(q.dtype)

        def visit(here: Visit, traveller: Block, into: Block | None) -> Block:
            nonlocal dk, dv
            q, dout, lse, delta = traveller
            intervals, options = visits[here]
            (dq,) = (into or (None,)) if q.shape[0] == 1 else (None,)
            earned, dk, dv = dispatch.backward(
                q, k, v, dout, lse, delta, intervals, self.scale, dq, dk, dv, grad_dtype=dtype, **options
            )
            return (earned,) if into is None or dq is not None else _add(into, (earned,))

        label = "backward of the state ring"
        traveller = q, dout, lse, dispatch.row_delta(delta[0], dout, delta[1], self.backend).contiguous()
        grads = _Total((home,), (q,))
        circulate(schedule, self.transport, traveller, visit, (home,), _add, grads.settle, label)
        return *grads.rounded, *(_zeros(k, v) if dk is None else (dk, dv))

    def _backward_kv(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: tuple[Tensor, Tensor | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        schedule, visits = self._visits("kv", results=True)
        home = _zeros(k, v)
        options = {"backend": self.backend, "precision": self.precision, "shares_sms": self.shares_sms}
        gathered = dispatch.blockwise_backward(q, v, dout, lse, delta, self.scale, plain=not self.dropout_p, **options)

        def visit(here: Visit, traveller: Block, into: Block | None) -> Block:
            intervals, options = visits[here]
            given = (into or (None, None)) if q.shape[0] == 1 else (None, None)
            earned = gathered.add(*traveller, intervals, *given, options["dropout"])
            return earned if into is None or given[0] is not None else _add(into, earned)

        grads = _Total(home, (k, v))
        circulate(schedule, self.transport, (k, v), visit, home, _add, grads.settle, "backward of the KV ring")
        return gathered.finish(), *grads.rounded
