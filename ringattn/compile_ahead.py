"""Compile the kernels of attention on several ranks at a time.

Triton compiles a kernel at its first call, which takes several seconds on one core. All ranks of a host need the same kernels.
Here, each rank begins with a different kernel. When a rank reaches the kernels of other ranks, it finds them in Triton's cache
on disk.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ringattn.kernels import dispatch
from ringattn.planning.rank_plan import Plan
from ringattn.state import PartialState


def call_kernels(plan: Plan, q: Tensor, k: Tensor, v: Tensor, backend: str, first: int) -> None:
    """Call every kernel of the KV ring once, without messages.

    Args:
        plan: a plan that is used for nothing else. It computes the tables of the kernels.
        q, k, v: tensors like those of this rank in later calls, see `ring_attention`. Their values do not matter.
        backend: as for `ring_attention`.
        first: the number of the kernel with which this rank begins.
    """
    scale, dtype = q.shape[-1] ** -0.5, q.dtype
    pairs = plan.block_pairs("kv", plan.schedule("kv", False, all_pairs=True))
    intervals = next(pair.intervals for step, pair in pairs.items() if step.owner == plan.rank)
    out, lse = PartialState.empty(q, v.shape[-1]).finalize(dtype)
    forward = partial(dispatch.forward, q, k, v, intervals, scale, backend=backend)

    def backward(*accumulators: Tensor) -> None:
        kernel = dispatch.IncrementalBackward(q, v, out, lse, (out, None), scale, backend)
        kernel.add(k, v, intervals, *accumulators)
        kernel.finish()

    calls: list[Callable] = [
        partial(forward, None, True),
        partial(dispatch.backward, q, k, v, out, lse, (out, None), intervals, scale, backend=backend),
    ]
    if plan.layout.ranks > 1:
        state = PartialState.empty(q, v.shape[-1])
        calls = [
            forward,
            partial(forward, state),
            partial(forward, state, True),
            backward,
            partial(backward, k.new_zeros(k.shape, dtype=lse.dtype), v.new_zeros(v.shape, dtype=lse.dtype)),
        ]
    for i in range(len(calls)):
        calls[(first + i) % len(calls)]()
