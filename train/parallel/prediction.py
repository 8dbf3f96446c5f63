"""Predict the time of a training step on a mesh of GPUs, and choose the mesh with the highest predicted tokens/s.

A micro-step takes as long as the GPUs or their hosts need, whichever are slower. `ringattn.planning` predicts attention. The
constants below predict all other work, and were fitted to runs on one to four H100s and H200s, see
tests/train/parallel/test_prediction.py.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ringattn.planning.cost_model import attention_flops, interconnect
from ringattn.planning.ulysses_degree import EQUAL_TIMES, MAX_PLANNED_RANKS, attention_seconds
from ringattn.train.model import flops
from ringattn.train.model.gpt import padded_vocabulary
from ringattn.train.parallel.graphs import can_capture, uses_graphs
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.choice import choose_plan
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape, causal_masks, count_layers
from ringattn.train.settings.config import Config, ConfigError

# Matrix products reach this fraction of the peak: 690 of 989 TFLOP/s with the 1.44B model on two H200s.
MATMUL_EFFICIENCY = 0.7
# The speed of attention, relative to `cost_model.attention_flops`, with the 1.44B model on H200s.
ATTENTION_EFFICIENCY = 1.06
# The speed with packed documents, relative to one document, with the default model on one H200.
DOCUMENT_EFFICIENCY = 0.95
# The bytes per second of GPU memory, from NVIDIA's data sheets. The first pattern that matches applies.
MEMORY_BYTES_PER_S = (
    (r"B200", 8.0e12),
    (r"H200", 4.8e12),
    (r"H100 PCIe", 2.0e12),
    (r"H100", 3.35e12),
    (r"\bA100\b", 2.0e12),
    (r"L40S", 0.86e12),
    (r"\bL4\b", 0.3e12),
    (r"\bA10\b", 0.6e12),
)
# Fused kernels reach this fraction of the bytes per second.
MEMORY_EFFICIENCY = 0.7
# Per token and layer, fused kernels read and write 40 times the width of the model, and 12 times the width of the feed-forward
# network, in both passes together. In the 1.44B model, these kernels take 110 ms.
ELEMENTS_PER_DIM, ELEMENTS_PER_FFN_DIM = 40, 12
# Clipping and AdamW read and write this many bytes per parameter of a rank's shard, in fp32.
OPTIMIZER_BYTES = 40
# Bytes per second of FSDP's collectives inside a host. The collectives take 40 ms for the 1.44B model on two H200s.
COLLECTIVE_BYTES_PER_S = 144e9

# Seconds that the host of a rank needs for the default model on H100s and H200s. Other hosts differ.
HOST_STEP = 4e-3  # per step
HOST_GROUP = 3e-3  # FSDP's hooks of a group of blocks, forward and backward
HOST_BLOCK = 1.6e-3  # the four compiled parts of a block, forward and backward
HOST_HOP = 0.4e-3  # a step of a ring pass; a ring of R ranks has about 3 R + 1 in the forward and the backward pass
HOST_ALL_TO_ALL = 5e-3  # the all-to-alls of a block, forward and backward

# Another mesh is mentioned if its predicted tokens/s are at least this many times as high.
WORTH_MENTIONING = 1.05

Shares = Mapping[int | None, float]
NO_DOCUMENTS: Shares = {}


class Gpu(NamedTuple):
    """The speed of a GPU."""

    matmul: float  # FLOP/s of matrix products
    attention: float  # FLOP/s of attention
    memory: float  # bytes per second of fused kernels

    @classmethod
    def of(cls, device: torch.device) -> "Gpu | None":
        """Return the speed of a GPU, or None if the tables do not contain the device."""
        peak = flops.peak_flops(device)
        if peak is None:
            return None
        name = torch.cuda.get_device_name(device)
        memory_speed = next(speed for pattern, speed in MEMORY_BYTES_PER_S if re.search(pattern, name))
        return cls(MATMUL_EFFICIENCY * peak, ATTENTION_EFFICIENCY * attention_flops(device), MEMORY_EFFICIENCY * memory_speed)


class Machine(NamedTuple):
    """The ranks of a job and what their model needs."""

    device: torch.device
    gpu: Gpu
    ranks: int
    ranks_per_host: int
    vocab_size: int  # the number of tokens that the tokenizer has
    bf16: bool
    compiled: bool

    def choose_plan(self, config: Config, shape: MeshShape) -> tuple[MemoryPlan, dict[str, float]]:
        """Return the memory plan of a run on this mesh, and the memory that a rank would need, see `choose_plan`."""
        return choose_plan(config, shape, self.vocab_size, self.bf16, self.compiled, self.device)


def step_seconds(config: Config, shape: MeshShape, machine: Machine, shares: Shares = NO_DOCUMENTS) -> float:
    """Return the predicted seconds of an optimizer step.

    Args:
        config: the settings of the run. `trainer.tokens_per_step`, if set, determines the number of micro-steps.
        shape: the numbers of ranks, which may differ from those of the settings.
        machine: the ranks of the job.
        shares: by the window of a layer, the number of (query, key) pairs that the mask allows in a mean sequence, relative to
            a single document; 1 for windows that are left out.
    """
    model, trainer, gpu = config.model, config.trainer, machine.gpu
    plan, _ = machine.choose_plan(config, shape)
    share_recomputed = plan.recomputed_blocks / model.layers
    size = 2 if machine.bf16 else 4
    tokens = trainer.batch_size * estimate.tokens_per_rank(config, shape)
    logits_dim = padded_vocabulary(model, machine.vocab_size)
    head, blocks = logits_dim * model.dim, model.layers * estimate.block_parameters(model)
    used = model.layers * estimate.used_block_parameters(model)
    vocab = head * (1 if model.tie_embeddings else 2)

    matmul = tokens * ((6 + 2 * share_recomputed) * used + 6 * head) / gpu.matmul
    attention = 0.0
    for window, count in Counter(model.windows).items():
        share = shares.get(window, 1.0)  # Data-parallel ranks read sequences of similar cost, see `data.group_size`.
        seconds = share * count * sum(_attention_seconds(config, shape, machine, window))
        attention += seconds / DOCUMENT_EFFICIENCY if share < 1 else seconds
    per_layer = ELEMENTS_PER_DIM * model.dim + ELEMENTS_PER_FFN_DIM * estimate.hidden_dim(model)
    elements = model.layers * per_layer * (1 + share_recomputed / 3) + 6 * logits_dim
    gathers = 2 if estimate.reshard_after_forward(model, machine.bf16) else 1
    # FSDP copies gathered parameters, and casts gradients to fp32.
    copied = (vocab + blocks) * (2 * gathers * size + size + 4)
    compute = matmul + attention + (size * tokens * elements + copied) / gpu.memory

    one_host = machine.ranks <= machine.ranks_per_host
    link = COLLECTIVE_BYTES_PER_S if one_host else interconnect("nccl", one_host=False).bytes_per_second
    per_byte = (machine.ranks - 1) / machine.ranks / link
    collectives = per_byte * (size * (vocab + gathers * blocks) + 4 * (vocab + blocks))
    # The first gather and the last reduction do not overlap with computation.
    exposed = per_byte * (size + 4) * vocab

    groups = -(-model.layers // estimate.blocks_per_group(model, machine.bf16))
    hops = 3 * shape.ring + 1 if shape.ring > 1 else 1
    # Graphs may be impossible with another mesh, even if `trainer.cuda_graphs` is True.
    situation = config, shape, machine.device, machine.compiled and plan == MemoryPlan(), machine.bf16
    graphed = can_capture(*situation) and uses_graphs(*situation)
    # The replay of a graph takes almost no time on the host.
    block = 0.0 if graphed else HOST_BLOCK + hops * HOST_HOP + (HOST_ALL_TO_ALL if shape.ulysses > 1 else 0)
    # If there are several groups, the parameters outside the blocks are a further group.
    host = (groups + (groups > 1)) * HOST_GROUP + model.layers * block

    micro_step = max(max(compute, collectives) + exposed, host)
    optimizer = OPTIMIZER_BYTES * (vocab + blocks) / machine.ranks / gpu.memory
    return HOST_STEP + num_micro_steps(config, shape) * micro_step + optimizer


def num_micro_steps(config: Config, shape: MeshShape) -> int:
    """Return the number of micro-steps of a step on this mesh."""
    trainer = config.trainer
    if trainer.tokens_per_step is None:
        return trainer.accumulate
    return trainer.tokens_per_step // (config.data.seq_len * trainer.batch_size * shape.dp)


def tokens_per_second(config: Config, shape: MeshShape, machine: Machine, shares: Shares = NO_DOCUMENTS) -> float:
    """Return the predicted tokens/s of all ranks together. Arguments as in `step_seconds`."""
    sequences = config.trainer.batch_size * shape.dp * num_micro_steps(config, shape)
    return sequences * config.data.seq_len / step_seconds(config, shape, machine, shares)


def possible_shapes(config: Config, ranks: int) -> list[MeshShape]:
    """Return the meshes of `ranks` ranks that suit the number of heads, the sequence length and the tokens per step."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    shapes = [MeshShape(ranks // (ring * u), ring, u) for ring in divisors for u in divisors if ranks % (ring * u) == 0]
    tokens, seq_len, batch_size = config.trainer.tokens_per_step, config.data.seq_len, config.trainer.batch_size
    return [
        shape
        for shape in shapes
        if config.model.heads % shape.ulysses == 0
        and shape.sequence <= min(seq_len, MAX_PLANNED_RANKS)
        and (tokens is None or tokens % (seq_len * batch_size * shape.dp) == 0)
    ]


def fastest_shape(config: Config, machine: Machine) -> MeshShape:
    """Return the mesh with the highest predicted tokens/s for `trainer.tokens_per_step`, for sequences of one document.

    Raises:
        ConfigError: `trainer.tokens_per_step` is missing, or no mesh can have this number of tokens per step.
        InsufficientMemory: no mesh fits into the memory of the GPUs.
    """
    tokens, data, trainer = config.trainer.tokens_per_step, config.data, config.trainer
    sequences = f"data.seq_len={data.seq_len} x trainer.batch_size={trainer.batch_size}"
    if tokens is None:
        raise ConfigError(
            "parallel=fastest requires trainer.tokens_per_step, because the tokens of a step must not depend on the mesh: set "
            f"it to a multiple of {data.seq_len * trainer.batch_size} ({sequences})"
        )
    shapes = possible_shapes(config, machine.ranks)
    if not shapes:
        raise ConfigError(
            f"trainer.tokens_per_step={tokens} must be a multiple of {data.seq_len * trainer.batch_size} ({sequences}), or no "
            f"mesh of {machine.ranks} ranks can have it: change one of them"
        )
    needed = {shape: machine.choose_plan(config, shape)[1] for shape in shapes}
    estimate.check(min(needed.values(), key=lambda parts: sum(parts.values())), machine.device)
    fitting = [shape for shape in shapes if estimate.fits(needed[shape], machine.device)]
    speeds = {shape: tokens_per_second(config, shape, machine) for shape in fitting}
    # Among equally good meshes, the one with the smallest Ulysses groups is chosen, as in `best_ulysses_degree`.
    return min((shape for shape in fitting if EQUAL_TIMES * speeds[shape] >= max(speeds.values())), key=lambda x: x.ulysses)


def describe_step(config: Config, shape: MeshShape, machine: Machine, shares: Shares) -> str:
    """Return the predicted time of a step, and up to two meshes that are predicted to be faster.

    Only one of these meshes has as many data-parallel ranks as `shape`.
    """
    speeds = {
        other: tokens_per_second(config, other, machine, shares)
        for other in possible_shapes(config, machine.ranks)
        if other == shape or estimate.fits(machine.choose_plan(config, other)[1], machine.device)
    }
    seconds, speed = step_seconds(config, shape, machine, shares), speeds[shape]
    parts = [f"about {seconds:.3g} s per step, {float(f'{speed:.2g}'):,.0f} tokens/s"]
    for is_same in (True, False):
        others = [other for other in speeds if (other.dp == shape.dp) == is_same and speeds[other] > WORTH_MENTIONING * speed]
        if others:
            best = max(others, key=speeds.__getitem__)
            sequences = config.trainer.batch_size * best.dp * num_micro_steps(config, best)
            number = "" if is_same else f", {sequences} sequence{'s' * (sequences > 1)} per step"
            parts.append(f"{describe_shape(best)}: about {speeds[best] / speed:.2g} times the tokens/s{number}")
    if len(parts) == 1 and machine.ranks > 1:
        parts.append("no other mesh of these GPUs is predicted to be faster")
    return "; ".join(parts)


def describe_shape(shape: MeshShape) -> str:
    """Return the ranks of a mesh, and the settings that select it."""
    settings = f"parallel.ring={shape.sequence}" + (f" parallel.ulysses={shape.ulysses}" if shape.ulysses > 1 else "")
    if shape.sequence == 1:
        return f"{shape.dp} data-parallel ranks with one sequence each ({settings})"
    sizes = {"ring of": shape.ring, "Ulysses over": shape.ulysses}
    group = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return (f"{shape.dp} data-parallel groups, each {group}" if shape.dp > 1 else group) + f" ({settings})"


def _attention_seconds(config: Config, shape: MeshShape, machine: Machine, window: int | None) -> tuple[float, float]:
    """Return the predicted seconds of the forward and the backward pass of one layer with this window, without documents."""
    model, masks = config.model, causal_masks(config.model)
    sizes = config.trainer.batch_size, config.data.seq_len, model.heads, model.resolved_head_dim
    q = torch.empty(sizes, dtype=torch.bfloat16 if machine.bf16 else torch.float32, device="meta")
    k = q[:, :, : model.kv_heads]
    near, far = (interconnect(*link, flops=machine.gpu.attention) for link in (("nvlink", True), ("nccl", False)))
    return attention_seconds(
        *(q, k, k),
        mask=masks[window],
        layers=count_layers(model, masks),
        ranks=shape.sequence,
        ulysses=shape.ulysses,
        host=machine.ranks_per_host,
        near=near,
        far=far,
        layout=config.parallel.layout,
        schedule=config.parallel.schedule,
    )
