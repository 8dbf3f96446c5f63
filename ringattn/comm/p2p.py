"""Point-to-point transports over torch.distributed: NCCL between GPUs, gloo between CPUs, and the ring of a single rank."""

import torch
import torch.distributed as dist

from ringattn.comm.transport import Addressed, MessageTransport, Wait
from ringattn.comm.watchdog import Watchdog
from ringattn.planning.cost_model import Interconnect, interconnect


class P2PTransport(MessageTransport):
    """A transport that uses isend and irecv of a process group. NCCL sends and receives all messages of a step in one kernel.

    Args:
        group: the ranks of the ring.
        joined: the interconnect between the ranks, for the cost model; None if the transport is not used for ring passes.
        watchdog: the watchdog of the hops; None if no watchdog watches the exchanges.
    """

    def __init__(self, group: dist.ProcessGroup, joined: Interconnect | None = None, watchdog: Watchdog | None = None) -> None:
        self.group, self.interconnect, self.watchdog = group, joined, watchdog or self.watchdog
        self.rank, self.size = group.rank(), group.size()

    def exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        """Start all sends and receives at once, see `MessageTransport.exchange`."""
        operations = [
            # P2POp expects global ranks, even if the group has fewer ranks than the job. Both the sender and the receiver of a
            # message know its size, so both of them skip a message that is empty.
            dist.P2POp(start, tensor, dist.get_global_rank(self.group, peer), self.group)
            for start, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, peer in messages
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def warm_up(self, device: torch.device) -> None:
        """Make NCCL open the connections that a ring will use.

        NCCL needs seconds to open connections. Without this method, this time would be a part of the first hop.
        """
        # Relayed blocks use only the connections between neighbours.
        for distance in range(1, self.size) if self.interconnect.all_pairs else (1, self.size - 1):
            sent, received = torch.zeros(1, device=device), torch.empty(1, device=device)
            after, before = ((self.rank + sign * distance) % self.size for sign in (1, -1))
            self.exchange([(sent, after)], [(received, before)])()
        torch.cuda.synchronize(device)


class SingleRankTransport(MessageTransport):
    """The transport of a ring of one rank, in which no messages are exchanged."""

    rank, size = 0, 1
    interconnect = interconnect("alone")

    def exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        assert not sends and not receives, "a ring of one rank has nobody to exchange with"
        return lambda: None
