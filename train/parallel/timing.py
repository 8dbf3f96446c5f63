"""Predict the seconds of a training step on a mesh of GPUs under a memory plan.

A micro-step takes as long as the slower of GPU and host. The package `ringattn.planning` predicts the time of attention. The
constants below were fitted to runs on one to four H100s and H200s (tests/train/parallel/test_prediction.py).
"""

import re
from collections import Counter
from typing import NamedTuple

import torch

from ringattn import Mask
from ringattn.planning.cost_model import attention_flops_of, interconnect
from ringattn.train.model import flops
from ringattn.train.model.gpt import padded_vocabulary
from ringattn.train.parallel.graphs import can_capture, uses_graphs
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.capacity import Capacity
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.settings.config import Config

# The fraction of the peak FLOP/s that matrix products reach. The 1.44B model reaches 690 of 989 TFLOP/s on two H200s.
MATMUL_EFFICIENCY = 0.7
# The attention speed of the 1.44B model on H200s, relative to `cost_model.attention_flops`.
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
# The fraction of the memory bandwidth that fused kernels reach
MEMORY_EFFICIENCY = 0.7
# Elements that the fused kernels of both passes read and write per token, layer and dimension
ELEMENTS_PER_DIM, ELEMENTS_PER_FFN_DIM = 40, 12
# The bytes that the optimizer step reads and writes per parameter of a rank's shard, without the moments
OPTIMIZER_BYTES = 24
# Bytes per second of FSDP's collectives inside a host. The collectives take 40 ms for the 1.44B model on two H200s.
COLLECTIVE_BYTES_PER_S = 144e9

# The seconds of work on a rank's host, measured with the default model on machines with H100s and H200s. Other hosts differ.
HOST_STEP = 4e-3  # per step
HOST_GROUP = 3e-3  # the FSDP hooks of one group of blocks, forward and backward
HOST_BLOCK = 1.6e-3  # the four compiled parts of a block, forward and backward
HOST_HOP = 0.4e-3  # a step of a ring pass; a ring of R ranks has about 3 R + 1 in the forward and the backward pass
HOST_ALL_TO_ALL = 5e-3  # the all-to-alls of a block, forward and backward

# Bytes per second of copies between a GPU and pinned host memory, in each of two simultaneous directions. Copies do not slow
# kernels down (one H200, 2026-11-24).
HOST_LINK = 51e9
# The speed of PyTorch's fused AdamW on a CPU, in parameters per second and core. On 16 cores, the speed is 4.3e9 (2026-11-24).
HOST_ADAM = 4.3e9 / 16
# For four blocks of the 1.44B model, matrix products in FP8 take 32.3 ms instead of 61.1 ms. The remaining kernels also round
# the operands, and take 8.4 ms longer than the 11.7 ms predicted for bf16. The times are for forward and backward passes of
# 32,768 tokens on an H200 (2026-11-29).
FLOAT8_SPEEDUP, FLOAT8_TRAFFIC = 61.1 / 32.3, 20.1 / 11.7
# Attention reaches 736 TFLOP/s forward, and 637 TFLOP/s in both passes together (65,536 tokens, H200, 2026-11-27).
FORWARD_SPEEDUP = 736 / 637
# The memory traffic of adding a chunk's weight gradients to fp32 sums, in bytes per parameter.
CHUNK_BYTES = 10


class Gpu(NamedTuple):
    matmul: float  # FLOP/s of matrix products
    attention: float  # FLOP/s of attention
    memory: float  # bytes per second of fused kernels

    @property
    def peak(self) -> float:
        return self.matmul / MATMUL_EFFICIENCY

    @classmethod
    def of(cls, device: torch.device) -> "Gpu | None":
        """Return None if the tables do not contain the device."""
        if device.type != "cuda":
            return None
        return cls.named(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)[0])

    @classmethod
    def named(cls, name: str, capability: int) -> "Gpu | None":
        """`capability` is the major compute capability."""
        peak = flops.peak_flops_of(name)
        if peak is None:
            return None
        memory_speed = next(speed for pattern, speed in MEMORY_BYTES_PER_S if re.search(pattern, name))
        attention = ATTENTION_EFFICIENCY * attention_flops_of(capability)
        return cls(MATMUL_EFFICIENCY * peak, attention, MEMORY_EFFICIENCY * memory_speed)


# The assumed speeds of an unknown GPU
SLOW_GPU = Gpu(matmul=1e14, attention=6e13, memory=5e11)


class Machine(NamedTuple):
    """Describes the ranks of a job, and the properties of their model that all plans share."""

    device: torch.device
    gpu: Gpu | None  # None for a GPU of unknown speed
    ranks: int
    ranks_per_host: int
    vocab_size: int  # the number of tokens that the tokenizer has
    bf16: bool
    compiled: bool
    capacity: Capacity
    cores: float = 16  # of the host, per rank


class Attention(NamedTuple):
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


class StepTime(NamedTuple):
    """Holds the predicted seconds of an optimizer step, and the seconds in which the GPU is idle."""

    seconds: float
    exposed: float


def kernels_alone(config: Config, shape: MeshShape, gpu: Gpu) -> Attention:
    """Predict attention without communication, for one document per sequence."""
    model = config.model
    pairs = sum(count * Mask.causal(window).pairs(config.data.seq_len)[0] for window, count in Counter(model.windows).items())
    forward = 4 * config.trainer.batch_size * model.heads * model.resolved_head_dim * pairs / shape.sequence / gpu.attention
    return Attention(forward, 2.5 * forward)


def step_time(config: Config, shape: MeshShape, machine: Machine, plan: MemoryPlan, attention: Attention) -> StepTime:
    """Return the predicted time of an optimizer step.

    Args:
        config: the settings of the run. `trainer.tokens_per_step`, if set, determines the number of micro-steps.
        shape: the numbers of ranks, which may differ from those of the settings.
        machine: the ranks of the job.
        plan: where a rank keeps its data.
        attention: the time of attention with its communication.
    """
    model, gpu, layers = config.model, machine.gpu or SLOW_GPU, config.model.layers
    size = 2 if machine.bf16 else 4
    tokens = estimate.tokens_per_micro_step(config, shape)
    logits_dim = padded_vocabulary(model, machine.vocab_size)
    head, blocks = logits_dim * model.dim, layers * estimate.block_parameters(model)
    used = layers * estimate.used_block_parameters(model)
    vocab = estimate.other_parameters(model, machine.vocab_size)

    # With chunks, the backward pass recomputes all operations except attention.
    chunks = plan.num_chunks(estimate.tokens_per_rank(config, shape))
    share = 1 if chunks > 1 else plan.recomputed_blocks / layers
    before = plan.recomputed_blocks * estimate.projection_parameters(model) if chunks > 1 else 0
    # The experts stay in bf16.
    in_fp8 = config.trainer.float8 * (1 if model.experts is None else layers * estimate.attention_parameters(model) / used)
    speed, traffic = gpu.matmul / (1 - in_fp8 + in_fp8 / FLOAT8_SPEEDUP), 1 + in_fp8 * (FLOAT8_TRAFFIC - 1)
    per_layer = ELEMENTS_PER_DIM * model.dim + ELEMENTS_PER_FFN_DIM * estimate.hidden_dim(model)
    elements = traffic * size * tokens * layers * per_layer / gpu.memory
    gathers = 2 if estimate.reshard_after_forward(model, machine.bf16) else 1
    # FSDP copies gathered parameters, and casts gradients to fp32.
    copied = (vocab + blocks) * (2 * gathers * size + size + 4) + (CHUNK_BYTES * chunks * blocks if chunks > 1 else 0)
    forward = 2 * tokens * used / speed + elements / 3 + attention.forward
    backward = tokens * ((4 + 2 * share) * used + 2 * before) / speed + elements * (2 + share) / 3 + attention.backward
    backward += plan.attention_blocks / layers * attention.forward / FORWARD_SPEEDUP
    compute = forward + backward + 6 * tokens * (head / gpu.matmul + size * logits_dim / gpu.memory) + copied / gpu.memory

    one_host = machine.ranks <= machine.ranks_per_host
    link = COLLECTIVE_BYTES_PER_S if one_host else interconnect("nccl", one_host=False).bytes_per_second
    per_byte = (machine.ranks - 1) / machine.ranks / link
    collectives = per_byte * (size * (vocab + gathers * blocks) + 4 * (vocab + blocks))
    # The first gather and the last reduction of a step do not overlap with computation.
    exposed = per_byte * (size + 4) * vocab + _exposed_copies(config, shape, machine, plan, (forward, backward))

    micro_step = max(max(compute, collectives) + exposed, _host_seconds(config, shape, machine, plan))
    kept = vocab + blocks * (1 - plan.host_blocks / layers)
    optimizer = (OPTIMIZER_BYTES + 2 * estimate.moment_bytes(config)) * kept / machine.ranks / gpu.memory
    count = num_micro_steps(config, shape)
    seconds = HOST_STEP + count * micro_step + optimizer + _exposed_updates(config, machine, plan, forward)
    communication = max(attention.seconds - kernels_alone(config, shape, gpu).seconds, 0.0)
    return StepTime(seconds, seconds - count * (compute - communication) - optimizer)


def _host_seconds(config: Config, shape: MeshShape, machine: Machine, plan: MemoryPlan) -> float:
    """Return the seconds of work on the host of a rank in a micro-step."""
    size = estimate.blocks_per_group(config.model, machine.bf16, machine.ranks, plan.host_blocks)
    groups = -(-config.model.layers // size)
    chunks = plan.num_chunks(estimate.tokens_per_rank(config, shape))
    hops = 3 * shape.ring + 1 if shape.ring > 1 else 1
    # On another mesh, graphs may be impossible even if `trainer.cuda_graphs` is True.
    situation = config, shape, machine.device, machine.compiled and plan == MemoryPlan(), machine.bf16
    graphed = can_capture(*situation) and uses_graphs(*situation)
    # The replay of a graph takes almost no time on the host.
    block = 0.0 if graphed else HOST_BLOCK * chunks + hops * HOST_HOP + (HOST_ALL_TO_ALL if shape.ulysses > 1 else 0)
    # If there are several groups, one more group contains the parameters outside the blocks.
    return (groups + (groups > 1)) * HOST_GROUP + config.model.layers * block


def _exposed_copies(
    config: Config, shape: MeshShape, machine: Machine, plan: MemoryPlan, seconds: tuple[float, float]
) -> float:
    """Return how many seconds per micro-step the GPU waits for copies to and from the host.

    `seconds` are the times of the forward and the backward pass.
    """
    layers = config.model.layers
    saved = sum(estimate.offloaded_bytes(config, shape, machine.bf16, plan)) / max(plan.offloaded_blocks, 1)
    weights = 4 * estimate.block_parameters(config.model) / machine.ranks
    accumulated = weights if num_micro_steps(config, shape) > 1 else 0
    forward, backward = (each / layers for each in seconds)
    both = max(plan.offloaded_blocks + plan.host_blocks - layers, 0)
    exposed = 0.0
    for count, x, w in (
        (both, 1, 1),
        (plan.offloaded_blocks - both, 1, 0),
        (plan.host_blocks - both, 0, 1),
    ):
        # Copies in both directions overlap, so the direction with more bytes determines the time.
        sizes = max(w * weights, x * saved), max(w * (weights + accumulated) + x * saved, w * weights)
        exposed += count * sum(max(n / HOST_LINK - t, 0) for n, t in zip(sizes, (forward, backward), strict=True))
    return exposed


def _exposed_updates(config: Config, machine: Machine, plan: MemoryPlan, forward: float) -> float:
    """Return how many seconds the next forward pass waits for updates on the CPU. The forward pass takes `forward` seconds."""
    layers = config.model.layers
    update = estimate.block_parameters(config.model) / machine.ranks / (HOST_ADAM * machine.cores)
    first = layers - plan.host_blocks
    waits = ((i + 1) * update - max(first + i - 1, 0) * forward / layers for i in (0, plan.host_blocks - 1))
    return max(*waits, 0.0) if plan.host_blocks else 0.0


def sequences_per_step(config: Config, shape: MeshShape) -> int:
    return config.trainer.batch_size * shape.dp * num_micro_steps(config, shape)


def num_micro_steps(config: Config, shape: MeshShape) -> int:
    trainer = config.trainer
    if trainer.tokens_per_step is None:
        return trainer.accumulate
    return trainer.tokens_per_step // (config.data.seq_len * trainer.batch_size * shape.dp)
