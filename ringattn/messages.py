"""Messages between ranks outside a ring pass: how decoding talks."""

import torch.distributed as dist

from ringattn import transport
from ringattn.transport import Addressed

Group = dist.ProcessGroup | transport.SimulatedRank


def rank_and_size(group: Group | None) -> tuple[int, int]:
    """This rank and how many there are; None: a group of one."""
    if group is None:
        return 0, 1
    return (group.rank, group.size) if isinstance(group, transport.SimulatedRank) else (group.rank(), group.size())


def exchange(group: Group, sends: Addressed, receives: Addressed) -> None:
    """All of them at once; on return the received tensors hold their data, or will for what follows on the GPU's stream.

    Two ranks match their messages in the order in which both list them.
    """
    transport.resolve(group.group_name).exchange(sends, receives).wait()
