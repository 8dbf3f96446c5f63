"""Replace the captured plan of a CUDA graph, so that replays can use other masks and layouts."""

import torch
from torch import Tensor

from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.mask_slots import MaskSlots
from ringattn.planning.rank_plan import Plan


class PlanSlots:
    """A `PlanSlots` object holds the memory from which a CUDA graph reads its plan.

    Args:
        plan: a plan with `is_fixed=True`. Before you create a `PlanSlots`, run each pass once with `plan`, so that all tables
            exist. The layouts of later plans must have the same number of rows per rank.

    Attributes:
        requests: the `Requests` of the given plan.
        plan: the plan to capture with `rank_plan.use_plans`.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.requests = plan.requests()
        self._slots = MaskSlots(plan.masks(), device)
        self.plan = plan.with_masks(self._slots.masks, device)

    def pack(self, plan: Plan) -> Tensor:
        """Pack the intervals and tables of a fixed plan into one CPU tensor for `write`."""
        plan.prepare(self.requests)
        masks: list[Intervals] = []
        for (name, *options), _ in self.requests.schedules:
            masks += [pair.intervals for pair in plan.block_pairs(name, plan.schedule(name, *options)).values()]
        return self._slots.pack(masks)

    def write(self, packed: Tensor) -> None:
        """Make the next replays of the CUDA graph use a packed plan. The host does not wait."""
        self._slots.write(packed)
