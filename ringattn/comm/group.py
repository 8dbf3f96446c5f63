"""What a caller names a ring by: a process group, or a simulated one."""

import torch.distributed as dist

from ringattn.comm.simulated import SimulatedRank

Group = dist.ProcessGroup | SimulatedRank


def rank_and_size(group: Group | None) -> tuple[int, int]:
    """This rank and how many there are; None: a group of one."""
    if group is None:
        return 0, 1
    if isinstance(group, SimulatedRank):
        return group.rank, group.size
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            f"group is a {type(group).__name__}: give a torch.distributed.ProcessGroup that this rank is in (of a DeviceMesh: "
            "mesh.get_group(dim)), or None for this process alone"
        )
    return group.rank(), group.size()
