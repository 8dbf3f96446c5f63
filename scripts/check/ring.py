"""Compare attention on all ranks with a float64 reference, for every mask, layout, schedule, transport and Ulysses degree.

    torchrun --nproc_per_node=8 -m scripts.check.ring
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m scripts.check.ring
    torchrun --nproc_per_node=8 -m scripts.check.ring --precision fp8

Run this script on a new machine or cluster before a long training run. On GPUs, the inputs are bf16, and the transports are
NVLink and NCCL. If a host has more ranks than GPUs, several ranks share a GPU, and gloo replaces NCCL. Without GPUs, the inputs
are fp32, and the transport is gloo.

The script prints a table with the largest `row_error` of all ranks. If an error exceeds its limit, the script prints the rank,
and the exit status is 1. With --precision fp8, the inputs of the reference are rounded as on the ranks.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, Mask, balanced_layout, ulysses_attention
from ringattn.comm.connect import connect
from ringattn.comm.p2p import backend_name
from ringattn.kernels import dispatch, fp8
from ringattn.kernels.interval_mask import Intervals
from ringattn.layout import KINDS
from ringattn.train.commands.messages import exit_process
from ringattn.train.parallel.mesh import build_mesh
from ringattn.train.parallel.ranks import connect_ranks, disconnect_ranks, pick_device, sync_errors
from ringattn.train.settings.config import ConfigError
from scripts import command
from scripts.accuracy import NAMES, float64_results, row_errors, row_limits
from scripts.gpus import world_group
from scripts.tables import markdown_table

# The largest accepted row errors of the FP8 kernel, which also rounds the probabilities.
FP8_LIMITS = {"out": 0.1, "lse": 0.1, "dq": 0.2, "dk": 0.2, "dv": 0.1}


@dataclass(frozen=True)
class Way:
    transport: str
    schedule: str
    ulysses: int  # the number of ranks per all-to-all; the ring connects Ulysses groups of this size

    def __str__(self) -> str:
        all_to_all = f", all-to-all among {self.ulysses}" if self.ulysses > 1 else ""
        return f"{self.transport}, {self.schedule}{all_to_all}"


def available_ways(device: torch.device) -> Iterator[Way]:
    """Yield all combinations of transport, schedule and Ulysses degree that the machine supports."""
    ranks = dist.get_world_size()
    degrees = [degree for degree in dict.fromkeys((1, 2, ranks)) if ranks % degree == 0]
    for transport in ("nvlink", "p2p"):
        usable = degrees
        try:
            connect(world_group().group_name, device, transport)
        except ValueError as error:
            if dist.get_rank() == 0:
                print(error)
            # On several hosts, "auto" combines an all-to-all over NVLink inside each host with a ring over NCCL.
            transport, usable = "auto", [degree for degree in degrees if 1 < degree < ranks and device.type == "cuda"]
        for degree in usable:
            # If the all-to-all includes all ranks, the ring has one rank and sends nothing. Both schedules are then the same.
            schedules = ("state", "kv") if degree < ranks else ("auto",)
            yield from (Way(transport, schedule, degree) for schedule in schedules)


def make_masks(seq_len: int) -> dict[str, Mask]:
    """Return one mask of each kind. The first and the last packed document have one token each, and one document spans many
    ranks.
    """
    half = seq_len // 2
    documents = [1, half, 7, seq_len - half - 9, 1]
    return {
        "causal": Mask.causal(),
        "full": Mask.full(),
        "window": Mask.causal(window=seq_len // 10),
        "documents": Mask.causal(documents=documents),
    }


def attend(way: Way, layout: Layout, mask: Mask, shards: list[Tensor], precision: str = "ieee") -> dict[str, Tensor]:
    """Compute attention and its gradients on this rank's shards. Return the tensors of NAMES."""
    mesh = build_mesh(shards[0].device.type, dist.get_world_size(), way.ulysses)
    groups = dict(ulysses_group=mesh.ulysses.get_group(), ring_group=mesh.ring.get_group())
    options = dict(schedule=way.schedule, transport=way.transport, precision=precision, return_lse=True)
    q, k, v = (x.requires_grad_() for x in shards[:3])
    out, lse = ulysses_attention(q, k, v, layout=layout, mask=mask, **groups, **options)
    grads = torch.autograd.grad(out, (q, k, v), shards[3])
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


class Reference:
    """Compute float64 results for the whole sequence. With precision="fp8", the inputs are first rounded. The rounding depends
    on the layout.
    """

    def __init__(self, tensors: list[Tensor], masks: dict[str, Mask], precision: str) -> None:
        seq_len, device = tensors[0].shape[1], tensors[0].device
        self.tensors, self.precision = tensors, precision
        self.intervals = {mask: Intervals.of(*mask.intervals(seq_len), seq_len, device) for mask in masks.values()}
        self._results: dict[tuple[Any, ...], dict[str, Tensor]] = {}

    def results(self, mask: Mask, layout: Layout) -> dict[str, Tensor]:
        key = mask, layout if self.precision == "fp8" else None
        if key not in self._results:
            compute = self._rounded_results if self.precision == "fp8" else self._plain_results
            self._results[key] = compute(mask, layout)
        return self._results[key]

    def _plain_results(self, mask: Mask, _layout: Layout) -> dict[str, Tensor]:
        q, k, v, dout = self.tensors
        return float64_results(q, k, v, dout, self.intervals[mask])

    def _rounded_results(self, mask: Mask, layout: Layout) -> dict[str, Tensor]:
        *inputs, dout = self.tensors
        shards = [dispatch.round_to_fp8(*(layout.shard(x, rank) for x in inputs)) for rank in range(layout.ranks)]
        q, k, v = (layout.unshard([shard[i] for shard in shards]) for i in range(3))
        results = float64_results(q, k, v, dout, self.intervals[mask])
        return results | {name: fp8.rotate_back(results[name]) for name in ("dq", "dk")}


def largest_errors(way: Way, mask: Mask, expected: Reference) -> Tensor:
    """Return the largest row errors over all layouts, as a float64 tensor (ranks, len(NAMES))."""
    rank, ranks, seq_len = dist.get_rank(), dist.get_world_size(), expected.tensors[0].shape[1]
    ring = ranks // way.ulysses
    largest = torch.zeros(len(NAMES), dtype=torch.float64)
    for ring_layout in (*(Layout(kind, seq_len, ring) for kind in KINDS), balanced_layout(mask, seq_len, ring)):
        layout = ring_layout.split(way.ulysses)
        results = attend(way, layout, mask, [layout.shard(x, rank).clone() for x in expected.tensors], expected.precision)
        whole = expected.results(mask, ring_layout)
        errors = row_errors(results, {name: layout.shard(x, rank) for name, x in whole.items()})
        largest = torch.maximum(largest, torch.tensor([errors[name] for name in NAMES], dtype=torch.float64))
    by_rank = [torch.empty_like(largest) for _ in range(ranks)]
    dist.all_gather(by_rank, largest)
    return torch.stack(by_rank)


def find_failures(errors: Tensor, limits: dict[str, float]) -> list[str]:
    failures: list[str] = []
    for i, name in enumerate(NAMES):
        if not errors[:, i].max() <= limits[name]:
            failures.append(f"rank {int(errors[:, i].argmax())} is off by {errors[:, i].max():.1e} in {name}")
    return failures


def check_sequence_length(seq_len: int) -> None:
    """Check that the sequence is long enough for all masks and ranks.

    Raises:
        ConfigError: the sequence is too short.
    """
    if seq_len < (minimum := max(64, 8 * dist.get_world_size())):
        raise ConfigError(f"--seq-len {seq_len}: must be at least {minimum} for {dist.get_world_size()} ranks")


def limits(device: torch.device, dtype: torch.dtype, precision: str) -> dict[str, float]:
    return FP8_LIMITS if precision == "fp8" and device.type == "cuda" else row_limits(dtype)


def check(device: torch.device, seq_len: int, head_dim: int, precision: str = "ieee") -> list[str]:
    """Check all masks and all ways to divide attention among the ranks, and print the table.

    Returns:
        One line for each error that exceeds its limit. All ranks return the same lines.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(0)
    heads = (2 * ranks, ranks, ranks, 2 * ranks)  # of q, k, v and dout
    tensors = [torch.randn(1, seq_len, count, head_dim, generator=generator).to(device, dtype) for count in heads]
    masks = make_masks(seq_len)
    expected, accepted = Reference(tensors, masks, precision), limits(device, dtype, precision)

    shares_gpu = device.type == "cuda" and backend_name(world_group(), "cuda") == "gloo"
    place = "cuda (several ranks share a GPU)" if shares_gpu else device.type
    title = f"{ranks} ranks on {place}, {str(dtype).removeprefix('torch.')}, S {seq_len}, D {head_dim}"
    title += ", FP8 forward" if precision == "fp8" else ""
    text = f"{title}\n\n" + markdown_table(" | ".join(("way", "mask", *NAMES)), [])
    failures: list[str] = []
    for way in available_ways(device):
        for name, mask in masks.items():
            errors = largest_errors(way, mask, expected)
            failures += [f"{way}, {name}: {failure}" for failure in find_failures(errors, accepted)]
            text += f"| {way} | {name} | " + " | ".join(f"{error:.1e}" for error in errors.amax(0)) + " |"
            if dist.get_rank() == 0:
                print(text, flush=True)
            text = ""
    return failures


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    parser.add_argument(
        "--seq-len", type=command.at_least(1), default=2051, help="tokens of the whole sequence (default: %(default)s)"
    )
    parser.add_argument("--head-dim", type=command.at_least(1), default=128, help="default: %(default)s")
    parser.add_argument("--precision", choices=("ieee", "fp8"), default="ieee", help="default: %(default)s")
    return parser.parse_args(argv)


@command.exit_without_memory()
def main(argv: list[str]) -> int:
    args = parse(argv)
    connect_ranks(share_gpus=True)
    try:
        with sync_errors():
            device = pick_device("auto", share_gpus=True)
            check_sequence_length(args.seq_len)
        failures = check(device, args.seq_len, args.head_dim, args.precision)
    except ConfigError as error:
        failures = [f"error: {error}"]
    if dist.get_rank() == 0:
        print("\n".join(failures) or "every error is within its limit", file=sys.stderr if failures else sys.stdout)
    dist.barrier()
    disconnect_ranks()
    return 1 if failures else 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
