"""Predict the cost of a ring pass. The cost of a step is the longest time that any rank computes or communicates.

Speeds come from a table and are never measured at run time. Therefore all ranks and all runs make the same choice.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from ringattn.planning.schedule import LocalSteps, Schedule

# On an H100, compute time and memory time are equal at FLOPS_PER_HBM_BYTE FLOPs per byte of HBM traffic.
FLOPS_PER_HBM_BYTE = 150

# Each step on a GPU has a fixed overhead, in seconds. The values are fitted to rings of two and four H200s.
STEP_OVERHEAD = {"forward": 20e-6, "backward": 80e-6}

# Merging one byte of partial results takes as long as MERGE_FLOPS_PER_BYTE FLOPs.
MERGE_FLOPS_PER_BYTE = {"forward": 2 * FLOPS_PER_HBM_BYTE, "backward": 1200}

# Inside a host, an all-to-all reaches 1 / ALL_TO_ALL_FACTOR of the link's bandwidth, measured on four H200s.
ALL_TO_ALL_FACTOR = 2.5


class Interconnect(NamedTuple):
    """An `Interconnect` describes the connection between the ranks of a ring, and the speed of the ranks. Every rank has the
    same values.
    """

    name: str
    all_pairs: bool  # whether messages go directly to any rank
    bytes_per_second: float  # per rank and direction
    latency: float  # seconds per message, in addition to the time of its bytes
    flops: float = 5e14  # speed of attention per rank, FLOP/s
    uses_sms: bool = False  # whether kernels move the messages and occupy SMs

    def with_route(self, route: str) -> "Interconnect":
        return self if route == "auto" else self._replace(all_pairs=route == "direct")


def interconnect(name: str, one_host: bool = True, flops: float = 5e14) -> Interconnect:
    """Return the interconnect of the transport "nvlink", "nccl", "gloo", "simulated" or "alone".

    `one_host` says whether all ranks are in one host. `flops` is the speed of attention on the slowest rank, in FLOP/s.
    """
    speeds = {"nvlink": (330e9, 12e-6), "nccl": (110e9, 50e-6) if one_host else (40e9, 60e-6), "gloo": (1e9, 3e-4)}
    speeds |= {"simulated": speeds["nvlink"], "alone": speeds["nvlink"]}
    if name not in speeds:
        raise ValueError(f"unknown interconnect {name!r}: it must be one of {', '.join(speeds)}")
    return Interconnect(name, one_host, *speeds[name], flops, uses_sms=name == "nccl")


def attention_flops(device: torch.device) -> float:
    """Return the approximate speed of 16-bit attention, in FLOP/s."""
    if device.type != "cuda":
        return 5e10
    return attention_flops_of(torch.cuda.get_device_capability(device)[0])


def attention_flops_of(capability: int) -> float:
    """Return the speed of attention, in FLOP/s, on GPUs with the given major compute capability."""
    # 8 is Ampere and Ada, 9 is Hopper, 10 is Blackwell.
    return {8: 1.8e14, 9: 5.8e14, 10: 1.2e15}.get(capability, 6e13)


class HopCost(NamedTuple):
    """A `HopCost` is the predicted cost of one step of a pass on its busiest rank."""

    compute: float  # seconds
    communication: float  # seconds
    bytes: int

    @property
    def seconds(self) -> float:
        """Return the time of the step. Computation and communication overlap."""
        return max(self.compute, self.communication)


def hop_costs(
    schedule: Schedule,
    row_bytes: tuple[int, int],
    flops: Callable[[LocalSteps], np.ndarray | float],
    interconnect: Interconnect,
    rank: int | None = None,
) -> list[HopCost]:
    """Return the cost of every step of a schedule for `rank`. With rank=None, each number is the maximum over all ranks.

    `row_bytes` contains the bytes per row of a circulating block and of a result. `flops` returns the FLOPs of local steps.
    """
    shape = schedule.num_steps, schedule.ranks
    local_steps, messages = schedule.local_steps, schedule.messages
    compute = np.zeros(shape)
    np.add.at(compute, (local_steps.step, local_steps.rank), flops(local_steps) / interconnect.flops)
    size = (messages.stop - messages.start) * np.array(row_bytes)[messages.is_result]
    # A link sends and receives at the same time, so the slower direction counts.
    sizes, counts = np.zeros((2, *shape), dtype=size.dtype), np.zeros((2, *shape), dtype=np.int64)
    for i, end in enumerate((messages.src, messages.dst)):
        np.add.at(sizes[i], (messages.step, end), size)
        np.add.at(counts[i], (messages.step, end), 1)
    seconds = (sizes / interconnect.bytes_per_second + counts * interconnect.latency).max(0)
    columns = compute, seconds, sizes.max(0)
    busiest = (x.max(1) if rank is None else x[:, rank] for x in columns)
    return [HopCost(*x) for x in zip(*(x.tolist() for x in busiest), strict=True)]
