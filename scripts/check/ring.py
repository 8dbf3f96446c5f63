"""Hold attention over the ranks of a job to float64: each mask, layout, schedule and transport, and heads exchanged.

    torchrun --nproc_per_node=8 -m scripts.check.ring
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m scripts.check.ring

For a new machine or cluster, before a long run: bf16 over NVLink and NCCL where ranks have GPUs, else fp32 over gloo. Prints a
table of the largest row error over all ranks, relative to the row's scale; exits with 1, naming the rank, if one is too large.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, Mask, balanced_layout, ring_attention, ulysses_attention
from ringattn.comm import transport
from ringattn.layout import KINDS
from ringattn.train.config import ConfigError
from ringattn.train.parallel import mesh as parallel
from scripts.check.kernels import LSE_TOLERANCE, NAMES, TOLERANCE, errors_of

FP32_TOLERANCE = 5e-5  # of sums over 2,000 keys; one key less is off by 2e-2


@dataclass(frozen=True)
class Way:
    """How the ranks share attention."""

    transport: str
    schedule: str
    ulysses: int  # ranks that exchange heads; the ring goes across such groups

    def __str__(self) -> str:
        heads = f", heads exchanged among {self.ulysses}" if self.ulysses > 1 else ""
        return f"{self.transport}, {self.schedule}{heads}"


def ways(device: torch.device) -> Iterator[Way]:
    """All ways that the ranks of this job have."""
    ranks = dist.get_world_size()
    sizes = [size for size in (1, 2, ranks) if ranks % size == 0]
    for name in ("nvlink", "p2p"):
        try:
            transport.resolve(dist.group.WORLD.group_name, device, name)
        except ValueError as error:
            if dist.get_rank() == 0:
                print(error)
            continue
        for size in dict.fromkeys(sizes):
            yield from (Way(name, schedule, size) for schedule in (("state", "kv") if size < ranks else ("auto",)))


def masks(seq_len: int) -> dict[str, Mask]:
    """By name; documents of one token stand at both ends, and one spans many ranks."""
    half = seq_len // 2
    documents = [1, half, 7, seq_len - half - 9, 1]
    return {
        "causal": Mask.causal(),
        "full": Mask.full(),
        "window": Mask.causal(window=seq_len // 10),
        "documents": Mask.causal(documents=documents),
    }


def attend(way: Way, layout: Layout, mask: Mask, shards: list[Tensor]) -> list[Tensor]:
    """This rank's (out, lse, dq, dk, dv), of its shards of q, k, v and dout."""
    mesh = parallel.build_mesh(shards[0].device.type, dist.get_world_size(), way.ulysses)
    groups = dict(ulysses_group=mesh.ulysses.get_group(), ring_group=mesh.ring.get_group())
    options = dict(schedule=way.schedule, transport=way.transport, return_lse=True)
    q, k, v = (x.requires_grad_() for x in shards[:3])
    out, lse = ulysses_attention(q, k, v, layout=layout, mask=mask, **groups, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), shards[3])]


def exact(mask: Mask, tensors: list[Tensor]) -> list[Tensor]:
    """(out, lse, dq, dk, dv) of the whole sequence, in float64 and without any other rank."""
    q, k, v, dout = (x.double() for x in tensors)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    alone = Layout.contiguous(q.shape[1], 1)
    out, lse = ring_attention(q, k, v, layout=alone, mask=mask, backend="reference", return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def largest_errors(way: Way, mask: Mask, tensors: list[Tensor], expected: list[Tensor]) -> Tensor:
    """Over all layouts, (P, 5): of every rank's out, lse, dq, dk, dv."""
    rank, ranks, seq_len = dist.get_rank(), dist.get_world_size(), tensors[0].shape[1]
    errors = torch.zeros(len(NAMES), dtype=torch.float64)
    ring = ranks // way.ulysses
    for whole in (*(Layout(kind, seq_len, ring) for kind in KINDS), balanced_layout(mask, seq_len, ring)):
        layout = whole.split(way.ulysses)
        results = attend(way, layout, mask, [layout.shard(x, rank).clone() for x in tensors])
        here = errors_of(tuple(results), tuple(layout.shard(x, rank) for x in expected))
        errors = torch.maximum(errors, torch.tensor(here, dtype=torch.float64))
    everyone = [torch.empty_like(errors) for _ in range(ranks)]
    dist.all_gather(everyone, errors)
    return torch.stack(everyone)


def check(device: torch.device, seq_len: int, head_dim: int) -> list[str]:
    """Print a table, a line at a time. Returns what is wrong, a line each, on every rank.

    Raises:
        ValueError: too short a sequence.
    """
    if seq_len < (shortest := max(64, 8 * dist.get_world_size())):
        raise ValueError(
            f"--seq-len {seq_len}: every rank needs some rows, and every mask some to hide; give {shortest} or more"
        )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    eps = torch.finfo(dtype).eps
    limits = [LSE_TOLERANCE if name == "lse" else max(TOLERANCE[name] * eps, FP32_TOLERANCE) for name in NAMES]
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(0)
    heads = (2 * ranks, ranks, ranks, 2 * ranks)  # of q, k, v, dout
    tensors = [torch.randn(1, seq_len, count, head_dim, generator=generator).to(device, dtype) for count in heads]
    expected = {name: exact(mask, tensors) for name, mask in masks(seq_len).items()}
    lines = [f"{ranks} ranks on {device.type}, {str(dtype).removeprefix('torch.')}, S {seq_len}, D {head_dim}", ""]
    lines += ["| way | mask | " + " | ".join(NAMES) + " |", "|---" * (2 + len(NAMES)) + "|"]
    failures: list[str] = []
    for way in ways(device):
        for name, mask in masks(seq_len).items():
            errors = largest_errors(way, mask, tensors, expected[name])
            lines.append(f"| {way} | {name} | " + " | ".join(f"{error:.1e}" for error in errors.amax(0)) + " |")
            failures += [
                f"{way}, {name}: rank {int(errors[:, i].argmax())} is off by {errors[:, i].max():.1e} in {NAMES[i]}"
                for i in range(len(NAMES))
                if not errors[:, i].max() <= limits[i]
            ]
            if dist.get_rank() == 0:
                print("\n".join(lines), flush=True)
            lines = []
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=2051, help="tokens over all ranks (default: %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="features of a head (default: %(default)s)")
    args = parser.parse_args()
    parallel.start()
    try:
        device = parallel.pick_device("auto")
        failures = check(device, args.seq_len, args.head_dim)
    except (ConfigError, ValueError) as error:
        failures = [f"error: {error}"]
    if dist.get_rank() == 0:
        print("\n".join(failures) or "every error is within its tolerance", file=sys.stderr if failures else sys.stdout)
    dist.barrier()
    parallel.stop()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
