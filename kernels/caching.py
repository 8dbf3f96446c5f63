"""Provide caches that work with torch.compile, several CUDA streams and CUDA graphs.

Without `SharedTensors`, a call could read a cached tensor before another stream has written it. PyTorch could also reuse the
memory of a tensor while another stream still reads it. Tensors computed during CUDA graph capture have no values before the
first replay, so they are never cached.
"""

import threading
from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache, wraps
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

_get = dict.__getitem__
_on_gpu = attrgetter("is_cuda")
# The private `_cuda_getCurrentRawStream` is 20 times as fast as torch.cuda.current_stream. Builds without CUDA lack it.
_stream_address: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_lock = threading.Lock()  # the threads of autograd and of simulated ranks share tensors


def _with_cache_clear(call: Any, cache_clear: Callable[[], None]) -> Any:
    call.cache_clear = cache_clear
    return call


def cached(maxsize: int) -> Callable[[F], F]:
    """Return a decorator like `functools.lru_cache(maxsize)`. While torch.compile traces the decorated function, calls bypass
    the cache.
    """

    def decorate(function: F) -> F:
        cache = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            return function(*args, **options) if torch.compiler.is_compiling() else cache(*args, **options)

        return _with_cache_clear(call, cache.cache_clear)

    return decorate


def cached_on_device(maxsize: int | None) -> Callable[[F], F]:
    """Return a decorator like `functools.lru_cache(maxsize)` for a function that returns tensors. The last argument of the
    function must be the tensors' device.

    During CUDA graph capture, a call raises RuntimeError if its result is not cached.
    """

    def decorate(function: F) -> F:
        @lru_cache(maxsize)
        def compute(*arguments: Any) -> SharedTensors:
            check_not_capturing(arguments[-1])
            result = SharedTensors()
            result[()] = function(*arguments)
            return result

        @wraps(function)
        def call(*arguments: Any) -> Any:
            return compute(*arguments)[()]

        return _with_cache_clear(call, compute.cache_clear)

    return decorate


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_not_capturing(device: torch.device) -> None:
    if is_capturing(device):
        raise RuntimeError(
            "a CUDA graph is being captured, but attention has not yet been called with this mask, these shapes and these "
            "options: call it once before capturing it in a CUDA graph"
        )


_kept_for_graphs: dict[int, object] = {}


def keep_for_graph(thing: object, device: torch.device) -> None:
    """During CUDA graph capture on `device`, keep `thing` and its tensors alive until the process ends.

    Replays use the addresses from the capture, so the memory of `thing` must never be freed.
    """
    if is_capturing(device):
        _kept_for_graphs[id(thing)] = thing


class SharedTensors(dict[Any, Any]):
    """A `SharedTensors` dictionary contains tensors of one device that several CUDA streams may read.

    Store a tensor while the CUDA stream that computes it is current. A read on another stream first waits until the tensor has
    been written.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[Tensor] = []
        self._streams: set[int] = set()  # the addresses of the streams that may read all these tensors
        self._written: torch.cuda.Event | None = None  # this event occurs when all of these tensors have been written
        self._device = -1

    def __setitem__(self, key: Hashable, value: Tensor | tuple[Tensor | None, ...]) -> None:
        self.add(*(value if isinstance(value, tuple) else (value,)))
        super().__setitem__(key, value)

    def update(self, values: Mapping[Hashable, Tensor]) -> None:  # pyrefly: ignore[bad-override]  # no other form is needed
        self.add(*values.values())
        super().update(values)

    def __getitem__(self, key: Hashable) -> Any:
        value = _get(self, key)
        # Read the value before checking the stream, because another thread may then replace the value.
        if self._written is not None and _stream_address(self._device) not in self._streams:
            self.use()
        return value

    def add(self, *tensors: Tensor | None) -> None:
        """Register tensors that the current stream writes, without adding them to the dictionary. A later call of `use` on
        another stream waits until these tensors are written.
        """
        on_gpu = [x for x in tensors if x is not None and _on_gpu(x)]
        if not on_gpu:
            return
        check_not_capturing(on_gpu[0].device)
        self._device = on_gpu[0].get_device()
        stream = torch.cuda.current_stream(self._device)
        with _lock:
            if self._written is None:
                self._written = torch.cuda.Event()
            elif stream.cuda_stream not in self._streams:
                self._share(stream)
            self._written.record(stream)
            self._tensors += on_gpu
            self._streams = {stream.cuda_stream}

    def use(self) -> None:
        """Make the current stream wait until all tensors are written."""
        if self._written is None or _stream_address(self._device) in self._streams:
            return
        # A stream under capture cannot wait for work outside of its graph. During capture, no wait is needed, because
        # `torch.cuda.graph` has waited for all earlier work.
        if not torch.cuda.is_current_stream_capturing():
            with _lock:
                self._share(torch.cuda.current_stream(self._device))

    def _share(self, stream: torch.cuda.Stream) -> None:
        assert self._written is not None
        stream.wait_event(self._written)
        for x in self._tensors:
            x.record_stream(stream)
        self._streams.add(stream.cuda_stream)
