"""Update parameters in host memory in a background thread, while the device computes the next forward pass."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ringattn.train.parallel.memory.host_parameters import HostGroup
from ringattn.train.parallel.memory.pinned import host_thread

UpdateGroup = Callable[[int, Mapping[Tensor, Tensor]], None]


class HostUpdates:
    """Runs the optimizer updates of parameters in host memory.

    FSDP's gathers and `state_dict` wait for the updates before they read weights.

    Args:
        groups: the FSDP groups in host memory, in the order of the forward pass.
        update_group: updates the parameters of a group, given its index and the gradient of each parameter.
    """

    def __init__(self, model: nn.Module, groups: Sequence[HostGroup], update_group: UpdateGroup, device: torch.device) -> None:
        self.groups, self._update_group = groups, update_group
        self._thread = host_thread("host-updates", device)
        if groups:
            model.register_state_dict_pre_hook(self._wait_before_state_dict)

    @property
    def norms(self) -> dict[Tensor, Tensor]:
        return {parameter: norm for group in self.groups for parameter, norm in group.norms.items()}

    def start(self, read_scale: Callable[[], list[float]]) -> None:
        """Start the updates after the backward pass of a step. The function `read_scale` waits for the backward pass."""
        for index, group in enumerate(self.groups):
            group.clear_gradients()
            group.pending = self._thread.submit(self._update, index, read_scale)

    def _update(self, index: int, read_scale: Callable[[], list[float]]) -> None:
        group, (scale,) = self.groups[index], read_scale()
        if scale != 1:
            torch._foreach_mul_(group.gradients, scale)
        self._update_group(index, dict(zip(group.parameters, group.gradients, strict=True)))

    def clear_gradients(self) -> None:
        for group in self.groups:
            group.clear_gradients()

    def _wait_before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG002
        self.wait()

    def wait(self) -> None:
        for group in self.groups:
            group.wait()
