"""A run made of its settings: data, mesh, model and optimizer, each checked against the machine before it is made."""

import gc
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ringattn import Mask
from ringattn.kernels import dispatch
from ringattn.planning.cost_model import attention_flops, interconnect
from ringattn.planning.ulysses_degree import best_ulysses_degree
from ringattn.train import optim
from ringattn.train.checkpoint import init as initial_weights
from ringattn.train.config import Config, ConfigError
from ringattn.train.data.packing import Batch, PackedDataset, load, load_held_out
from ringattn.train.data.tokenizer import Tokenizer, load_tokenizer
from ringattn.train.model import flops
from ringattn.train.model.gpt import GPT
from ringattn.train.parallel import memory
from ringattn.train.parallel import mesh as parallel

log = logging.getLogger(__name__)


@dataclass
class Run:
    """What a job is made of, on this rank."""

    config: Config
    device: torch.device
    mesh: parallel.Mesh
    tokenizer: Tokenizer
    data: PackedDataset
    held_out: PackedDataset | None  # what is evaluated
    bf16: bool
    recompute: bool  # blocks in the backward, attention excepted
    model: GPT
    optimizer: torch.optim.AdamW
    peak_flops: float | None  # of one device
    fetched: tuple[int, list[Batch]] | None = None  # the last batches, and from which sequence on
    begin: Path | None = None  # where the parameters are that it begins with
    changed: str = ""  # what is not as those were trained with
    origin: str | None = None  # the checkpoint of another run that this one began from

    @property
    def sequences_per_step(self) -> int:
        return self.mesh.dp.size() * self.config.trainer.accumulate * self.config.trainer.batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.config.data.seq_len


def build(config: Config, begin: Path | None = None) -> Run:
    """Check the settings against the machine, load the data, and make a sharded model with its optimizer.

    Parameters to `begin` with are checked, not loaded: before the data, which may take long.
    """
    parallel.set_deterministic(config.trainer.deterministic)  # before the device is in use
    with parallel.sync_errors():
        device = parallel.pick_device(config.trainer.device)
        bf16 = config.trainer.precision == "bf16" or (config.trainer.precision == "auto" and device.type == "cuda")
        _choose_kernel(config, device, bf16)
        tokenizer = load_tokenizer(config.data.tokenizer)
        if config.model.vocab_size is not None and config.model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"model.vocab_size={config.model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size} tokens: "
                "leave it out, or raise it"
            )
        changed = initial_weights.compare(begin, config, tokenizer) if begin else ""
    sequence = config.parallel.ring or dist.get_world_size()
    ulysses = config.parallel.ulysses or _best_ulysses(config, sequence, device, bf16)
    mesh = parallel.build_mesh(device.type, sequence, ulysses)
    with parallel.sync_errors():
        data = load(config.data, tokenizer)
    with parallel.sync_errors():  # apart, as in each the other ranks wait for rank 0
        held_out = load_held_out(config.data, tokenizer, data)
        _free_memory(device)
    parallel.set_timeout(mesh, config.parallel.timeout_s)  # only now: to tokenise may take long
    recompute = _recompute(config, tokenizer, mesh, device, bf16)
    with parallel.sync_errors():
        memory.check(_needed_memory(config, tokenizer, mesh, bf16, recompute), device)
    torch.manual_seed(config.trainer.seed + dist.get_rank())
    with torch.device("meta"):
        model = GPT(config.model, tokenizer.vocab_size)
    if compiles(config, device):
        parallel.compile_blocks(model)
    if recompute:
        parallel.checkpoint_activations(model)
    parallel.shard(model, mesh, device, config.trainer.seed, bf16)
    optimizer = optim.build(model, config.optim)
    peak_flops = config.trainer.peak_tflops * 1e12 if config.trainer.peak_tflops else flops.peak_flops(device)
    made = config, device, mesh, tokenizer, data, held_out, bf16, recompute, model, optimizer, peak_flops
    return Run(*made, begin=begin, changed=changed)


def _choose_kernel(config: Config, device: torch.device, bf16: bool) -> dispatch.Choice:
    """Which kernels compute attention, and why.

    Raises:
        ConfigError: those that the settings name cannot.
    """
    kernel, dim = config.parallel.kernel, config.model.resolved_head_dim
    if device.type == "cpu" and kernel in ("hopper", "triton"):
        raise ConfigError(f"parallel.kernel={kernel} needs a GPU and this job runs on CPUs: use parallel.kernel=auto")
    try:
        return dispatch.choose_backend(device, torch.bfloat16 if bf16 else torch.float32, kernel, (dim, dim))
    except ValueError as error:
        raise ConfigError(f"parallel.kernel={kernel}: {error}") from None


def compiles(config: Config, device: torch.device) -> bool:
    return device.type == "cuda" if config.trainer.compile is None else config.trainer.compile


def _best_ulysses(config: Config, sequence: int, device: torch.device, bf16: bool) -> int:
    """How many of `sequence` ranks exchange heads, by rank 0's forecast, which leaves out documents: each step has others."""
    model = config.model
    shape, dtype = (config.trainer.batch_size, config.data.seq_len), torch.bfloat16 if bf16 else torch.float32
    counts = model.heads, model.kv_heads
    q, k = (torch.empty(*shape, heads, model.resolved_head_dim, dtype=dtype, device="meta") for heads in counts)
    inside, across = ("nvlink", "nccl") if device.type == "cuda" else ("gloo", "gloo")
    speed = attention_flops(device)
    best = best_ulysses_degree(
        *(q, k, k),
        mask=Mask.causal(model.window),
        ranks=sequence,
        host=parallel.local_ranks(),
        near=interconnect(inside, flops=speed),
        far=interconnect(across, one_host=False, flops=speed),
        layout=config.parallel.layout,
        schedule=config.parallel.schedule,
    )
    return parallel.broadcast_object(best)


def _free_memory(device: torch.device) -> None:
    """Give back what an earlier job of a sweep has left, and measure the peak anew."""
    gc.unfreeze()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _recompute(config: Config, tokenizer: Tokenizer, mesh: parallel.Mesh, device: torch.device, bf16: bool) -> bool:
    """Whether blocks are recomputed in the backward: as the settings say, or by the memory of rank 0's GPU."""
    if config.parallel.activation_checkpointing is not None:
        return config.parallel.activation_checkpointing
    return parallel.broadcast_object(memory.is_tight(_needed_memory(config, tokenizer, mesh, bf16, recompute=False), device))


def _needed_memory(config: Config, tokenizer: Tokenizer, mesh: parallel.Mesh, bf16: bool, recompute: bool) -> dict[str, float]:
    rows = config.trainer.batch_size * _rows(config, mesh)
    exchanged = mesh.ulysses.size() > 1
    compiled = compiles(config, torch.device(mesh.all.device_type))
    return memory.estimate(
        config.model, recompute, tokenizer.vocab_size, rows, dist.get_world_size(), bf16, exchanged, compiled
    )


def _rows(config: Config, mesh: parallel.Mesh) -> int:
    """About how many rows of a sequence a rank holds."""
    return -(-config.data.seq_len // mesh.sequence.size())


def describe(run: Run, directory: Path) -> None:
    """Log what the settings amount to."""
    config, mesh, seq_len = run.config, run.mesh, run.config.data.seq_len
    kernel = _choose_kernel(config, run.device, run.bf16)
    needed = sum(_needed_memory(config, run.tokenizer, run.mesh, run.bf16, run.recompute).values())
    num_parameters = sum(parameter.numel() for parameter in run.model.parameters())
    (pairs,) = Mask.causal(config.model.window).pairs(seq_len)
    flops_per_token = flops.step_flops(run.model, seq_len, pairs) / seq_len
    lines = {
        "directory": directory,
        "model": f"{num_parameters:,} parameters, vocabulary {run.tokenizer.vocab_size:,}",
        "data": f"{config.data.origin}, {run.data.sequences_per_epoch:,} sequences of {seq_len:,} tokens an epoch"
        + (f", {run.held_out.sequences_per_epoch:,} held out" if run.held_out else ""),
        "mesh": f"{mesh.dp.size()} data-parallel x {mesh.ring.size()} ring x {mesh.ulysses.size()} Ulysses ranks "
        f"on {run.device.type}",
        "step": f"{run.sequences_per_step} sequences, {run.tokens_per_step:,} tokens",
        "ring": f"layout {config.parallel.layout}, {_rows(config, mesh):,} rows a rank, schedule {config.parallel.schedule}",
        "kernel": f"{kernel.backend}: {kernel.reason}" + (", deterministic" if config.trainer.deterministic else ""),
        "precision": "bf16, fp32 parameters" if run.bf16 else "fp32",
        "FLOPs": f"{flops_per_token:.3g} a token, in a sequence of one document",
        "memory": f"about {needed / memory.GIB:.1f} GiB a rank"
        + (", blocks but for their attention computed again in the backward" if run.recompute else ""),
    }
    if run.begin:
        lines["parameters"] = f"of {run.begin}" + (f", which was trained with {run.changed}" if run.changed else "")
    for name, value in lines.items():
        log.info(f"{name:<12}{value}")
