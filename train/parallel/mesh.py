"""How ranks share the work: process groups, the mesh of data-parallel x ring x Ulysses ranks, sharded parameters, agreement.

A batch is cut twice: sequences over the "dp" axis of the mesh, tokens of a sequence over the other two, which attend on a ring
and exchange heads. Parameters, gradients and optimizer state are sharded over all ranks (FSDP2): a ring of any size costs no
copy of them.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from ringattn import save_attention
from ringattn.comm import watchdog
from ringattn.train.config import ConfigError
from ringattn.train.model.gpt import GPT
from ringattn.train.parallel import memory

log = logging.getLogger(__name__)

START_TIMEOUT = timedelta(minutes=30)
USERS_TIMEOUT = os.environ.get(watchdog.TIMEOUT)  # of a hop, from outside: it has the last word
CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


def start() -> dist.Store:
    """Join the process group of all ranks: those of torchrun, or this process alone.

    Tensors on GPUs travel by NCCL and those on CPUs by gloo: nothing need be chosen before the settings are read.

    Returns:
        A store that all ranks share.
    """
    if "RANK" in os.environ:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=START_TIMEOUT))
    else:
        store, rank, world_size = dist.HashStore(), 0, 1
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=START_TIMEOUT)
    return store


def stop() -> None:
    """Leave the process group."""
    build_mesh.cache_clear()
    dist.destroy_process_group()


def broadcast_object(value: Any) -> Any:
    """Rank 0's `value`, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@contextmanager
def sync_errors() -> Iterator[None]:
    """Run the body on all ranks; where it raised ConfigError on any, every rank raises that of the lowest one.

    So a file that only one rank misses ends all ranks alike, with one message, and none waits for the others for ever.
    """
    mine = None
    try:
        yield
    except ConfigError as error:
        mine = str(error)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    message = next((message for message in everyone if message is not None), None)
    if message is not None:
        raise ConfigError(message)


def set_deterministic(wanted: bool) -> None:
    """Let every operation that has one take its variant that gives the same bits in every run, or let it be."""
    if wanted:
        if not torch.cuda.is_initialized():  # cuBLAS reads it when it is first used
            os.environ.setdefault(CUBLAS, ":4096:8")
        elif CUBLAS not in os.environ and dist.get_rank() == 0:
            log.warning("trainer.deterministic=true after a job without it: its bits may vary; set %s=:4096:8 before", CUBLAS)
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(wanted, warn_only=True)


def local_ranks() -> int:
    """How many ranks this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def pick_device(name: str) -> torch.device:
    """This rank's device for `trainer.device`; on a CPU, the cores are divided among the ranks of the machine.

    Raises:
        ConfigError: no GPU, or fewer than ranks.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks()))
        return torch.device("cpu")
    if torch.cuda.device_count() < local_ranks():
        raise ConfigError(
            f"trainer.device={name}: this machine has {torch.cuda.device_count()} usable GPUs for {local_ranks()} ranks, "
            "and each rank needs its own: launch fewer ranks, or set trainer.device=cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


@dataclass(frozen=True)
class Mesh:
    """All ranks as a box of data-parallel x ring x Ulysses, seen along one axis at a time, and flat."""

    dp: DeviceMesh
    sequence: DeviceMesh  # the ranks that share one sequence: ring x ulysses, flat
    ring: DeviceMesh
    ulysses: DeviceMesh
    all: DeviceMesh


@lru_cache  # the jobs of a sweep that have the same mesh share its process groups
def build_mesh(device_type: str, sequence: int, ulysses: int = 1) -> Mesh:
    """The mesh in which `sequence` ranks share a sequence, `ulysses` of which exchange heads.

    Those that exchange heads are neighbours by rank, and neighbours in a ring are as near as that leaves them.
    """
    shape = dist.get_world_size() // sequence, sequence // ulysses, ulysses
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "ring", "ulysses"))
    return Mesh(mesh["dp"], mesh["ring", "ulysses"]._flatten("sequence"), mesh["ring"], mesh["ulysses"], mesh._flatten("all"))


def set_timeout(mesh: Mesh, seconds: int) -> None:
    """How long a collective, or a hop of a ring, may take before its ranks fail; the environment has the last word on hops."""
    if USERS_TIMEOUT is None:
        os.environ[watchdog.TIMEOUT] = str(seconds)
    for group in (None, *(axis.get_group() for axis in (mesh.dp, mesh.sequence, mesh.ring, mesh.ulysses, mesh.all))):
        _set_pg_timeout(timedelta(seconds=seconds), group)


def shard(model: GPT, mesh: Mesh, device: torch.device, seed: int, bf16: bool) -> None:
    """Give a model built on the meta device its parameters, this rank's shards only, block by block.

    Every rank draws the same numbers and keeps its part, so the start does not depend on how many ranks there are.
    With `bf16`, the model computes in bf16 from fp32 parameters, and gradients are summed in fp32. Those of a unit of blocks
    (`memory.unit`) are gathered for its forward, and anew for its backward unless all are few (`memory.stay_whole`).
    """
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    options = dict(mesh=mesh.all, mp_policy=precision if bf16 else MixedPrecisionPolicy())
    if memory.stay_whole(model.config, bf16):
        options["reshard_after_forward"] = False
    generator = torch.Generator(device).manual_seed(seed)
    size, blocks = memory.unit(model.config, bf16), list(model.blocks)
    for unit in (*(blocks[start : start + size] for start in range(0, len(blocks), size)), [model]):
        for module in unit:
            _materialise(module, device)
            module.init_weights(generator)
        fully_shard(unit, **options)
        # the loss is already divided by the tokens of all ranks: gradients are summed, never averaged
        unit[0].set_gradient_divide_factor(1.0)
        unit[0].set_force_sum_reduction_for_comms(True)


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate what is still on the meta device in `module`, which leaves blocks sharded before alone."""
    for submodule in module.modules():
        if any(p.is_meta for p in submodule.parameters(recurse=False)):
            submodule.to_empty(device=device, recurse=False)


def compile_blocks(model: GPT) -> None:
    """Fuse what lies around attention in every block; attention and its communication stay as they are."""
    for block in model.blocks:
        block.before, block.after = torch.compile(block.before), torch.compile(block.after)


def checkpoint_activations(model: GPT) -> None:
    """Keep only the input of a block and its attention's output, and recompute the rest in the backward.

    Attention is the dear part and its communication involves other ranks: neither ever runs twice. Where heads are exchanged
    q, k and v are exchanged once more (`recompute_all_to_all`), which is cheap beside the memory of what that brings.
    """
    for block in model.blocks:
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=save_attention
        )
