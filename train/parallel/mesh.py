"""Build the mesh of data-parallel x ring x Ulysses ranks.

The "dp" axis splits the sequences of a batch. The other two axes split the tokens of each sequence. Ring attention uses the
"ring" axis. The ranks of the "ulysses" axis exchange heads by all-to-all.
"""

import os
from collections import Counter
from datetime import timedelta
from functools import lru_cache, partial
from math import gcd
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringattn import Layout, Mask, balanced_layout, ulysses_attention
from ringattn.comm import watchdog
from ringattn.mask import Lengths
from ringattn.train.settings.config import Config, ModelConfig

if TYPE_CHECKING:  # A process that loads data imports this module without the model.
    from ringattn.train.model.gpt import Attend

Masks = dict[int | None, Mask]  # the mask of each window that a layer has

# If the user has set this variable, its timeout takes precedence over the settings.
USER_HOP_TIMEOUT = os.environ.get(watchdog.TIMEOUT)

# PyTorch has exported `set_timeout` since release 2.14.
set_group_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout


class MeshShape(NamedTuple):
    """Counts the ranks along each axis of the mesh."""

    dp: int
    ring: int
    ulysses: int

    @property
    def sequence(self) -> int:
        return self.ring * self.ulysses

    @property
    def ranks(self) -> int:
        return self.dp * self.ring * self.ulysses


class Mesh(NamedTuple):
    """Holds the one-dimensional meshes to which this rank belongs."""

    dp: DeviceMesh  # the ranks that hold different sequences
    sequence: DeviceMesh  # the ranks that share one sequence, along both the ring axis and the ulysses axis
    ring: DeviceMesh  # the ranks of a ring
    ulysses: DeviceMesh  # the ranks that exchange heads by all-to-all
    all: DeviceMesh

    @property
    def shape(self) -> MeshShape:
        return MeshShape(self.dp.size(), self.ring.size(), self.ulysses.size())


def causal_masks(model: ModelConfig, documents: Lengths | None = None) -> Masks:
    return {window: Mask.causal(window, documents) for window in model.windows}


def attention_inputs(config: Config, bf16: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of whole sequences on the "meta" device, which has shapes and dtypes only."""
    model = config.model
    sizes = config.trainer.batch_size, config.data.seq_len, model.heads, model.resolved_head_dim
    q = torch.empty(sizes, dtype=torch.bfloat16 if bf16 else torch.float32, device="meta")
    k = q[:, :, : model.kv_heads]
    return q, k, k


def count_layers(model: ModelConfig, masks: Masks) -> dict[Mask, int]:
    """Count the layers with each mask, and divide the counts by their greatest common divisor."""
    counts = Counter(model.windows)
    return {masks[window]: count // gcd(*counts.values()) for window, count in counts.items()}


def choose_layout(config: Config, shape: MeshShape, masks: Masks) -> Layout:
    """Choose which rank holds which tokens of a sequence."""
    kind, seq_len = config.parallel.layout, config.data.seq_len
    if kind == "auto":
        return balanced_layout(count_layers(config.model, masks), seq_len, shape.ring).split(shape.ulysses)
    return Layout(kind, seq_len, shape.ring).split(shape.ulysses)


def attention(
    config: Config, mesh: Mesh, masks: Masks, layout: Layout, training: bool, recompute: bool = False
) -> "list[Attend]":
    """Return one attention function per layer. The ranks that share a sequence call it together.

    Args:
        training: whether the functions are used in a training step.
        recompute: whether the backward pass recomputes blocks, except for attention.
    """
    attend = partial(
        ulysses_attention,
        layout=layout,
        ulysses_group=mesh.ulysses.get_group(),
        ring_group=mesh.ring.get_group(),
        schedule=config.parallel.schedule,
        route=config.parallel.route,
        backend=config.parallel.kernel,
        precision=config.trainer.attention_precision(training),
        recompute_all_to_all=recompute,
    )
    return [cast("Attend", partial(attend, mask=masks[window])) for window in config.model.windows]


@lru_cache  # If two jobs of a sweep have the same mesh, the second job reuses the process groups.
def build_mesh(device_type: str, sequence: int, ulysses: int = 1) -> Mesh:
    """Build the mesh. The ranks of an all-to-all have consecutive numbers, so they are usually on the same host.

    Args:
        sequence: the number of ranks that share a sequence.
        ulysses: the number of ranks per all-to-all, which must divide `sequence`.
    """
    shape = dist.get_world_size() // sequence, sequence // ulysses, ulysses
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "ring", "ulysses"))
    flatten = DeviceMesh._flatten
    shared = flatten(mesh["ring", "ulysses"], "sequence")
    return Mesh(mesh["dp"], shared, mesh["ring"], mesh["ulysses"], flatten(mesh, "all"))


def set_timeout(mesh: Mesh, seconds: int) -> None:
    """Set the timeout of collectives, and of ring hops unless the user has set RINGATTN_TIMEOUT."""
    if USER_HOP_TIMEOUT is None:
        os.environ[watchdog.TIMEOUT] = str(seconds)
    for group in (None, *(axis.get_group() for axis in mesh)):
        set_group_timeout(timedelta(seconds=seconds), group)
