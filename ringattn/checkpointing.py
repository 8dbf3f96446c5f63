"""This module lets activation checkpointing save the results of attention and recompute all other operations.

    checkpoint(block, x, use_reentrant=False, context_fn=save_attention)

Here, `checkpoint` is `torch.utils.checkpoint.checkpoint`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import create_selective_checkpoint_contexts

Attend = Callable[[], tuple[Any, ...]]
OPERATORS = ("ring_attention", "ulysses_attention", "flash_attention")


class SavedAttention:
    """A `SavedAttention` object holds the results of all attention calls in a checkpointed function.

    After the forward pass, `take` returns and removes the saved tensors, which the caller can move to the host. Before the
    recomputation, `put` must bring the tensors back. If `keeps` is False, nothing is saved, and the recomputation runs
    attention again.
    """

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps
        self.calls: list[tuple[tuple[Any, ...], list[int]]] = []

    def take(self) -> list[Tensor]:
        for results, versions in self.calls:
            _check_unchanged(results, versions)
        tensors, self._structure = tree_flatten([results for results, _ in self.calls])
        self.calls = []
        return tensors

    def put(self, tensors: list[Tensor]) -> None:
        self.calls = [(results, _versions(results)) for results in tree_unflatten(tensors, self._structure)]


def save_attention(
    saved: SavedAttention | None = None,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return two contexts, for the forward pass and for its recomputation.

    The first context saves the results of attention, and the second context reuses them. Pass this function as `context_fn` to
    `torch.utils.checkpoint.checkpoint`, with `use_reentrant=False`. In the recomputation, the n-th attention call returns the
    results of the n-th call in the forward pass. This applies to `ring_attention`, `ulysses_attention` and `flash_attention`.
    The backward pass uses the recomputed q, k and v. In `ulysses_attention` without `recompute_all_to_all`, the backward pass
    uses the saved results of the all-to-all.

    `saved` receives the results, unless a compiler is tracing.
    """
    if TracingContext.try_get() is not None:
        return create_selective_checkpoint_contexts([getattr(torch.ops.ringattn, name).default for name in OPERATORS])
    saved = SavedAttention() if saved is None else saved
    return _Save(saved), _Reuse(saved)


def is_recomputing() -> bool:
    """Return True in a function that `save_attention` is recomputing in the backward pass."""
    return isinstance(_innermost.get(), _Reuse)


def reuse_or_compute(attend: Attend, like: Tensor) -> tuple[Any, ...]:
    """Return attend(), or the saved result of this call if the forward pass is being recomputed.

    Args:
        attend: computes attention and returns a tuple of tensors and lists of tensors.
        like: any tensor of the call. If `like` is a fake tensor, a compiler is tracing, and nothing is saved.
    """
    context = _innermost.get()
    if context is None or isinstance(like, FakeTensor | FunctionalTensor):
        return attend()
    return context.run(attend)


class _Context:
    def __init__(self, saved: SavedAttention) -> None:
        self.saved = saved
        self.outer: _Context | None = None

    def __enter__(self) -> None:
        self.outer = _innermost.get()
        _innermost.set(self)

    def run(self, attend: Attend) -> tuple[Any, ...]:
        raise NotImplementedError

    def run_outside(self, attend: Attend) -> tuple[Any, ...]:
        return attend() if self.outer is None else self.outer.run(attend)

    def __exit__(self, *_: object) -> None:
        _innermost.set(self.outer)


class _Save(_Context):
    def run(self, attend: Attend) -> tuple[Any, ...]:
        results = self.run_outside(attend)
        if not self.saved.keeps:
            return results
        # Detach the tensors to avoid a reference cycle with the autograd graph.
        detached = _detached(results)
        self.saved.calls.append((detached, _versions(detached)))
        return results


class _Reuse(_Context):
    def __enter__(self) -> None:
        super().__enter__()
        self.index = 0

    def run(self, attend: Attend) -> tuple[Any, ...]:
        calls = self.saved.calls
        if not self.saved.keeps:
            return self.run_outside(attend)
        if self.index == len(calls):
            raise RuntimeError(
                f"the forward pass called attention {len(calls)} times but its recomputation calls it more often: a "
                "checkpointed function must do the same every time it is called"
            )
        results, versions = calls[self.index]
        self.index += 1
        _check_unchanged(results, versions)
        return _detached(results)


def _check_unchanged(results: tuple[Any, ...], versions: list[int]) -> None:
    # In-place changes of the results would also change the saved tensors.
    if _versions(results) != versions:
        raise RuntimeError(
            "the attention output was modified in place after the forward, so it cannot be reused during recomputation: "
            "replace `out *= x` by `out = out * x` inside the checkpointed function"
        )


def _versions(results: tuple[Any, ...]) -> list[int]:
    return [x._version for x in tree_leaves(results) if isinstance(x, Tensor) and not x.is_inference()]


# Several threads may run checkpoints.
_innermost: ContextVar["_Context | None"] = ContextVar("_innermost", default=None)


def _detached(results: tuple[Any, ...]) -> tuple[Any, ...]:
    with torch.no_grad():
        return tree_map_only(Tensor, Tensor.detach, results)
