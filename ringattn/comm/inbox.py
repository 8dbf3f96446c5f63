"""Memory of every rank of a host that its peers write into, over NVLink."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ringattn.comm.nvlink import PeerCopies

log = logging.getLogger(__name__)

ALIGNMENT = 256


def padded_bytes(x: Tensor, rows: int) -> int:
    """What `rows` rows of a tensor like `x` (B, N, ...) take in an inbox."""
    size = x.shape[0] * rows * x.shape[2:].numel() * x.element_size()
    return -(-size // ALIGNMENT) * ALIGNMENT


class Inbox:
    """One rank's memory, and the addresses of all ranks'. It grows where more is asked for, on all ranks at the same time.

    Args:
        line: the transport between the ranks.
        purpose: what it is for, in messages to people.
        untried: what has not been done yet when it is too short in a CUDA graph.
        let_go: called before the memory is given back.
    """

    def __init__(self, line: "PeerCopies", purpose: str, untried: str, let_go: Callable[[], None] = lambda: None) -> None:
        self.line, self.purpose, self.untried, self.let_go = line, purpose, untried, let_go
        self.memory: Tensor | None = None
        self.addresses: list[int] = []  # by rank
        self._kept: dict[int, Tensor] = {}  # memory whose addresses stand in CUDA graphs, by address

    @property
    def nbytes(self) -> int:
        return 0 if self.memory is None else self.memory.numel()

    def reserve(self, count: int, capturing: bool) -> None:
        """Make it `count` bytes long if it is shorter.

        Raises:
            RuntimeError: if it is shorter and a CUDA graph is being captured.
        """
        if self.memory is not None and self.nbytes >= count:
            return
        if capturing:
            raise RuntimeError(f"{self.untried} with these shapes: call it once before it is captured in a CUDA graph")
        self.line.synchronise()  # nobody writes to the old one any more
        self.let_go()
        self.memory = None
        count = max(1, -(-count >> 21)) << 21
        log.info("rank %d: an inbox of %d MiB for %s over NVLink", self.line.rank, count >> 20, self.purpose)
        self.memory, self.addresses = self.line.share(torch.uint8, count)

    def keep(self) -> None:
        """A CUDA graph knows the memory: it stays when it is outgrown."""
        self._kept.setdefault(self.memory.data_ptr(), self.memory)
