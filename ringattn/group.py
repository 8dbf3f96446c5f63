"""What a caller names a ring by: a process group, or a simulated one."""

import torch.distributed as dist

from ringattn.simulated import SimulatedRank

Group = dist.ProcessGroup | SimulatedRank


def rank_and_size(group: Group | None) -> tuple[int, int]:
    """This rank and how many there are; None: a group of one."""
    if group is None:
        return 0, 1
    return (group.rank, group.size) if isinstance(group, SimulatedRank) else (group.rank(), group.size())
