"""Messages between ranks outside a ring pass: how decoding and the exchange of heads talk."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ringattn import transport

Group = dist.ProcessGroup | transport.SimulatedRank
Addressed = list[tuple[Tensor, int]]  # a contiguous tensor and the rank of the group that it goes to or comes from


def rank_and_size(group: Group | None) -> tuple[int, int]:
    """This rank and how many there are; None: a group of one."""
    if group is None:
        return 0, 1
    return (group.rank, group.size) if isinstance(group, transport.SimulatedRank) else (group.rank(), group.size())


def find(name: str) -> Group:
    """The group of that `group_name`."""
    return transport._simulated.get(name) or _resolve_process_group(name)


def exchange(group: Group, sends: Addressed, receives: Addressed) -> None:
    """All of them at once; on return the received tensors hold their data, or will for what follows on the GPU's stream.

    Two ranks match their messages in the order in which both list them.
    """
    if isinstance(group, transport.SimulatedRank):
        return _exchange_in_process(group, sends, receives)
    operations = [
        dist.P2POp(start, x, dist.get_global_rank(group, peer), group)
        for start, messages in ((dist.isend, sends), (dist.irecv, receives))
        for x, peer in messages
    ]
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()


def _exchange_in_process(group: transport.SimulatedRank, sends: Addressed, receives: Addressed) -> None:
    for x, peer in sends:
        group.ring.mail[group.rank, peer].put(x.clone())
    for x, peer in receives:
        sent = group.ring.mail[peer, group.rank].get()
        if sent is None:
            raise RuntimeError("another rank of the simulated ring failed")
        x.copy_(sent)
