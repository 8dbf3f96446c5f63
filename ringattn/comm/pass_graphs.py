"""Replay ring passes over short shards from CUDA graphs. For a short pass, the launches on the host take longer than the
kernels on the GPU.

After CALLS_BEFORE_CAPTURE passes with equal plans, shapes and options, the pass is captured. A graph exchanges the same
messages as an ordinary pass. Ranks may therefore capture a pass at different times.
"""

import logging
import weakref
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ringattn.comm.transport import Tensors, Transport

# A capture takes about 0.1 s. With packed documents, every training step has a new plan.
CALLS_BEFORE_CAPTURE = 128
# Larger passes are not captured. On an H100, a forward pass with MAX_FORWARD_FLOPS takes about 1 ms, which is longer than its
# launch.
MAX_FORWARD_FLOPS = 5e11
# A captured pass keeps copies of q, k and v. To limit memory, passes with more than MAX_INPUT_BYTES of inputs are not captured.
MAX_INPUT_BYTES = 64 << 20
_NEVER = -(1 << 62)  # marks a pass that cannot be captured
log = logging.getLogger(__name__)


class PassGraphs:
    """The captured passes of a transport. A captured pass is freed together with its plan."""

    def __init__(self, transport: Transport) -> None:
        self.transport = weakref.proxy(transport)
        # by plan, settings and shapes: the captured pass, or the number of passes so far
        self._by_plan: WeakKeyDictionary[Hashable, dict[tuple[Any, ...], int | CapturedPass]] = WeakKeyDictionary()

    def clear(self) -> None:
        """Free all graphs, because addresses or flags in the graphs have changed."""
        self._by_plan.clear()

    def run(
        self, plan: Hashable, settings: tuple[Any, ...], function: Callable[..., Tensors], inputs: tuple[Tensor | None, ...]
    ) -> Tensors:
        """Run the ring pass `function(*inputs)`, or replay its CUDA graph. Return the results.

        The pass must depend only on `plan`, `settings`, and the shapes and dtypes of the inputs.
        """
        of_plan = self._by_plan.setdefault(plan, {})
        shapes = tuple(x if x is None else (x.shape, x.dtype) for x in inputs)
        key = settings, shapes, torch.are_deterministic_algorithms_enabled()
        found = of_plan.get(key, 0)
        if isinstance(found, int):
            of_plan[key] = found + 1
            if found < CALLS_BEFORE_CAPTURE:
                return function(*inputs)
            messages = self.transport.messages
            before = messages.num_exchanges
            try:
                found = CapturedPass(function, inputs)
            except RuntimeError as error:  # for example, too little memory
                log.warning("a ring pass cannot be captured in a CUDA graph, which would be faster: %s", error)
                of_plan[key] = _NEVER
                messages.num_exchanges = before
                return function(*inputs)
            # The capture has sent no message.
            found.num_exchanges, messages.num_exchanges = messages.num_exchanges - before, before
            of_plan[key] = found
        transport = self.transport
        transport.begin_replay()
        # For the watchdog, the replayed pass is one hop.
        hop = transport.watchdog.start("replay of a ring pass", 0, 1, ())
        results = found.replay(inputs)
        transport.messages.num_exchanges += found.num_exchanges
        transport.watchdog.finished(hop)
        return results


class CapturedPass:
    """A `CapturedPass` is a CUDA graph of function(*inputs), with its own memory for the inputs and the results."""

    num_exchanges = 0  # number of plain messages in the pass

    def __init__(self, function: Callable[..., Tensors], inputs: tuple[Tensor | None, ...]) -> None:
        self.graph = torch.cuda.CUDAGraph()
        # `replay` writes into `copies`, so `copies` must not be inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            copies = [x if x is None else torch.empty_like(x) for x in inputs]
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.results = function(*copies)
        self.inputs = [x for x in copies if x is not None]

    def replay(self, inputs: tuple[Tensor | None, ...]) -> Tensors:
        torch._foreach_copy_(self.inputs, [x for x in inputs if x is not None])
        self.graph.replay()
        results = tuple(torch.empty_like(x) for x in self.results)
        torch._foreach_copy_(results, self.results)
        return results
