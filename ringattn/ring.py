"""Run the forward pass and the backward pass of the state ring and of the KV ring.

In the state ring, keys and values stay on their rank. The queries circulate, and their partial softmax states (m, l, o) follow
one hop behind. The diagram shows four ranks with full attention and relays. In "Q3 K0", rank 3's queries attend to rank 0's
keys.

    step        0          1          2          3          4
    rank 0    Q0 K0      Q3 K0      Q2 K0      Q1 K0      Q0 K0 (rest)
    rank 1    Q1 K1      Q0 K1      Q3 K1      Q2 K1      Q1 K1 (rest)
    rank 2    Q2 K2      Q1 K2      Q0 K2      Q3 K2      Q2 K2 (rest)
    rank 3    Q3 K3      Q2 K3      Q1 K3      Q0 K3      Q3 K3 (rest)

    queries   --------->---------->---------->             sent one step ahead of the computation that needs them
    states               ---------->---------->---------->  sent one step after the computation that produced them

In the KV ring, keys and values circulate, and the queries and their state stay. The module `ringattn.planning.schedule`
explains the schedules, with and without relays.

`run_schedule` contains all of the communication. Each pass only defines what circulates, what a local step computes, and how
partial results are merged. Partial results are fp32 (fp64 for fp64 inputs) from the kernel to the last hop. In place of delta =
rowsum(dout * out) - dlse, the backward kernels also accept (out, dlse).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial, wraps
from typing import Any

import torch
from torch import Tensor

from ringattn.comm import connect
from ringattn.comm.pass_graphs import MAX_FORWARD_FLOPS, MAX_INPUT_BYTES
from ringattn.comm.transport import Tensors, Transport, complete_hop, in_call, report_faults, take_rows
from ringattn.kernels import dispatch
from ringattn.kernels.caching import is_capturing, keep_for_graph
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import state_dtype
from ringattn.layout import Layout
from ringattn.mask import Mask
from ringattn.operands import PlainOperands, QuantizedOperands
from ringattn.planning import rank_plan
from ringattn.planning.cost_model import Interconnect
from ringattn.planning.rank_plan import BlockPair, Plan, forced_plan, get_plan
from ringattn.planning.schedule import LocalStep, Schedule
from ringattn.planning.workload import backward_work, forward_work, head_chunk
from ringattn.spec import AttentionSpec
from ringattn.state import PartialState

Compute = Callable[[LocalStep, Tensors, Tensors | None], Tensors | None]
Arrivals = list[tuple[range, Tensors]]  # (rows of the owner's block, returned result)


def run_schedule(
    schedule: Schedule,
    transport: Transport,
    circulating: Tensors,
    compute: Compute,
    own_result: Tensors = (),
    merge: Callable[[Tensors, Tensors], Tensors] = lambda into, _: into,
    merge_arrivals: Callable[[Arrivals], None] | None = None,
    label: str = "ring pass",
) -> None:
    """Execute a ring pass: send blocks, compute with them, and accumulate the results at the owners of the blocks.

    Args:
        circulating: the contiguous tensors of this rank's block, such as (k, v) in the KV ring.
        compute: compute(local_step, block, into) runs attention of one local step. For this rank's own block, `compute`
            accumulates into `into`, which is the local step's slice of `own_result`. For another rank's block, `into` is None,
            and `compute` returns a new partial result, or None if the pass has no results.
        own_result: the result of this rank's own block, updated in place, initially the identity of `merge`.
        merge: merge(a, b) accumulates the partial result b into a, in place, and returns a.
        merge_arrivals: merge_arrivals(arrivals) merges all returned results at the end of the pass. By default, `merge` merges
            each result on arrival.
        label: the name of the pass in the messages of the watchdog.

    Raises:
        RingFault: another rank stopped responding. The error names that rank, the step and the data that did not arrive.
    """
    rank, steps = transport.rank, schedule.by_rank[transport.rank]
    ring_pass = transport.begin(schedule, {"block": circulating, "result": own_result})
    blocks: dict[int, Tensors] = {rank: circulating}  # by owner, in the current step
    results: dict[int, Tensors] = {}  # by owner, to send later
    arrivals: Arrivals = []
    for t, step in enumerate(steps):
        outgoing = [results.pop(m.owner) if m.kind == "result" else blocks[m.owner] for m in step.outgoing]
        hop = transport.watchdog.start(label, t, len(steps), step.incoming)
        try:
            wait = report_faults(partial(ring_pass.exchange, t, outgoing), transport, hop)
            for local_step in step.local_steps:
                # `compute` must return new tensors, because results for other ranks are sent in later steps.
                owner = local_step.owner
                if owner == rank:
                    compute(local_step, take_rows(circulating, local_step.rows), take_rows(own_result, local_step.rows))
                elif (partial_result := compute(local_step, blocks[owner], None)) is not None:
                    # Copy engines and NCCL send contiguous memory only.
                    partial_result = tuple(x.contiguous() for x in partial_result)
                    results[owner] = merge(results[owner], partial_result) if owner in results else partial_result
        # Without `cancel`, the watchdog would end the process because of the unfinished hop.
        except BaseException:
            transport.watchdog.cancel(hop)
            raise
        blocks = {rank: circulating}
        for message, block in zip(step.incoming, complete_hop(wait, transport, hop), strict=True):
            owner = message.owner
            if message.kind == "block":
                blocks[owner] = block
            elif owner == rank and merge_arrivals is not None and ring_pass.keeps_results:
                arrivals.append((message.rows, block))
            elif owner == rank:
                merge(take_rows(own_result, message.rows), block)
            else:
                results[owner] = merge(block, results[owner]) if owner in results else block
    if merge_arrivals is not None:
        merge_arrivals(arrivals)
    ring_pass.end()


def _add(a: Tensors, b: Tensors) -> Tensors:
    return tuple(x.add_(y) for x, y in zip(a, b, strict=True))


def _merge_states(a: Tensors, b: Tensors) -> Tensors:
    return dispatch.merge_states(a, [(0, b)])


def _sum_arrivals(own: Tensors, like: Tensors, sums: list[Tensor], arrivals: Arrivals) -> None:
    for i, (own_part, like_part) in enumerate(zip(own, like, strict=True)):
        parts = [(rows.start, block[i]) for rows, block in arrivals]
        sums.append(dispatch.sum_partials(own_part, parts, like_part.dtype))


def _zeros(*like: Tensor) -> Tensors:
    sizes = [x.numel() for x in like]
    flat = torch.zeros(sum(sizes), dtype=state_dtype(like[0].dtype), device=like[0].device)
    return tuple(part.view(x.shape) for part, x in zip(flat.split(sizes), like, strict=True))


def _in_head_chunks(run: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Make a method of `Ring` run once per chunk of heads. A CUDA graph may replay passes of short shards."""

    @wraps(run)
    def run_chunks(ring: "Ring", *inputs: Any) -> Tensors:
        with in_call(ring.transport):
            q, k, v, *_ = inputs
            ring.spec.record_call(ring.transport, run.__name__, q, k, v)
            count = ring.plan.head_chunks_for_memory(q, k, v)
            if count > 1:
                return run_each_chunk(ring, count, *inputs)
            if ring.can_capture(q, k, v):
                settings = run.__name__, ring.spec[1:], ring.all_to_all_uses_sms
                return ring.transport.graphs.run(ring.plan, settings, partial(run, ring), inputs)
            return run(ring, *inputs)

    def run_each_chunk(ring: "Ring", count: int, q: Tensor, *others: Tensor | None) -> Tensors:
        results: Tensors = ()
        for i in range(count):
            chunk_inputs = (x if x is None else head_chunk(x, count, i).contiguous() for x in (q, *others))
            chunk = run(ring.of_heads(i * (q.shape[2] // count)), *chunk_inputs)
            results = results or tuple(x.new_empty(*x.shape[:2], count * x.shape[2], *x.shape[3:]) for x in chunk)
            for x, y in zip(results, chunk, strict=True):
                head_chunk(x, count, i).copy_(y)
            del chunk, x, y
        return results

    return run_chunks


@dataclass(frozen=True)
class Ring:
    """A ring for one call. The tensors of every method are contiguous, and have the shapes of `ring_attention`."""

    plan: Plan
    transport: Transport
    spec: AttentionSpec
    all_to_all_uses_sms: bool = False  # during attention

    @classmethod
    def of(cls, spec: AttentionSpec, device: torch.device, call: Callable[[], connect.Call] | None = None) -> "Ring":
        """Return the ring that `spec` describes. The first call for a group performs a handshake."""
        transport = connect.connect(spec.group, device, spec.transport, call, relays=spec.route == "relay")
        mask = (spec.before, spec.after), tuple(spec.numbers.tolist())
        if (plan := forced_plan(mask[0])) is None:
            plan = _cached_plan(*mask, spec.layout, spec.seq_len, spec.ranks, transport.rank, device)
            keep_for_graph(plan, device)
        return cls(plan, transport, spec)

    def of_heads(self, first_head: int, all_to_all_uses_sms: bool = False) -> "Ring":
        """Return a copy of this ring for the heads that start at `first_head`."""
        spec = self.spec._replace(first_head=self.spec.first_head + first_head)
        return replace(self, spec=spec, all_to_all_uses_sms=all_to_all_uses_sms or self.all_to_all_uses_sms)

    @property
    def interconnect(self) -> Interconnect:
        return self.transport.interconnect.with_route(self.spec.route)

    @property
    def kernel_options(self) -> dict[str, Any]:
        """Return the options of `dispatch.forward` that all kernels of this ring share."""
        shares_sms = self.all_to_all_uses_sms or self.transport.interconnect.uses_sms
        return {"backend": self.spec.backend, "precision": self.spec.precision, "shares_sms": shares_sms}

    def can_capture(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether a CUDA graph may replay a pass. The pass must be short and equal in all calls."""
        # The dropout seed may change between calls. If `plan.is_fixed`, its tables may change, too.
        if self.transport.graphs is None or self.spec.dropout_p or self.plan.is_fixed or is_capturing(q.device):
            return False
        flops = 2 * q.shape[0] * q.shape[2] * (q.shape[3] + v.shape[3]) * self.plan.pairs / self.plan.layout.ranks
        return flops <= MAX_FORWARD_FLOPS and q.nbytes + k.nbytes + v.nbytes <= MAX_INPUT_BYTES

    @_in_head_chunks
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        """Return out in q's dtype, and lse."""
        work = forward_work(q, k, v, self.spec.precision)
        chosen = self.plan.choose_schedule(self.spec.schedule, work, self.interconnect)
        return (self._forward_state if chosen == "state" else self._forward_kv)(q, k, v)

    @_in_head_chunks
    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None = None
    ) -> Tensors:
        """Return dq, dk, dv in the dtypes of q, k, v."""
        if self.plan.has_queries_without_keys:
            dout, dlse = dispatch.clear_without_keys(lse, dout, dlse)
        if self.spec.precision == "fp8":
            return dispatch.backward_fp8(self._backward, q, k, v, out, lse, dout, dlse)
        return self._backward(q, k, v, out, lse, dout, dlse)

    def _backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Tensors:
        if self.transport.size == 1:
            return self._backward_alone(q, k, v, out, lse, dout, dlse)
        chosen = self.plan.choose_schedule(self.spec.schedule, backward_work(q, k, v), self.interconnect)
        grads = (self._backward_state if chosen == "state" else self._backward_kv)(q, k, v, out, lse, dout, dlse)
        return tuple(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))

    def _prepare(
        self, name: str, results: bool, row_multiple: int = 1
    ) -> tuple[Schedule, dict[LocalStep, tuple[Intervals, dict[str, Any]]]]:
        schedule = self.plan.schedule(name, results, self.interconnect.all_pairs, row_multiple)
        pairs = self.plan.block_pairs(name, schedule)
        return schedule, {local_step: (pair.intervals, self._options(pair)) for local_step, pair in pairs.items()}

    def _options(self, pair: BlockPair) -> dict[str, Any]:
        spec = self.spec
        dropout = Dropout(spec.dropout_p, spec.seed, *pair.positions, spec.first_head) if spec.dropout_p else None
        return {"dropout": dropout, **self.kernel_options}

    def _operands(self, q: Tensor, k: Tensor, v: Tensor) -> PlainOperands | QuantizedOperands:
        return (QuantizedOperands if self.spec.precision == "fp8" else PlainOperands)(q, k, v)

    def _forward_state(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        operands = self._operands(q, k, v)
        schedule, prepared = self._prepare("state", results=True, row_multiple=operands.row_multiple)
        # Rows without local steps keep the empty state, which becomes out = 0 and lse = -inf.
        own_state = PartialState.empty(q, v.shape[-1])
        results: list[Tensor] = []

        def compute(local_step: LocalStep, block: Tensors, into: Tensors | None) -> Tensors:
            intervals, options = prepared[local_step]
            # The kernel's epilogue merges only contiguous states. For several batch entries, a slice of rows is not contiguous.
            incoming = into if q.shape[0] == 1 else None
            state = operands.attend(block, None, intervals, self.spec.scale, incoming, **options)
            if into is None:
                return state
            if incoming is None:
                return _merge_states(into, state)
            for x, y in zip(into, state, strict=True):
                if x.data_ptr() != y.data_ptr():
                    x.copy_(y)
            return into

        def merge_arrivals(arrivals: Arrivals) -> None:
            results.extend(dispatch.merge_states(own_state, [(rows.start, state) for rows, state in arrivals], q.dtype))

        label = "forward of the state ring"
        run_schedule(schedule, self.transport, operands.queries, compute, own_state, _merge_states, merge_arrivals, label)
        return tuple(results)

    def _forward_kv(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        operands = self._operands(q, k, v)
        schedule, prepared = self._prepare("kv", results=False, row_multiple=operands.row_multiple)
        # The last local step also divides o by l, which saves a pass over the state.
        last = schedule.last_owner(self.transport.rank)
        result: Any = None  # the state (m, l, o); after the last local step, (out, lse)

        def compute(local_step: LocalStep, block: Tensors, into: Tensors | None) -> None:
            nonlocal result
            intervals, options = prepared[local_step]
            final = local_step.owner == last
            result = operands.attend(None, block, intervals, self.spec.scale, result, final, **options)

        run_schedule(schedule, self.transport, operands.keys, compute, label="forward of the KV ring")
        return PartialState.empty(q, v.shape[-1]).finalize(q.dtype) if last is None else result

    def _backward_alone(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Tensors:
        _, prepared = self._prepare("kv", results=False)
        if [local_step.rows for local_step in prepared] != [range(k.shape[1])]:  # no query attends to some of the keys
            return self._backward_kv(q, k, v, out, lse, dout, dlse)
        ((intervals, options),) = prepared.values()
        return dispatch.backward(q, k, v, dout, lse, (out, dlse), intervals, self.spec.scale, **options)

    def _backward_state(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Tensors:
        """Let the queries circulate together with dout, lse and delta. Each dq returns to its owner. This rank accumulates dk
        and dv.
        """
        schedule, prepared = self._prepare("state", results=True)
        (own_dq,) = _zeros(q)
        dk: Any = None
        dv: Any = None
        dtype = state_dtype(q.dtype)

        def compute(local_step: LocalStep, block: Tensors, into: Tensors | None) -> Tensors:
            nonlocal dk, dv
            q, dout, lse, delta = block
            intervals, options = prepared[local_step]
            # For a single batch entry, the slice of rows is contiguous, so the kernel can accumulate into the slice.
            (dq,) = (into or (None,)) if q.shape[0] == 1 else (None,)
            partial_dq, dk, dv = dispatch.backward(
                q, k, v, dout, lse, delta, intervals, self.spec.scale, dq, dk, dv, grad_dtype=dtype, **options
            )
            return (partial_dq,) if into is None or dq is not None else _add(into, (partial_dq,))

        label = "backward of the state ring"
        block = q, dout, lse, dispatch.row_delta(out, dout, dlse, self.spec.backend).contiguous()
        grads: list[Tensor] = []
        merge_arrivals = partial(_sum_arrivals, (own_dq,), (q,), grads)
        run_schedule(schedule, self.transport, block, compute, (own_dq,), _add, merge_arrivals, label)
        return *grads, *(_zeros(k, v) if dk is None else (dk, dv))

    def _backward_kv(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Tensors:
        """Let keys and values circulate. The gradients dk and dv return to the owners of k and v. This rank accumulates dq."""
        schedule, prepared = self._prepare("kv", results=True)
        own_grads = _zeros(k, v)
        plain, scale = not self.spec.dropout_p, self.spec.scale
        kernel = dispatch.IncrementalBackward(q, v, dout, lse, (out, dlse), scale, plain=plain, **self.kernel_options)

        def compute(local_step: LocalStep, block: Tensors, into: Tensors | None) -> Tensors:
            intervals, options = prepared[local_step]
            (k, v), (dk, dv) = block, (into or (None, None)) if q.shape[0] == 1 else (None, None)
            partial_grads = kernel.add(k, v, intervals, dk, dv, options["dropout"])
            return partial_grads if into is None or dk is not None else _add(into, partial_grads)

        label = "backward of the KV ring"
        grads: list[Tensor] = []
        merge_arrivals = partial(_sum_arrivals, own_grads, (k, v), grads)
        run_schedule(schedule, self.transport, (k, v), compute, own_grads, _add, merge_arrivals, label)
        return kernel.finish(), *grads


# At 4,096 tokens per rank, 10 us of host time per pass are noticeable. The cache key consists of plain values, so a cache hit
# creates neither a mask nor a layout.
@lru_cache(maxsize=4)
def _cached_plan(
    reach: tuple[int, int],
    numbers: tuple[int, ...],
    layout: str,
    seq_len: int,
    ranks: int,
    rank: int,
    device: torch.device,
) -> Plan:
    mask = Mask.from_numbers(reach, numbers, seq_len)
    return get_plan(mask, Layout(layout, seq_len, ranks), rank, device)


def free_plans() -> None:
    _cached_plan.cache_clear()
    rank_plan.free_plans()
