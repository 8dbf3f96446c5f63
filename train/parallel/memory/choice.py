"""Choose the memory plan of a run."""

from dataclasses import replace

import torch

from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.chunks import CHUNK
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.settings.config import Config


def choose_plan(
    config: Config, shape: MeshShape, vocab_size: int, bf16: bool, compiled: bool, device: torch.device
) -> tuple[MemoryPlan, dict[str, float]]:
    """Return the memory plan of a run, and the bytes that a rank then needs, see `estimate.peak_bytes`.

    With `memory.activations=auto`, no more blocks are recomputed than necessary to leave some memory of a GPU free.
    """
    layers = config.model.layers
    ranges = {"auto": (0, layers), "keep": (0, 0), "recompute": (layers, layers), "offload": (layers, layers)}
    least, most = ranges[config.memory.activations]
    plan = MemoryPlan(
        recomputed_blocks=least,
        offloaded_blocks=layers - 1 if config.memory.activations == "offload" else 0,
        chunk=config.memory.chunk or 0,
        host_blocks=layers if config.memory.optimizer == "offload" else 0,
    )
    needed = estimate.peak_bytes(config, shape, vocab_size, bf16, compiled, plan)
    while plan.recomputed_blocks < most and estimate.is_tight(needed, device):
        plan = replace(plan, recomputed_blocks=plan.recomputed_blocks + 1)
        needed = estimate.peak_bytes(config, shape, vocab_size, bf16, compiled, plan)
    is_long = estimate.tokens_per_rank(config, shape) > CHUNK
    if config.memory.chunk is None and is_long and plan.recomputed_blocks == layers and estimate.is_tight(needed, device):
        plan = replace(plan, chunk=CHUNK)
        needed = estimate.peak_bytes(config, shape, vocab_size, bf16, compiled, plan)
    return plan, needed
