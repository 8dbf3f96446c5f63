"""Keep the weights and the gradients of FSDP groups in host memory.

    forward and backward   host weights -> staging buffer on the GPU -> FSDP's all-gather
    backward               FSDP's reduce-scatter -> norm on the GPU -> host gradients
    next forward           the optimizer updates the host weights; each all-gather waits for the update of its group

FSDP's own CPUOffloadPolicy is slower. With CPUOffloadPolicy, the host waits for every backward pass, and adds gradients of
micro-steps on the CPU.
"""

from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from ringattn.train.parallel.memory.pinned import empty_pinned


class StagingBuffers:
    """Copies weights to the GPU on a separate stream. The FSDP groups use two buffers in turn.

    While the GPU computes with one group, the weights of the next group are copied into the other buffer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._size, self._current = device, 0, 0
        self._buffers: list[Tensor] = []

    def reserve(self, size: int) -> None:
        """Make each buffer large enough for `size` elements. Call this method before the first copy."""
        self._size = max(self._size, size)

    def begin_group(self) -> None:
        if not self._buffers:
            self._stream = torch.cuda.Stream(self._device)
            self._consumer = torch.cuda.current_stream()
            self._left = [torch.cuda.Event() for _ in range(2)]
            self._buffers = [torch.empty(self._size, dtype=torch.float32, device=self._device) for _ in range(2)]
            self._stream.wait_stream(self._consumer)
        self._left[self._current].record(self._consumer)
        self._current = 1 - self._current
        self._stream.wait_event(self._left[self._current])

    def copy(self, weights: Tensor, start: int) -> Tensor:
        """Copy weights (N,) to the current buffer, from element `start` on. The current stream waits for the copy."""
        buffer = self._buffers[self._current][start : start + len(weights)]
        with torch.cuda.stream(self._stream):
            buffer.copy_(weights, non_blocking=True)
        self._consumer = torch.cuda.current_stream()
        self._consumer.wait_stream(self._stream)
        return buffer


class HostGroup:
    """Keeps the fp32 weights and gradients of an FSDP group in host memory.

    Args:
        module: sharded by `fully_shard`, before its first forward pass.
        staging: the buffers that all groups share.

    Attributes:
        parameters: the sharded parameters, DTensors on the CPU.
        gradients: this rank's shard of each parameter's gradient, fp32, valid after the backward pass on the GPU.
        pending: the running update, or None.
    """

    def __init__(self, module: nn.Module, device: torch.device, staging: StagingBuffers) -> None:
        state: Any = module
        self.fsdp_group = state._get_fsdp_state()._fsdp_param_group
        sizes = [each._sharded_param_data.numel() for each in self.fsdp_group.fsdp_params]
        weights, gradients = (empty_pinned(sum(sizes), device) for _ in range(2))
        self._own, self._device, self._staging = list[HostParameter](), device, staging
        staging.reserve(sum(sizes))
        start = 0
        for each, *parts in zip(self.fsdp_group.fsdp_params, weights.split(sizes), gradients.split(sizes), strict=True):
            each.__class__ = HostParameter
            each.move_to_host(self, start, *parts)
            self._own.append(each)
            start += len(parts[0])
        self.parameters = [each.sharded_param for each in self._own]
        self.gradients = [each.host_gradient for each in self._own]
        self.pending: Future[None] | None = None

    @property
    def norms(self) -> dict[Tensor, Tensor]:
        return {each.sharded_param: each.norm for each in self._own}

    def clear_gradients(self) -> None:
        """Make the next backward pass overwrite the gradients."""
        for each in self._own:
            each.has_gradient = False

    def wait(self) -> None:
        """Wait until the parameters are updated, and raise any error of the update."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def fetch(self, weights: Tensor, start: int) -> Tensor:
        """Copy weights, which begin at element `start` of the group, to the device."""
        self.wait()
        if self._device.type == "cpu":
            return weights
        if start == 0:
            self._staging.begin_group()
        return self._staging.copy(weights, start)


class HostParameter(FSDPParam):
    """A parameter of a `HostGroup`. FSDP calls the methods of this class to gather weights and to reduce gradients."""

    has_gradient = False

    def move_to_host(self, group: HostGroup, start: int, weights: Tensor, gradient: Tensor) -> None:
        """Move this rank's padded shard to `weights` (N,), which begins at element `start` of the group.

        Gradients will be copied to `gradient` (N,).
        """
        self._group, self._start = group, start
        count = self.sharded_size.numel()
        self.host_gradient = gradient[:count].view(self.sharded_size)
        self.norm = torch.zeros((), device=self.device)
        weights.copy_(self._sharded_param_data)
        self._sharded_param_data = weights
        shard = super().to_sharded_dtensor(weights[:count].view(self.sharded_size))
        self.sharded_param = nn.Parameter(shard)
        self._setattr_on_modules(self.sharded_param)

    @property
    def _is_reduced(self) -> bool:
        return self._group.fsdp_group._training_state == TrainingState.POST_BACKWARD

    @property
    def offload_to_cpu(self) -> bool:  # pyrefly: ignore[bad-override]  # FSDP assigns it before the class is changed
        """True while FSDP gathers weights, so that FSDP does not convert weights on the CPU. False while FSDP reduces
        gradients, so that gradients stay on the GPU.
        """
        return not self._is_reduced

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        weights = self._group.fetch(self._sharded_param_data, self._start)
        return [weights if self.param_dtype is None else weights.to(self.param_dtype)]

    def to_sharded_dtensor(self, tensor: Tensor) -> Any:
        """Store a reduced gradient in host memory. Return None, so that FSDP assigns no gradient to the parameter."""
        if not self._is_reduced:
            return super().to_sharded_dtensor(tensor)
        self._group.wait()  # The running update may still read the previous gradient.
        if self.has_gradient:
            tensor.add_(self.host_gradient.to(tensor.device, non_blocking=True))
        self.host_gradient.copy_(tensor, non_blocking=True)
        self.norm = cast("list[Tensor]", torch._foreach_norm([tensor]))[0]
        self.has_gradient = True
        return None
