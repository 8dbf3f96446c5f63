"""Activation checkpointing that never attends twice: what attention returned is kept, all else is computed again.

checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

with `torch.utils.checkpoint.checkpoint`. Its selective policies can do the same, but ask Python about every operation of the
block, which takes the host longer than the short kernels of a block run. `torch.compile` over a whole checkpoint takes such
policies only, and gets one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import create_selective_checkpoint_contexts

Attend = Callable[[], tuple]
OPERATORS = ("ring_attention", "ulysses_attention", "flash_attention")


def keep_attention() -> tuple[AbstractContextManager, AbstractContextManager]:
    """The contexts of a pass and of its repetition: the second's attention calls return what the first's did, in order.

    For the `context_fn` of `torch.utils.checkpoint.checkpoint` with `use_reentrant=False`. Calls of `ring_attention`,
    `ulysses_attention` and `flash_attention` count. The backward of a call gets the q, k and v that were computed again, but of
    `ulysses_attention` those that were exchanged in the pass, unless it is called with `exchange_again`: they stay in memory.
    """
    if TracingContext.try_get() is not None:
        return create_selective_checkpoint_contexts([getattr(torch.ops.ringattn, name).default for name in OPERATORS])
    results: list[tuple] = []
    return _Keep(results), _Repeat(results)


def once(attend: Attend, like: Tensor) -> tuple:
    """What `attend` returns, tensors and lists of them; or what it returned in the pass that is being repeated.

    Where a compiler traces, with `like` that hold nothing, there is nothing to keep.
    """
    if _thread.innermost is None or isinstance(like, FakeTensor | FunctionalTensor):
        return attend()
    return _thread.innermost.run(attend)


class _Context:
    """A context that may be entered again, as a graph may be run through more than once."""

    def __init__(self, results: list[tuple]) -> None:
        self.results = results
        self.outer: _Context | None = None

    def __enter__(self) -> None:
        self.outer, _thread.innermost = _thread.innermost, self

    def __exit__(self, *_: object) -> None:
        _thread.innermost = self.outer

    def run(self, attend: Attend) -> tuple:
        raise NotImplementedError


class _Keep(_Context):
    def run(self, attend: Attend) -> tuple:
        results = attend() if self.outer is None else self.outer.run(attend)
        kept = _detached(results)  # what is returned becomes part of a graph, which would keep itself alive
        self.results.append((kept, _versions(kept)))
        return results


class _Repeat(_Context):
    left: Iterator[tuple]

    def __enter__(self) -> None:
        super().__enter__()
        self.left = iter(self.results)

    def run(self, attend: Attend) -> tuple:
        results, versions = next(self.left, (None, []))
        if results is None:
            raise RuntimeError(
                f"a pass called attention {len(self.results)} times and its repetition calls it once more: what is "
                "checkpointed must do the same whenever it is called"
            )
        if _versions(results) != versions:
            raise RuntimeError(
                "what attention returned was changed in place after the pass, and its repetition would begin with that: "
                "write out = out * x for out *= x in what is checkpointed with keep_attention"
            )
        return _detached(results)


def _versions(results: tuple) -> list[int]:
    """How often each tensor has been changed in place; it shares the count with the tensors it was detached from."""
    return [x._version for x in tree_leaves(results) if isinstance(x, Tensor) and not x.is_inference()]


class _Thread(threading.local):
    innermost: _Context | None = None


_thread = _Thread()


def _detached(results: tuple) -> tuple:
    with torch.no_grad():
        return tree_map_only(Tensor, Tensor.detach, results)
