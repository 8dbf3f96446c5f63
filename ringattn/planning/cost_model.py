"""What a ring pass is expected to cost: at every step the busiest rank's computation beside the busiest rank's messages.

Speeds come from a table, not from a stopwatch, so that every rank, and every run, makes the same choice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ringattn.planning.schedule import Schedule, Visit

FLOPS_A_BYTE = 150  # that a GPU computes while its memory moves a byte
STEP_SECONDS = {"forward": 20e-6, "backward": 80e-6}  # of a GPU, for the beginning and the end of a step; fitted, as below
# that a GPU computes while it adds a byte of a partial result to a sum: in the forward kernels read and write it as fast as
# memory goes; in the backward fitted to rings of two and four H200s (benchmarks/2026-11-22-ring)
SUM_FLOPS_A_BYTE = {"forward": 2 * FLOPS_A_BYTE, "backward": 1200}
# what bytes of an exchange of heads take inside a host, of their time on the link, with the copies out of inboxes and what they
# hold up; fitted to what four H200s took longer than without an exchange (benchmarks/2026-11-22-ring)
EXCHANGE_TIMES = 2.5


class Fabric(NamedTuple):
    """What joins the ranks of a ring, and how fast they are; the same on every rank."""

    name: str
    all_pairs: bool  # whether every pair of ranks has its own way, so that nothing need be relayed
    bytes_per_second: float  # that a rank sends while it receives as much
    latency: float  # seconds a message takes besides its bytes
    flops: float = 5e14  # a second, of attention on one rank
    on_processors: bool = False  # whether kernels move its messages, on processors that attention would use


def fabric(name: str, one_host: bool = True, flops: float = 5e14) -> Fabric:
    """The fabric of a transport by its name, within one host or across several.

    Raises:
        ValueError: an unknown name.
    """
    speeds = {"nvlink": (330e9, 12e-6), "nccl": (110e9, 50e-6) if one_host else (40e9, 60e-6), "gloo": (1e9, 3e-4)}
    speeds |= {"simulated": speeds["nvlink"], "alone": speeds["nvlink"]}
    if name not in speeds:
        raise ValueError(f"unknown fabric {name!r}: choose one of {', '.join(speeds)}")
    return Fabric(name, one_host, *speeds[name], flops, on_processors=name == "nccl")


def attention_flops(device: torch.device) -> float:
    """Floating point operations a second that 16-bit attention reaches on `device`, roughly."""
    if device.type != "cuda":
        return 5e10
    return {8: 1.8e14, 9: 5.8e14, 10: 1.2e15}.get(torch.cuda.get_device_capability(device)[0], 6e13)


@dataclass(frozen=True)
class HopCost:
    """One step of a pass, on its busiest rank."""

    compute: float  # seconds
    communication: float  # seconds
    bytes: int

    @property
    def seconds(self) -> float:
        """Both run at the same time."""
        return max(self.compute, self.communication)


def hop_costs(
    schedule: Schedule,
    row_bytes: tuple[int, int],
    flops: Callable[[Visit], float],
    fabric: Fabric,
    rank: int | None = None,
) -> list[HopCost]:
    """The cost of every step, where a row of a traveller and of a result has `row_bytes` bytes.

    Args:
        flops: what a visit takes.
        rank: of this rank alone. None: of the busiest, of computation and of communication each.
    """
    size = dict(zip(("traveller", "result"), row_bytes, strict=True))
    ranks = range(schedule.ranks) if rank is None else (rank,)
    costs = []
    for t in range(len(schedule.steps)):
        parts = [schedule.by_rank[r][t] for r in ranks]
        compute = max(sum(flops(visit) for visit in part.visits) / fabric.flops for part in parts)
        sent = [[len(message.rows) * size[message.kind] for message in part.outgoing] for part in parts]
        received = [[len(message.rows) * size[message.kind] for message in part.incoming] for part in parts]
        communication = max(sum(x) / fabric.bytes_per_second + len(x) * fabric.latency for x in sent + received)
        costs.append(HopCost(compute, communication, max(map(sum, sent + received))))
    return costs
