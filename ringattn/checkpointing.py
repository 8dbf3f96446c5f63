"""Activation checkpointing that saves the results of attention and recomputes the results of all other operations.

    checkpoint(block, x, use_reentrant=False, context_fn=save_attention)

In this example, `checkpoint` is `torch.utils.checkpoint.checkpoint`. The selective checkpointing policies of torch have the
same effect, but they call a Python function for every operation of the block. These calls take longer on the host than the
short kernels of a block take on the GPU. `torch.compile` can compile a whole checkpoint only if the checkpoint uses a selective
checkpointing policy. Therefore `save_attention` returns such a policy while a compiler is tracing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import create_selective_checkpoint_contexts

Attend = Callable[[], tuple[Any, ...]]
OPERATORS = ("ring_attention", "ulysses_attention", "flash_attention")


def save_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two contexts: the first saves the results of attention, and the second returns them during the recomputation.

    Pass this function as `context_fn` to `torch.utils.checkpoint.checkpoint`, together with `use_reentrant=False`. The contexts
    apply to `ring_attention`, `ulysses_attention` and `flash_attention`. During the recomputation, the n-th call of attention
    returns the saved results of the n-th call of the forward pass. The backward pass of a call uses the recomputed q, k and v.
    The exception is `ulysses_attention` without `recompute_all_to_all`, whose backward pass uses the saved results of the
    all-to-all.
    """
    if TracingContext.try_get() is not None:
        return create_selective_checkpoint_contexts([getattr(torch.ops.ringattn, name).default for name in OPERATORS])
    results: list[tuple[Any, ...]] = []
    return _Save(results), _Reuse(results)


def reuse_or_compute(attend: Attend, like: Tensor) -> tuple[Any, ...]:
    """Return the result of attend(). If the forward pass is being recomputed, return the saved result of this call instead.

    Args:
        attend: a function that computes attention and returns a tuple of tensors and lists of tensors.
        like: any tensor of the call. While a compiler is tracing, this tensor holds no data, and nothing is saved.
    """
    context = _innermost.get()
    if context is None or isinstance(like, FakeTensor | FunctionalTensor):
        return attend()
    return context.run(attend)


class _Context:
    """A context for the calls of attention in a checkpointed function.

    The context can be entered several times, because backward can be called several times on the same graph.
    """

    def __init__(self, results: list[tuple[Any, ...]]) -> None:
        self.results = results
        self.outer: _Context | None = None

    def __enter__(self) -> None:
        # Checkpoints may be nested, so every context stores a reference to the context that surrounds it.
        self.outer = _innermost.get()
        _innermost.set(self)

    def run(self, attend: Attend) -> tuple[Any, ...]:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        _innermost.set(self.outer)


class _Save(_Context):
    """The context of the forward pass, which computes attention and saves the results."""

    def run(self, attend: Attend) -> tuple[Any, ...]:
        results = attend() if self.outer is None else self.outer.run(attend)
        # The returned tensors become part of the autograd graph, and the graph holds a reference to this context. The saved
        # tensors are detached, because they would otherwise form a reference cycle with the graph, and the memory of the graph
        # would never be released.
        saved = _detached(results)
        self.results.append((saved, _versions(saved)))
        return results


class _Reuse(_Context):
    """The context of the recomputation, which returns the saved results in the order of the calls."""

    remaining: Iterator[tuple[Any, ...]]

    def __enter__(self) -> None:
        super().__enter__()
        # Every recomputation starts again with the result of the first call.
        self.remaining = iter(self.results)

    def run(self, attend: Attend) -> tuple[Any, ...]:
        results, versions = next(self.remaining, (None, None))
        if results is None:
            raise RuntimeError(
                f"the forward pass called attention {len(self.results)} times but its recomputation calls it more often: a "
                "checkpointed function must do the same every time it is called"
            )
        # A saved tensor shares its memory with the result that the forward pass received. If the forward pass has modified this
        # result in place, the saved tensor has wrong values.
        if _versions(results) != versions:
            raise RuntimeError(
                "the attention output was modified in place after the forward, so it cannot be reused during recomputation: "
                "replace `out *= x` by `out = out * x` inside the checkpointed function"
            )
        return _detached(results)


def _versions(results: tuple[Any, ...]) -> list[int]:
    """Return the version counter of each tensor, which counts in-place modifications.

    A detached tensor and the tensor from which it was detached have the same counter.
    """
    return [x._version for x in tree_leaves(results) if isinstance(x, Tensor) and not x.is_inference()]


# The forward pass and the recomputation may run in different threads, and several threads may run checkpoints at the same time.
# Therefore every thread has its own innermost context.
_innermost: ContextVar["_Context | None"] = ContextVar("_innermost", default=None)


def _detached(results: tuple[Any, ...]) -> tuple[Any, ...]:
    with torch.no_grad():
        return tree_map_only(Tensor, Tensor.detach, results)
