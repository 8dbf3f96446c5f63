"""Replace the plan that a CUDA graph has captured, so that the graph can be replayed with other masks and layouts."""

import torch
from torch import Tensor

from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.mask_slots import MaskSlots
from ringattn.planning.rank_plan import Plan


class PlanSlots:
    """The memory of a plan that a CUDA graph reads.

    Args:
        plan: a plan with `Plan.is_fixed`. The passes of the graph have run with this plan once. All later plans have layouts
            with the same numbers of rows.

    Attributes:
        requests: what the passes have requested from `plan`, for later plans.
        plan: the plan to capture, see `rank_plan.use_plan`.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.requests = plan.requests()
        self._slots = MaskSlots(plan.masks(), device)
        self.plan = plan.with_masks(self._slots.masks, device)

    def pack(self, plan: Plan) -> Tensor:
        """Return the intervals and tables of another fixed plan for `write`. That plan must be on the CPU."""
        plan.prepare(self.requests)
        masks: list[Intervals] = []
        for (name, *options), _ in self.requests.schedules:
            masks += [pair.intervals for pair in plan.block_pairs(name, plan.schedule(name, *options)).values()]
        return self._slots.pack(masks)

    def write(self, packed: Tensor) -> None:
        """Let the next replays use a packed plan. The host does not wait."""
        self._slots.write(packed)
