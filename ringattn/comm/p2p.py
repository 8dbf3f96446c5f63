"""Point-to-point transports over torch.distributed: NCCL between GPUs, gloo between CPUs, and the ring of a single rank.

If a process group uses gloo for tensors on GPUs, its messages pass through host memory, which is slow. Use such a group only
for ranks that share a GPU, because NCCL rejects such ranks.
"""

import torch
import torch.distributed as dist

from ringattn.comm.transport import Addressed, MessageTransport, Wait
from ringattn.comm.watchdog import Watchdog
from ringattn.planning.cost_model import Interconnect, interconnect


def backend_name(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the name of the backend that `group` uses for tensors on devices of the given type, or "" if there is none."""
    # The text has the form "cpu:gloo,cuda:nccl".
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return backends.get(device_type, "")


class P2PTransport(MessageTransport):
    """A transport that uses the sends and receives of a process group. NCCL runs all messages of a step in one kernel.

    gloo can only send and receive tensors in host memory. With gloo, tensors on GPUs are therefore copied to the host and back.

    Args:
        group: the ranks of the ring.
        joined: the interconnect between the ranks, for the cost model; None if the transport is not used for ring passes.
        watchdog: the watchdog of the hops; None if no watchdog watches the exchanges.
    """

    def __init__(self, group: dist.ProcessGroup, joined: Interconnect | None = None, watchdog: Watchdog | None = None) -> None:
        self.group, self.interconnect, self.watchdog = group, joined, watchdog or self.watchdog
        self.rank, self.size = group.rank(), group.size()
        self._gloo_devices = [kind for kind in ("cpu", "cuda") if backend_name(group, kind) == "gloo"]

    def exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        """Start all sends and receives at once, see `MessageTransport.exchange`."""
        if "cuda" in self._gloo_devices and any(x.is_cuda for x, _ in (*sends, *receives)):
            return self._exchange_through_host(sends, receives)
        return self._exchange(sends, receives)

    def all_gather(self, own: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        """Start to gather a tensor from each rank with one collective call, see `MessageTransport.all_gather`."""
        if own.device.type in self._gloo_devices:  # collective calls have no tags
            return super().all_gather(own)
        gathered = own.new_empty(self.size, *own.shape)
        work = dist.all_gather_into_tensor(gathered.view(-1), own.view(-1), group=self.group, async_op=True)

        def wait(own: torch.Tensor = own) -> None:  # the default argument keeps the sent tensor alive
            work.wait()

        return gathered, wait

    def _exchange_through_host(self, sends: Addressed, receives: Addressed) -> Wait:
        """Exchange messages like `exchange`, with copies of the tensors in host memory, because gloo cannot read GPU memory.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "messages of GPUs over gloo pass through host memory, so they cannot be part of a CUDA graph: use "
                "transport='nvlink', or give every rank its own GPU and create the process group with NCCL"
            )
        sent, received = ([(_empty_on_host(x), peer) for x, peer in messages] for messages in (sends, receives))
        for (x, _), (copy, _) in zip(sends, sent, strict=True):
            copy.copy_(x, non_blocking=True)
        # gloo reads the copies on the host. If several ranks share a GPU, waiting takes long, so the host waits only once.
        if any(x.is_cuda for x, _ in sends):
            torch.cuda.current_stream().synchronize()
        wait_for_messages = self._exchange(sent, received)

        def wait(sent: Addressed = sent) -> None:  # the default argument keeps the sent tensors alive
            wait_for_messages()
            for (x, _), (copy, _) in zip(receives, received, strict=True):
                x.copy_(copy, non_blocking=True)

        return wait

    def _exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        # Both the sender and the receiver of a message know its size, so both of them skip a message that is empty.
        sends, receives = ([(x, peer) for x, peer in messages if x.numel()] for messages in (sends, receives))
        if not sends and not receives:
            return lambda: None
        # `dist.batch_isend_irecv` makes the same calls, but checks and wraps every message in Python first.
        group, device = self.group, (sends or receives)[0][0].device
        # gloo ends a process that receives a message of a wrong size. If the calls of two ranks differ, their tags differ, and
        # gloo delivers no message. NCCL ignores tags.
        tag = self.watchdog.tag
        coalesces = group._get_backend(device).supports_coalescing  # NCCL does, and gloo does not
        if coalesces:
            group._start_coalescing(device)
        works = [group.send([x], peer, tag) for x, peer in sends]
        works += [group.recv([x], peer, tag) for x, peer in receives]
        if coalesces:
            return group._end_coalescing(device).wait

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def warm_up(self, device: torch.device) -> None:
        """Make NCCL open the connections that a ring will use.

        NCCL needs seconds to open connections. Without this method, this time would be a part of the first hop.
        """
        # Relayed blocks use only the connections between neighbours. Under some masks, a result also returns over another
        # connection, which NCCL opens in the first pass.
        for distance in range(1, self.size) if self.interconnect.all_pairs else (1, self.size - 1):
            sent, received = torch.zeros(1, device=device), torch.empty(1, device=device)
            after, before = ((self.rank + sign * distance) % self.size for sign in (1, -1))
            self.exchange([(sent, after)], [(received, before)])()
        torch.cuda.synchronize(device)


def _empty_on_host(x: torch.Tensor) -> torch.Tensor:
    """Return a new tensor like x in host memory. The memory is pinned if x is on a GPU, so that copies are asynchronous."""
    return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)


class SingleRankTransport(MessageTransport):
    """The transport of a ring of one rank, in which no messages are exchanged."""

    rank, size = 0, 1
    interconnect = interconnect("alone")

    def exchange(self, sends: Addressed, receives: Addressed) -> Wait:
        assert not sends and not receives, "a ring of one rank has nobody to exchange with"
        return lambda: None
