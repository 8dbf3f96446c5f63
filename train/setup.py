"""Build the parts of a run from its settings. Each part is checked before the next part is built."""

import gc
import logging
import math
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn import check_same
from ringattn.comm import connect
from ringattn.kernels import backends
from ringattn.planning.cost_model import attention_flops, interconnect
from ringattn.planning.ulysses_degree import best_ulysses_degree
from ringattn.ring import free_plans
from ringattn.train import optim
from ringattn.train.checkpoint import init as initial_weights
from ringattn.train.checkpoint.progress import show_allocation
from ringattn.train.data.loader import Loader, Preparation, start_loader
from ringattn.train.data.mixture import MixtureDataset
from ringattn.train.data.packing import Sequences, TrainingData, load_held_out, load_training
from ringattn.train.data.tokenizer import Tokenizer, tokenizer_of
from ringattn.train.model import float8, flops
from ringattn.train.model.gpt import GPT
from ringattn.train.parallel import prediction
from ringattn.train.parallel.graphs import ModelGraphs, choose_graphs
from ringattn.train.parallel.memory.capacity import Capacity, Needs
from ringattn.train.parallel.memory.choice import choose_plan
from ringattn.train.parallel.memory.chunks import chunk_blocks
from ringattn.train.parallel.memory.estimate import inference_needs
from ringattn.train.parallel.memory.host_updates import HostUpdates
from ringattn.train.parallel.memory.pinned import run_with_cores
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import Mesh, attention_inputs, build_mesh, causal_masks, count_layers, set_timeout
from ringattn.train.parallel.ranks import broadcast_object, pick_device, ranks_per_host, set_deterministic, sync_errors
from ringattn.train.parallel.shard import checkpoint_activations, compile_blocks, shard_model
from ringattn.train.parallel.timing import Gpu, Machine
from ringattn.train.settings.config import Config, ConfigError, DataConfig, check, with_settings
from ringattn.train.settings.token_budget import resolve_token_budget

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resources:
    """Holds the objects that a rank creates before the model."""

    device: torch.device
    mesh: Mesh
    tokenizer: Tokenizer
    held_out: Sequences | None  # the text for evaluation
    kernel: backends.Choice  # the attention kernels, and the reason for choosing them
    bf16: bool  # whether the model computes in bf16
    compiled: bool  # whether torch.compile fuses the loss and the operations around attention
    plan: MemoryPlan  # where this rank keeps the data of a step


@dataclass(frozen=True)
class TrainingResources(Resources):
    data: TrainingData
    memory_needed: Needs  # the estimated bytes that this rank needs
    graphed: bool  # whether a training step is replayed from CUDA graphs
    init_from_changes: str  # the settings in which this run differs from the training of the initial weights
    data_ready: float  # the time at which the data was loaded, on the clock of `time.monotonic`


@dataclass(frozen=True)
class InferenceRun(Resources):
    """Holds the objects of a rank for evaluation and generation."""

    config: Config
    model: GPT

    @property
    def num_parameters(self) -> int:
        return _num_parameters(self.model)

    def plot_title(self, name: str, tokens: str) -> str:
        """`tokens` is a text such as "1,000 tokens"."""
        ranks = dist.get_world_size()
        return f"{name}: {self.num_parameters:,} parameters, {tokens}, {ranks} rank{'s' if ranks > 1 else ''}"


@dataclass(frozen=True)
class Run(InferenceRun, TrainingResources):
    """Holds all parts of a training run on this rank."""

    optimizer: torch.optim.AdamW
    peak_flops: float | None  # the peak FLOP/s of one device, if known
    init_from: Path | None  # the initial weights of a new run; None for random weights
    parent: str | None  # the checkpoint of another run from which this run branched
    loader: Loader  # loads the batches of steps and plans their attention
    graphs: ModelGraphs | None
    host_updates: HostUpdates  # the updates of the parameters in host memory
    # Maps the number of sequences in earlier steps to the latest result of `step.prepare_step`.
    prepared: dict[int, Any] = field(default_factory=dict)

    @property
    def uncounted_bytes(self) -> int:
        return self.graphs.uncounted_bytes if self.graphs is not None else 0

    @property
    def sequences_per_step(self) -> int:
        return self.mesh.dp.size() * self.config.trainer.accumulate * self.config.trainer.batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.config.data.seq_len


def find_resources(config: Config, init_from: Path | None = None) -> TrainingResources:
    """Check the settings against the machine, and load the data.

    Choose all settings that the user leaves open.

    Raises:
        ConfigError: on every rank, if the machine or a file does not support the settings.
    """
    with sync_errors():
        device, bf16, kernel = choose_device(config, training=True)
        _check_training(config, device, bf16)
        tokenizer = tokenizer_of(config.data)
        init_from_changes = initial_weights.compare_settings(init_from, config, tokenizer) if init_from else ""
        minimum, given = tokenizer.vocab_size, config.model.vocab_size
        if given is not None and given < minimum:
            raise ConfigError(f"model.vocab_size={given} must be at least the tokenizer's {minimum}: raise it, or leave it out")
    mesh = choose_mesh(config, device, bf16)
    compiled = uses_compile(config, device)
    machine = machine_of(config, device, tokenizer.vocab_size, bf16)
    plan, needs = broadcast_object(choose_plan(config, mesh.shape, machine))
    with sync_errors():
        machine.capacity.check(needs)
        sample = inference_needs(config, mesh.shape, tokenizer.vocab_size, bf16, config.trainer.sample_tokens)
        machine.capacity.check(Needs({"keys and values": sample.device["keys and values"]}, {}))
        situation = config, mesh.shape, device, compiled and plan == MemoryPlan(), bf16
        chosen = choose_graphs(*situation, tokenizer.vocab_size, needs, machine.capacity)
    graphed, needs = broadcast_object(chosen)
    with sync_errors():
        machine.capacity.check(needs)
    with sync_errors():
        data = load_training(config.data, tokenizer)
    # Synchronise errors after every load, so that no rank waits for a failed rank.
    with sync_errors():
        held_out = load_held_out(config.data, tokenizer, data)
        _free_memory(device)
        fingerprints = [data.fingerprint, held_out and held_out.fingerprint]  # may raise, because they read documents
    _check_same_text(config.data, fingerprints)
    return TrainingResources(
        device=device,
        bf16=bf16,
        kernel=kernel,
        tokenizer=tokenizer,
        init_from_changes=init_from_changes,
        mesh=mesh,
        compiled=compiled,
        plan=plan,
        graphed=graphed,
        memory_needed=needs,
        data=data,
        held_out=held_out,
        data_ready=time.monotonic(),
    )


def _check_training(config: Config, device: torch.device, bf16: bool) -> None:
    """Check the settings that only affect training."""
    model = config.model
    if (model.experts or 1) > 1 == model.experts_per_token and model.normalise_top_k:
        raise ConfigError(
            "model.experts_per_token=1 with model.normalise_top_k=true: the weight of an expert is always 1, so the router "
            "would not learn from the loss; set model.normalise_top_k=false, or choose more experts per token"
        )
    if config.trainer.float8:
        float8.check(config.model, device, bf16)
    if config.memory.moments == "8bit":
        optim.import_torchao()


def _check_same_text(data: DataConfig, fingerprints: list[Any]) -> None:
    """Raise ConfigError on every rank if the fingerprints of the text differ between the ranks."""
    try:
        check_same(fingerprints, dist.group.WORLD)
    except ValueError as error:
        ranks = str(error).partition(" of the group")[0]
        raise ConfigError(
            f"the text of {data.description} differs between the ranks: {ranks} has another one; copy the same files to all "
            "hosts, and set HF_HOME to a shared directory"
        ) from None


def build(config: Config, init_from: Path | None = None, parent: str | None = None, progress: tuple[int, int] = (0, 0)) -> Run:
    """Build a training run.

    Args:
        config: the settings, which `config.check` must have accepted.
        init_from: the path of the initial weights, which are checked, but not loaded.
        parent: the checkpoint of another run from which this run branches.
        progress: the completed steps of a resumed run, and the number of their sequences.

    Raises:
        ConfigError: on every rank, if the machine or a file does not support the settings.
    """
    set_deterministic(config.trainer.deterministic)  # Deterministic mode must be set before the first use of the device.
    with sync_errors():
        # The loader process imports its modules while this process builds the other parts.
        loader = start_loader(pick_device(config.trainer.device))
    found = find_resources(config, init_from)
    device, mesh, tokenizer = found.device, found.mesh, found.tokenizer
    config = end_with_text(config, found.data, mesh, *progress)
    ranks = (axis.get_local_rank() for axis in (mesh.dp, mesh.ring))
    loader.begin(Preparation(config, found.data, mesh.shape, *ranks, is_fixed=found.graphed))
    # Set the timeout after loading, because tokenising a corpus may take longer than the timeout.
    set_timeout(mesh, config.parallel.timeout_s)
    torch.manual_seed(config.trainer.seed + dist.get_rank())
    model = _create_model(config, tokenizer.vocab_size, found.compiled, found.plan.chunk, config.trainer.float8)
    with show_allocation(int(found.memory_needed.offloaded)):
        checkpoint_activations(model, found.plan, device, found.memory_needed.host["activations"])
        host_groups = shard_model(model, mesh, device, config.trainer.seed, found.bf16, found.plan.host_blocks)
        graphs = None
        if found.graphed:
            graphs = ModelGraphs(model, config, mesh, tokenizer.vocab_size, found.bf16, device)
            loader.learn([slots.requests for slots in graphs.slots])
        host_parameters = [group.parameters for group in host_groups]
        options = model, config.optim, host_parameters, config.memory.moments, found.compiled
        optimizer = run_with_cores(lambda: optim.build(*options), device)
    peak_flops = config.trainer.peak_tflops * 1e12 if config.trainer.peak_tflops else flops.peak_flops(device)
    if config.optim.lr is None:
        lr = optim.default_lr(_num_parameters(model), config.model.qk_norm, continued=init_from is not None)
        config = with_settings(config, {"optim.lr": lr})
    return Run(
        **vars(found),
        config=config,
        model=model,
        optimizer=optimizer,
        peak_flops=peak_flops,
        init_from=init_from,
        parent=parent,
        loader=loader,
        graphs=graphs,
        host_updates=HostUpdates(model, host_groups, optimizer.update_host_group, device),
    )


def end_with_text(config: Config, data: TrainingData, mesh: Mesh, done: int = 0, consumed: int = 0) -> Config:
    """If `data.exhausted` is "end", reduce the steps so that the run ends before its text runs out.

    The run has already taken `done` steps with `consumed` sequences.

    Raises:
        ConfigError: the text is too short for one step.
    """
    if config.data.exhausted == "repeat":
        return config
    per_step = mesh.dp.size() * config.trainer.accumulate * config.trainer.batch_size
    steps = done + max(data.sequences_per_epoch - consumed, 0) // per_step
    if config.trainer.steps <= steps:
        return config
    source = f"source {data.first_exhausted} of data.mix" if isinstance(data, MixtureDataset) else "text"
    if steps < 1:
        raise ConfigError(
            f"the {source} runs out after {data.sequences_per_epoch:,} sequences, but a step needs {per_step:,}: provide more "
            "text, use fewer tokens per step, or set data.exhausted=repeat"
        )
    log.info(f"{'steps':<12}{steps:,} instead of {config.trainer.steps:,}, because then the {source} runs out")
    config = with_settings(config, {"trainer.steps": steps})
    check(config, dist.get_world_size())  # other settings may require more steps
    return config


def build_for_inference(config: Config, weights: Path, num_tokens: int = 0) -> InferenceRun:
    """Build the sharded model of a run and load its weights, without an optimizer and without any text.

    Args:
        config: the settings, which `config.check` must have accepted.
        weights: a checkpoint, or a folder with a Hugging Face model.
        num_tokens: the number of tokens to generate, or 0 for an evaluation.

    Raises:
        ConfigError: on every rank, if the machine does not support the settings, or the weights do not fit.
    """
    set_deterministic(config.trainer.deterministic)
    with sync_errors():
        device, bf16, kernel = choose_device(config)
        tokenizer = tokenizer_of(config.data)
        changes = initial_weights.compare_settings(weights, config, tokenizer)
    mesh = choose_mesh(config, device, bf16)
    with sync_errors():
        Capacity.of(device).check(inference_needs(config, mesh.shape, tokenizer.vocab_size, bf16, num_tokens))
    set_timeout(mesh, config.parallel.timeout_s)
    compiled, plan = uses_compile(config, device), MemoryPlan(chunk=config.memory.chunk or 0)
    model = _create_model(config, tokenizer.vocab_size, compiled, plan.chunk)
    shard_model(model, mesh, device, config.trainer.seed, bf16)
    initial_weights.load(weights, model)
    log.info(f"{'weights':<12}from {weights}" + (f", which were trained with {changes}" if changes else ""))
    return InferenceRun(
        config=config,
        device=device,
        mesh=mesh,
        tokenizer=tokenizer,
        held_out=None,
        kernel=kernel,
        bf16=bf16,
        compiled=compiled,
        plan=plan,
        model=model,
    )


def _create_model(config: Config, vocab_size: int, compiled: bool, chunk: int, in_float8: bool = False) -> GPT:
    """Create a model on the meta device. `chunk` is the number of tokens per chunk, or 0 for no chunks."""
    with torch.device("meta"):
        model = GPT(config.model.for_length(config.data.seq_len), vocab_size)
    if in_float8:
        float8.convert(model)
    if compiled:
        compile_blocks(model)
    if chunk:
        chunk_blocks(model, chunk)
    return model


def choose_device(config: Config, training: bool = False) -> tuple[torch.device, bool, backends.Choice]:
    """Return the device of this rank, whether the model computes in bf16, and the attention kernels.

    Raises:
        ConfigError: the machine does not have the device, or the kernels do not support the settings.
    """
    device = pick_device(config.trainer.device)
    bf16 = config.trainer.precision == "bf16" or (config.trainer.precision == "auto" and device.type == "cuda")
    # A training run also evaluates its model.
    inference_kernel = choose_backend(config, device, bf16)
    return device, bf16, choose_backend(config, device, bf16, training=True) if training else inference_kernel


def choose_mesh(config: Config, device: torch.device, bf16: bool) -> Mesh:
    """Build the mesh of all ranks, and choose the settings of the mesh that the user leaves open."""
    if config.parallel.mesh == "fastest" and config.parallel.ring is None:
        raise ConfigError("parallel.mesh=fastest is only for training: set parallel.ring and parallel.ulysses instead")
    sequence = config.parallel.ring or dist.get_world_size()
    ulysses = config.parallel.ulysses
    if ulysses is None:
        ulysses = _best_ulysses(config, sequence, device, bf16)
    elif ulysses == 0:
        ulysses = math.gcd(sequence, config.model.heads)
    return build_mesh(device.type, sequence, ulysses)


def choose_fastest_mesh(config: Config) -> Config:
    """Set `parallel.ring` and `parallel.ulysses` to the mesh with the highest predicted tokens/s.

    All ranks call this function.

    Raises:
        ConfigError: on every rank, if the speed of the GPU is unknown, or if no mesh is possible.
    """
    set_deterministic(config.trainer.deterministic)
    shape = None
    with sync_errors():
        ring = with_settings(config, {"parallel.mesh": "sizes", "parallel.ring": None, "parallel.ulysses": None})
        check(resolve_token_budget(ring, dist.get_world_size()), dist.get_world_size())
        device, bf16, _ = choose_device(config, training=True)
        machine = machine_of(config, device, tokenizer_of(config.data).vocab_size, bf16)
        if machine.gpu is None:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPUs"
            raise ConfigError(
                f"parallel=fastest requires a GPU whose speed is known, but this job runs on {name}: set parallel.ring and "
                "parallel.ulysses instead"
            )
        if dist.get_rank() == 0:
            shape = prediction.fastest_shape(config, machine)
    shape = broadcast_object(shape)
    return with_settings(config, {"parallel.ring": shape.sequence, "parallel.ulysses": shape.ulysses})


def machine_of(config: Config, device: torch.device, vocab_size: int, bf16: bool) -> Machine:
    ranks = dist.get_world_size(), ranks_per_host()
    cores = len(os.sched_getaffinity(0)) / ranks_per_host()
    compiled, capacity = uses_compile(config, device), Capacity.of(device)
    return Machine(device, Gpu.of(device), *ranks, vocab_size, bf16, compiled, capacity, cores)


def choose_backend(config: Config, device: torch.device, bf16: bool, training: bool = False) -> backends.Choice:
    """Choose the attention kernels for training, or for evaluation and generation. Return the kernels and the reason.

    Raises:
        ConfigError: the kernels do not support the device, the precision or the head dim.
    """
    kernel, dim = config.parallel.kernel, config.model.resolved_head_dim
    if device.type == "cpu" and kernel in ("hopper", "triton"):
        raise ConfigError(f"parallel.kernel={kernel} requires a GPU and this job runs on CPUs: use parallel.kernel=auto")
    try:
        dtype, precision = torch.bfloat16 if bf16 else torch.float32, config.trainer.attention_precision(training)
        return backends.choose_backend(device, dtype, kernel, (dim, dim), precision=precision)
    except ValueError as error:
        raise ConfigError(f"parallel.kernel={kernel}: {error}") from None


def uses_compile(config: Config, device: torch.device) -> bool:
    return device.type == "cuda" if config.trainer.compile is None else config.trainer.compile


def _best_ulysses(config: Config, sequence: int, device: torch.device, bf16: bool) -> int:
    """Choose the number of ranks per all-to-all with a cost model. All ranks use the choice of rank 0.

    `sequence` is the number of ranks that share a sequence.
    """
    within_host, across_hosts = ("nvlink", "nccl") if device.type == "cuda" else ("gloo", "gloo")
    speed = attention_flops(device)
    best = best_ulysses_degree(
        *attention_inputs(config, bf16),
        layers=count_layers(config.model, causal_masks(config.model)),
        ranks=sequence,
        host=ranks_per_host(),
        near=interconnect(within_host, flops=speed),
        far=interconnect(across_hosts, one_host=False, flops=speed),
        layout=config.parallel.layout,
        schedule=config.parallel.schedule,
    )
    return broadcast_object(best)


def _num_parameters(model: GPT) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _free_memory(device: torch.device) -> None:
    gc.unfreeze()
    connect.free_messages()
    free_plans()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):
            # Reset the peak memory that Linux has recorded for this process.
            Path("/proc/self/clear_refs").write_text("5")
