"""Run the forward pass and the backward pass of two kinds of rings: the state ring and the KV ring.

In the state ring, keys and values stay on their rank. The queries circulate, and their partial softmax states (m, l, o) follow
one hop behind them. In the following diagram, four ranks compute full attention, and neighbours relay the blocks. "Q3 K0" means
that a rank computes the attention of rank 3's queries to rank 0's keys:

    step        0          1          2          3          4
    rank 0    Q0 K0      Q3 K0      Q2 K0      Q1 K0      Q0 K0 (rest)
    rank 1    Q1 K1      Q0 K1      Q3 K1      Q2 K1      Q1 K1 (rest)
    rank 2    Q2 K2      Q1 K2      Q0 K2      Q3 K2      Q2 K2 (rest)
    rank 3    Q3 K3      Q2 K3      Q1 K3      Q0 K3      Q3 K3 (rest)

    queries   --------->---------->---------->             sent one step ahead of the computation that needs them
    states               ---------->---------->---------->  sent one step after the computation that produced them

While step t computes, the queries for step t + 1 and the states of step t - 1 are in flight. Communication is therefore hidden
as long as a step of attention takes longer than a hop. Each rank divides its own queries into two parts. In step 0, the first
part attends to the rank's own keys. In the last step, the rest attends to these keys. Meanwhile, the last states return to
their owners, so the computation of the last step hides this hop.

In the KV ring, keys and values circulate, and the queries and their softmax state stay on their rank.

With precision="fp8", the blocks of the forward pass (the queries, or the keys and values) circulate in FP8, see
`ringattn.operands`. States stay fp32. The backward pass also computes with the rounded inputs, but these circulate in the dtype
of the original inputs.

If the transport connects every pair of ranks directly, neither ring relays blocks. Each rank then receives a block directly
from the owner of the block, and sends the result directly back to this owner. In the forward pass of the KV ring, there are no
results to send back. The schedule (`ringattn.planning.schedule`) says whether blocks are relayed. The code of this module is
the same for both kinds of schedules.

`run_schedule` contains all of the communication. The four passes below this function (`_forward_state`, `_forward_kv`,
`_backward_state` and `_backward_kv`) only define what circulates, what one local step computes, and how two partial results are
merged. Partial results are fp32 tensors (fp64 tensors for fp64 inputs) from the kernel to the last hop.

The backward passes need delta = rowsum(dout * out) - dlse, one number per query and head (see `dispatch.row_delta`). Instead of
delta, the kernels also accept the tuple (out, dlse), from which they compute delta.
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
from ringattn.operands import Operands, PlainOperands, QuantizedOperands
from ringattn.planning import rank_plan
from ringattn.planning.cost_model import Interconnect
from ringattn.planning.rank_plan import BlockPair, Plan, forced_plan, get_plan
from ringattn.planning.schedule import LocalStep, Schedule
from ringattn.planning.workload import backward_work, forward_work, head_chunk
from ringattn.spec import AttentionSpec
from ringattn.state import PartialState

Compute = Callable[[LocalStep, Tensors, Tensors | None], Tensors | None]
Arrivals = list[tuple[range, Tensors]]  # (rows of the owner's block, result) for each result that has returned to its owner


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
    """Send the blocks as the schedule says, compute with them, and accumulate the results at the owners of the blocks.

    Args:
        schedule: what each rank sends, receives and computes at each step.
        transport: this rank's connection to the others.
        circulating: this rank's block, a tuple of contiguous tensors: (q,) in the forward pass of the state ring, (k, v) in the
            KV ring.
        compute: compute(local_step, block, into) runs attention between this rank's resident tensors and `block`. `block`
            contains exactly the rows that the local step names, so `compute` does not slice `block`. If `into` is given, `into`
            contains the same rows of `own_result`, and `compute` accumulates into these rows in place. If `into` is None,
            `compute` returns a new partial result, which is sent to the owner. In a pass without results, `compute` returns
            None.
        own_result: the result of this rank's own block, which is updated in place. The caller initialises this result to the
            identity of `merge`. A pass that sends no results uses the default, an empty tuple.
        merge: merge(a, b) accumulates the partial result b into a, in place, and returns a.
        merge_arrivals: merge_arrivals(arrivals) is called once, at the end of the pass. `arrivals` lists the results that have
            returned to this rank and were not merged yet. If the transport can keep all results until the end of the pass,
            `arrivals` contains all results. Otherwise each result is merged when it arrives, and `arrivals` is empty. If
            `merge_arrivals` is None, every result is merged when it arrives.
        label: the name of the pass in the messages of the watchdog.

    Raises:
        RingFault: another rank stopped responding. The message names the rank, the step and what this rank was waiting for.
    """
    rank, steps = transport.rank, schedule.by_rank[transport.rank]
    # The transport derives the shapes and dtypes of its receive buffers from one example of a block and one example of a
    # result.
    ring_pass = transport.begin(schedule, {"block": circulating, "result": own_result})
    blocks: dict[int, Tensors] = {rank: circulating}  # the blocks at this rank in the current step, by owner
    results: dict[int, Tensors] = {}  # the partial results that this rank sends in one of the next steps, by owner
    arrivals: Arrivals = []
    for t, step in enumerate(steps):
        # The sends start before the computation, so that the messages of this step are in flight while its kernels run.
        outgoing = [results.pop(m.owner) if m.kind == "result" else blocks[m.owner] for m in step.outgoing]
        hop = transport.watchdog.start(label, t, len(steps), step.incoming)
        try:
            wait = report_faults(partial(ring_pass.exchange, t, outgoing), transport, hop)
            for local_step in step.local_steps:
                # A rank accumulates the result of its own block in place. A partial result for another rank must be in new
                # tensors, because this rank sends the partial result in a later step.
                owner = local_step.owner
                if owner == rank:
                    compute(local_step, take_rows(circulating, local_step.rows), take_rows(own_result, local_step.rows))
                elif (partial_result := compute(local_step, blocks[owner], None)) is not None:
                    # Copy engines and NCCL send contiguous memory only.
                    partial_result = tuple(x.contiguous() for x in partial_result)
                    results[owner] = merge(results[owner], partial_result) if owner in results else partial_result
        # If an exception ends the pass, the watchdog must stop watching the hop. Otherwise it would end the process after the
        # timeout. BaseException includes KeyboardInterrupt and SystemExit.
        except BaseException:
            transport.watchdog.cancel(hop)
            raise
        # All local steps of this step are finished, and no later step needs their blocks again. The blocks are released here,
        # before the incoming blocks of the next step are stored.
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
                # A relayed result passes through this rank on its way to the owner. If this rank has also computed a partial
                # result for this owner, the two results are merged, and this rank sends the merged result.
                results[owner] = merge(block, results[owner]) if owner in results else block
    if merge_arrivals is not None:
        merge_arrivals(arrivals)
    ring_pass.end()


def _add(a: Tensors, b: Tensors) -> Tensors:
    """Add the partial gradients `b` to the partial gradients `a`, in place, and return `a`."""
    return tuple(x.add_(y) for x, y in zip(a, b, strict=True))


def _merge_states(a: Tensors, b: Tensors) -> Tensors:
    """Merge the partial softmax state `b` into the state `a`, in place, and return `a`."""
    return dispatch.merge_states(a, [(0, b)])


def _sum_arrivals(own: Tensors, like: Tensors, sums: list[Tensor], arrivals: Arrivals) -> None:
    """Sum this rank's own gradients and the gradients that have arrived from other ranks, and append the sums to `sums`.

    The sums are rounded to the dtypes of `like`.
    """
    # On a GPU, one kernel reads all arrivals of a tensor and writes the rounded sum. If the arrivals were added one after the
    # other, the fp32 sum would be read and written once per arrival.
    for i, (own_part, like_part) in enumerate(zip(own, like, strict=True)):
        parts = [(rows.start, block[i]) for rows, block in arrivals]
        sums.append(dispatch.sum_partials(own_part, parts, like_part.dtype))


def _zeros(*like: Tensor) -> Tensors:
    """Return tensors of zeros that have the shapes of the given tensors and the dtype of states."""
    # All tensors are slices of one allocation, so one kernel clears the memory of all tensors.
    sizes = [x.numel() for x in like]
    flat = torch.zeros(sum(sizes), dtype=state_dtype(like[0].dtype), device=like[0].device)
    return tuple(part.view(x.shape) for part, x in zip(flat.split(sizes), like, strict=True))


def _in_head_chunks(run: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """Make a method of `Ring` process the heads in chunks, which limits the peak memory of the method.

    The method runs one ring pass per chunk. `Plan.head_chunks_for_memory` returns the number of chunks. A pass of a short shard
    may be replayed from a CUDA graph.
    """

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
            # The results of the first chunk determine the dtypes and the last dimensions. Therefore the tensors for all heads
            # are allocated only after the first chunk.
            results = results or tuple(x.new_empty(*x.shape[:2], count * x.shape[2], *x.shape[3:]) for x in chunk)
            for x, y in zip(results, chunk, strict=True):
                head_chunk(x, count, i).copy_(y)
            del chunk, x, y  # the next chunk can reuse the memory of these tensors
        return results

    return run_chunks


@dataclass(frozen=True)
class Ring:
    """The settings of a ring pass: the plan, the transport and the spec of the call. The tensors are arguments of the methods.

    The tensors of every method are contiguous and hold this rank's tokens: q (B, N, Hq, D), k (B, N, Hkv, D), v (B, N, Hkv,
    Dv), out and dout (B, N, Hq, Dv), lse, dlse and delta (B, N, Hq).
    """

    plan: Plan
    transport: Transport
    spec: AttentionSpec
    all_to_all_uses_sms: bool = False  # whether kernels of an all-to-all run at the same time as the kernels of attention

    @classmethod
    def of(cls, spec: AttentionSpec, device: torch.device, call: Callable[[], connect.Call] | None = None) -> "Ring":
        """Return the ring that `spec` describes. The first call for a group performs a handshake, see `connect.connect`."""
        transport = connect.connect(spec.group, device, spec.transport, call, relays=spec.route == "relay")
        # The lengths of the documents become a tuple, because a tensor cannot be the key of a cache. The host can read the
        # lengths without waiting for the GPU, because the tensor of the lengths is always on the CPU.
        mask = spec.is_causal, spec.window, tuple(spec.documents.tolist())
        if (plan := forced_plan()) is None:
            plan = _cached_plan(*mask, spec.layout, spec.seq_len, spec.ranks, transport.rank, device)
            keep_for_graph(plan, device)
        return cls(plan, transport, spec)

    def of_heads(self, first_head: int, all_to_all_uses_sms: bool = False) -> "Ring":
        """Return a ring for a chunk of the heads.

        Args:
            first_head: the index of the chunk's first head among this ring's heads. Only the dropout depends on this index.
            all_to_all_uses_sms: with True, the field of the same name becomes True. With False, the field keeps its value.
        """
        spec = self.spec._replace(first_head=self.spec.first_head + first_head)
        return replace(self, spec=spec, all_to_all_uses_sms=all_to_all_uses_sms or self.all_to_all_uses_sms)

    @property
    def interconnect(self) -> Interconnect:
        """The interconnect between the ranks, with the route that the spec names."""
        return self.transport.interconnect.with_route(self.spec.route)

    @property
    def kernel_options(self) -> dict[str, Any]:
        """The options that are the same for all kernels of this ring, see `ringattn.kernels.dispatch.forward`."""
        shares_sms = self.all_to_all_uses_sms or self.transport.interconnect.uses_sms
        return {"backend": self.spec.backend, "precision": self.spec.precision, "shares_sms": shares_sms}

    def can_capture(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return whether a CUDA graph may replay a pass, because the shard is short and the pass is the same in every call."""
        # The seed of the dropout changes, and so do the tables of a fixed plan.
        if self.transport.graphs is None or self.spec.dropout_p or self.plan.is_fixed or is_capturing(q.device):
            return False
        flops = 2 * q.shape[0] * q.shape[2] * (q.shape[3] + v.shape[3]) * self.plan.pairs / self.plan.layout.ranks
        return flops <= MAX_FORWARD_FLOPS and q.nbytes + k.nbytes + v.nbytes <= MAX_INPUT_BYTES

    @_in_head_chunks
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        """Return out in q's dtype, and lse in fp32 (fp64 for fp64 inputs)."""
        work = forward_work(q, k, v, self.spec.precision)
        chosen = self.plan.choose_schedule(self.spec.schedule, work, self.interconnect)
        return (self._forward_state if chosen == "state" else self._forward_kv)(q, k, v)

    @_in_head_chunks
    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None = None
    ) -> Tensors:
        """Return dq, dk, dv in the dtypes of q, k, v."""
        if self.spec.precision == "fp8":
            # Every rank rounds the same blocks as in the forward pass.
            return dispatch.backward_fp8(self._backward, q, k, v, out, lse, dout, dlse)
        return self._backward(q, k, v, out, lse, dout, dlse)

    def _backward(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Tensors:
        # A single rank receives no partial gradients from other ranks. The kernel can therefore write the gradients in the
        # dtypes of the inputs.
        if self.transport.size == 1:
            return self._backward_alone(q, k, v, out, lse, dout, dlse)
        chosen = self.plan.choose_schedule(self.spec.schedule, backward_work(q, k, v), self.interconnect)
        grads = (self._backward_state if chosen == "state" else self._backward_kv)(q, k, v, out, lse, dout, dlse)
        return tuple(grad.to(x.dtype) for grad, x in zip(grads, (q, k, v), strict=True))

    def _prepare(
        self, name: str, results: bool, row_multiple: int = 1
    ) -> tuple[Schedule, dict[LocalStep, tuple[Intervals, dict[str, Any]]]]:
        """Return the schedule, and the intervals and kernel options of each local step of this rank.

        The arguments are as for `Plan.schedule`.

        The host computes all of these values before the pass begins, so that the host does not delay a pass in progress.
        """
        # All layers of a model use the same plan, so only the first layer computes the schedule and the intervals.
        schedule = self.plan.schedule(name, results, self.interconnect.all_pairs, row_multiple)
        pairs = self.plan.block_pairs(name, schedule)
        return schedule, {local_step: (pair.intervals, self._options(pair)) for local_step, pair in pairs.items()}

    def _options(self, pair: BlockPair) -> dict[str, Any]:
        spec = self.spec
        dropout = Dropout(spec.dropout_p, spec.seed, *pair.positions, spec.first_head) if spec.dropout_p else None
        return {"dropout": dropout, **self.kernel_options}

    def _operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        return (QuantizedOperands if self.spec.precision == "fp8" else PlainOperands)(q, k, v)

    def _forward_state(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        """Compute the forward pass of the state ring, in which the circulating queries attend to the resident keys."""
        operands = self._operands(q, k, v)
        schedule, prepared = self._prepare("state", results=True, row_multiple=operands.row_multiple)
        # The empty state is the identity of the merge. If no local step covers a row of this rank's queries, the row keeps the
        # empty state, which is finalised to out = 0 and lse = -inf.
        own_state = PartialState.empty(q, v.shape[-1])
        results: list[Tensor] = []

        def compute(local_step: LocalStep, block: Tensors, into: Tensors | None) -> Tensors:
            intervals, options = prepared[local_step]
            # The epilogue of the kernel merges the incoming state, which must be contiguous. A slice of rows is contiguous only
            # if there is one batch entry.
            incoming = into if q.shape[0] == 1 else None
            state = operands.attend(block, None, intervals, self.spec.scale, incoming, **options)
            if into is None:
                return state
            if incoming is None:
                return _merge_states(into, state)
            for x, y in zip(into, state, strict=True):
                if x.data_ptr() != y.data_ptr():  # this backend returns new tensors
                    x.copy_(y)
            return into

        def merge_arrivals(arrivals: Arrivals) -> None:
            # One kernel reads all states that have arrived and writes the output.
            results.extend(dispatch.merge_states(own_state, [(rows.start, state) for rows, state in arrivals], q.dtype))

        label = "forward of the state ring"
        run_schedule(schedule, self.transport, operands.queries, compute, own_state, _merge_states, merge_arrivals, label)
        return tuple(results)

    def _forward_kv(self, q: Tensor, k: Tensor, v: Tensor) -> Tensors:
        """Compute the forward pass of the KV ring, in which the kernels update the state of the resident queries in place."""
        operands = self._operands(q, k, v)
        schedule, prepared = self._prepare("kv", results=False, row_multiple=operands.row_multiple)
        # The kernel of the last local step divides o by l and returns (out, lse). A separate kernel for the division would
        # read and write the whole state once more.
        last = schedule.last_owner(self.transport.rank)
        result: Any = None  # the state (m, l, o) of the resident queries; after the last local step, the tuple (out, lse)

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
        """Compute the backward pass of a ring of one rank. The kernel returns the gradients in the dtypes of the inputs."""
        _, prepared = self._prepare("kv", results=False)
        if not prepared:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        ((intervals, options),) = prepared.values()
        return dispatch.backward(q, k, v, dout, lse, (out, dlse), intervals, self.spec.scale, **options)

    def _backward_state(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Tensors:
        """Compute the backward pass of the state ring, in which the queries circulate together with dout, lse and delta.

        dq returns to the owner of the queries, and dk and dv accumulate on this rank.
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
            # The kernel can accumulate into a slice of rows only if the slice is contiguous, so there must be only one batch
            # entry. With several batch entries, the kernel writes a new dq, and `_add` adds this dq to the slice afterwards.
            (dq,) = (into or (None,)) if q.shape[0] == 1 else (None,)
            partial_dq, dk, dv = dispatch.backward(
                q, k, v, dout, lse, delta, intervals, self.spec.scale, dq, dk, dv, grad_dtype=dtype, **options
            )
            return (partial_dq,) if into is None or dq is not None else _add(into, (partial_dq,))

        label = "backward of the state ring"
        # The owner of the queries computes delta = rowsum(dout * out) - dlse once. Sending delta takes fewer bytes than sending
        # `out`: delta has one number per row and head, and `out` has Dv numbers per row and head.
        block = q, dout, lse, dispatch.row_delta(out, dout, dlse, self.spec.backend).contiguous()
        grads: list[Tensor] = []
        merge_arrivals = partial(_sum_arrivals, (own_dq,), (q,), grads)
        run_schedule(schedule, self.transport, block, compute, (own_dq,), _add, merge_arrivals, label)
        return *grads, *(_zeros(k, v) if dk is None else (dk, dv))

    def _backward_kv(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> Tensors:
        """Compute the backward pass of the KV ring, in which keys and values circulate.

        dk and dv return to the owner of the keys, and dq accumulates on this rank.
        """
        schedule, prepared = self._prepare("kv", results=True)
        own_grads = _zeros(k, v)
        # `IncrementalBackward` accumulates dq over all local steps. The work that does not depend on the keys, such as the
        # computation of delta from (out, dlse), is done only once.
        plain, scale = not self.spec.dropout_p, self.spec.scale
        kernel = dispatch.IncrementalBackward(q, v, dout, lse, (out, dlse), scale, plain=plain, **self.kernel_options)

        def compute(local_step: LocalStep, block: Tensors, into: Tensors | None) -> Tensors:
            intervals, options = prepared[local_step]
            # As in `_backward_state`, the kernel can accumulate in place only if the slices of rows are contiguous, so there
            # must be only one batch entry.
            (k, v), (dk, dv) = block, (into or (None, None)) if q.shape[0] == 1 else (None, None)
            partial_grads = kernel.add(k, v, intervals, dk, dv, options["dropout"])
            return partial_grads if into is None or dk is not None else _add(into, partial_grads)

        label = "backward of the KV ring"
        grads: list[Tensor] = []
        merge_arrivals = partial(_sum_arrivals, own_grads, (k, v), grads)
        run_schedule(schedule, self.transport, (k, v), compute, own_grads, _add, merge_arrivals, label)
        return kernel.finish(), *grads


# Every attention layer of a model looks up the plan in this cache. At 4,096 tokens per rank, even 10 us on the host matter.
# Therefore the key of this cache consists of plain values from the `AttentionSpec`, and a lookup does not build a mask or a
# layout.
@lru_cache(maxsize=4)
def _cached_plan(
    is_causal: bool,
    window: int,
    documents: tuple[int, ...],
    layout: str,
    seq_len: int,
    ranks: int,
    rank: int,
    device: torch.device,
) -> Plan:
    mask = Mask.from_lengths(is_causal, window or None, documents, seq_len)
    return get_plan(mask, Layout(layout, seq_len, ranks), rank, device)


def free_plans() -> None:
    """Free all plans. Later calls compute and log their choices of a schedule again, as the first calls of a job do."""
    _cached_plan.cache_clear()
    rank_plan.free_plans()
