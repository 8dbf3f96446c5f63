"""Training: build the pieces, say what they amount to, resume, step, and leave a summary."""

import gc
import json
import logging
import math
import resource
import statistics
import time
import zlib
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kernels import dispatch
from ringattn import Layout, Mask, balanced_layout, plan_ahead, ulysses_attention
from ringattn.cost import attention_flops, fabric
from ringattn.forecast import best_ulysses
from train import checkpoint, flops, memory, metrics, optim, parallel, resuming
from train.config import Config, ConfigError, TrainerConfig, check
from train.data import Batch, PackedDataset, load
from train.generate import generate
from train.lock import alone_in
from train.loss import IGNORE, cross_entropy
from train.model import GPT
from train.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger(__name__)


class Diverged(RuntimeError):
    """The loss or the gradients are not finite: going on would only write bad checkpoints."""


def train(config: Config, directory: Path) -> dict[str, Any]:
    """Run one job. All ranks call it with the same arguments.

    Args:
        directory: gets checkpoints/, metrics.jsonl, loss.png, sample.txt and summary.json.

    Returns:
        The summary, on every rank.

    Raises:
        ConfigError: on every rank, before training starts: settings or files that cannot be honoured.
        Diverged: on every rank.
    """
    with alone_in(directory):
        run = build(config)
        describe(run, directory)
        done, consumed = resume(run, directory)
        if done >= config.trainer.steps:
            return read_summary(run, directory, done)
        return finish(run, directory, take_steps(run, directory, done, consumed), config.trainer.steps)


@dataclass
class Run:
    """What a job is made of, on this rank."""

    config: Config
    device: torch.device
    mesh: parallel.Mesh
    tokenizer: Tokenizer
    data: PackedDataset
    bf16: bool
    recompute: bool  # blocks in the backward, attention excepted
    model: GPT
    optimizer: torch.optim.AdamW
    peak_flops: float | None  # of one device
    fetched: tuple[int, list[Batch]] | None = None  # the last batches, and from which sequence on
    origin: str | None = None  # the checkpoint of another run that this one began from

    @property
    def sequences_per_step(self) -> int:
        return self.mesh.dp.size() * self.config.trainer.accumulate * self.config.trainer.batch_size

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.config.data.seq_len


def build(config: Config) -> Run:
    """Check the settings against the machine, load the data, and make a sharded model with its optimizer."""
    parallel.set_deterministic(config.trainer.deterministic)  # before the device is in use
    with parallel.agreed():
        check(config, dist.get_world_size())
        device = parallel.pick_device(config.trainer.device)
        bf16 = config.trainer.precision == "bf16" or (config.trainer.precision == "auto" and device.type == "cuda")
        _choose_kernel(config, device, bf16)
        tokenizer = load_tokenizer(config.data.tokenizer)
        if config.model.vocab_size is not None and config.model.vocab_size < tokenizer.vocab_size:
            raise ConfigError(
                f"model.vocab_size={config.model.vocab_size} is less than the tokenizer's {tokenizer.vocab_size} tokens: "
                "leave it out, or raise it"
            )
    sequence = config.parallel.ring or dist.get_world_size()
    ulysses = config.parallel.ulysses or _best_ulysses(config, sequence, device, bf16)
    mesh = parallel.build_mesh(device.type, sequence, ulysses)
    with parallel.agreed():
        data = load(config.data, tokenizer)
        _free_memory(device)
    parallel.set_timeout(mesh, config.parallel.timeout_s)  # only now: to tokenise may take long
    recompute = _recompute(config, tokenizer, mesh, device, bf16)
    with parallel.agreed():
        memory.check(_needed_memory(config, tokenizer, mesh, bf16, recompute), device)
    torch.manual_seed(config.trainer.seed + dist.get_rank())
    with torch.device("meta"):
        model = GPT(config.model, tokenizer.vocab_size)
    if _compiles(config, device):
        parallel.compile_blocks(model)
    if recompute:
        parallel.checkpoint_activations(model)
    parallel.shard(model, mesh, device, config.trainer.seed, bf16)
    optimizer = optim.build(model, config.optim)
    peak_flops = config.trainer.peak_tflops * 1e12 if config.trainer.peak_tflops else flops.peak_flops(device)
    return Run(config, device, mesh, tokenizer, data, bf16, recompute, model, optimizer, peak_flops)


def _choose_kernel(config: Config, device: torch.device, bf16: bool) -> dispatch.Choice:
    """Which kernels compute attention, and why.

    Raises:
        ConfigError: those that the settings name cannot.
    """
    kernel, dim = config.parallel.kernel, config.model.head_features
    if device.type == "cpu" and kernel in ("hopper", "triton"):
        raise ConfigError(f"parallel.kernel={kernel} needs a GPU and this job runs on CPUs: use parallel.kernel=auto")
    try:
        return dispatch.choose(device, torch.bfloat16 if bf16 else torch.float32, kernel, (dim, dim))
    except ValueError as error:
        raise ConfigError(f"parallel.kernel={kernel}: {error}") from None


def _compiles(config: Config, device: torch.device) -> bool:
    return device.type == "cuda" if config.trainer.compile is None else config.trainer.compile


def _best_ulysses(config: Config, sequence: int, device: torch.device, bf16: bool) -> int:
    """How many of `sequence` ranks exchange heads, by rank 0's forecast, which leaves out documents: each step has others."""
    model = config.model
    shape, dtype = (config.trainer.batch_size, config.data.seq_len), torch.bfloat16 if bf16 else torch.float32
    counts = model.heads, model.kv_heads
    q, k = (torch.empty(*shape, heads, model.head_features, dtype=dtype, device="meta") for heads in counts)
    inside, across = ("nvlink", "nccl") if device.type == "cuda" else ("gloo", "gloo")
    speed = attention_flops(device)
    best = best_ulysses(
        *(q, k, k),
        mask=Mask.causal(model.window),
        ranks=sequence,
        host=parallel.local_ranks(),
        near=fabric(inside, flops=speed),
        far=fabric(across, one_host=False, flops=speed),
        layout=config.parallel.layout,
        schedule=config.parallel.schedule,
    )
    return parallel.share(best)


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
    return parallel.share(memory.is_tight(_needed_memory(config, tokenizer, mesh, bf16, recompute=False), device))


def _needed_memory(config: Config, tokenizer: Tokenizer, mesh: parallel.Mesh, bf16: bool, recompute: bool) -> dict[str, float]:
    rows = config.trainer.batch_size * _rows(config, mesh)
    exchanged = mesh.ulysses.size() > 1
    compiled = _compiles(config, torch.device(mesh.all.device_type))
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
        "data": f"{config.data.origin}, {run.data.sequences_per_epoch:,} sequences of {seq_len:,} tokens an epoch",
        "mesh": f"{mesh.dp.size()} data-parallel x {mesh.ring.size()} ring x {mesh.ulysses.size()} Ulysses ranks "
        f"on {run.device.type}",
        "step": f"{run.sequences_per_step} sequences, {run.tokens_per_step:,} tokens",
        "ring": f"layout {config.parallel.layout}, {_rows(config, mesh):,} rows a rank, schedule {config.parallel.schedule}",
        "kernel": f"{kernel.backend}: {kernel.why}" + (", deterministic" if config.trainer.deterministic else ""),
        "precision": "bf16, fp32 parameters" if run.bf16 else "fp32",
        "FLOPs": f"{flops_per_token:.3g} a token, in a sequence of one document",
        "memory": f"about {needed / memory.GIB:.1f} GiB a rank"
        + (", blocks but for their attention computed again in the backward" if run.recompute else ""),
    }
    for name, value in lines.items():
        log.info(f"{name:<12}{value}")


def take_steps(run: Run, directory: Path, done: int, consumed: int) -> list[dict[str, float]]:
    """All steps after `done`, with their metrics and checkpoints. Returns what `take_step` does and the seconds of each."""
    trainer, rows = run.config.trainer, []
    gc.freeze()  # to look through all that is loaded by now takes Python 0.2 s, for which every rank would wait
    with parallel.agreed():
        (directory / "summary.json").unlink(missing_ok=True)  # of fewer steps, or of those that this run turns back from
        recorder = metrics.Recorder(run.config, directory, done, run.peak_flops)
    with closing(recorder):
        for step in range(done + 1, trainer.steps + 1):
            began = time.perf_counter()
            row = take_step(run, step, consumed)
            consumed += run.sequences_per_step
            rows.append(row | {"seconds": time.perf_counter() - began})
            total_tokens = consumed * run.config.data.seq_len
            memory_gib = peak_memory_gib(run.device)
            recorder.log(step, tokens=run.tokens_per_step, **rows[-1], total_tokens=total_tokens, peak_memory_gib=memory_gib)
            if is_due(step, trainer):
                save(run, directory, step, consumed)
    return rows


def take_step(run: Run, step: int, consumed: int) -> dict[str, float]:
    """One optimizer step on the sequences from `consumed` on.

    Args:
        step: from 1.

    Returns:
        loss (nats a token), grad_norm (before clipping), lr, flops (of all ranks).
    """
    batches = fetch(run, consumed)
    masks = [mask_of(run.config, batch) for batch in batches]
    totals = torch.tensor([[int((batch.labels != IGNORE).sum()) for batch in batches], list(map(_pairs, masks, batches))])
    dist.all_reduce(totals, group=run.mesh.dp.get_group())
    num_valid, num_pairs = totals.sum(1).tolist()
    loss = torch.zeros((), device=run.device)
    for batch, mask in zip(batches, masks, strict=True):
        share = share_of_loss(run, batch, mask, num_valid)
        # in this thread: another one would be woken for every backward, and hold Python's lock in turns with it
        with torch.autograd.set_multithreading_enabled(False):
            share.backward()
        loss += share.detach()
    dist.all_reduce(loss)
    most = math.inf if run.config.optim.clip is None else run.config.optim.clip
    grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), most).full_tensor()
    if step < run.config.trainer.steps:
        prepare(run, consumed + run.sequences_per_step, masks[-1])
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        raise Diverged(
            f"step {step}: the loss is {loss:.4g} and the gradient norm {grad_norm:.4g}, so training stopped before this "
            "update: lower optim.lr, raise optim.warmup_steps, or resume from an earlier checkpoint"
        )
    lr = optim.learning_rate(step, run.config.trainer.steps, run.config.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad()
    total_flops = flops.step_flops(run.model, run.tokens_per_step, num_pairs)
    return {"loss": float(loss), "grad_norm": float(grad_norm), "lr": lr, "flops": total_flops}


def fetch(run: Run, consumed: int) -> list[Batch]:
    """This rank's whole sequences of a step, one batch a micro-step.

    In each micro-step every data-parallel rank takes the next `batch_size` sequences; the ranks of a ring share them.
    """
    if run.fetched and run.fetched[0] == consumed:
        return run.fetched[1]
    size, dp = run.config.trainer.batch_size, run.mesh.dp
    starts = [
        consumed + (micro_step * dp.size() + dp.get_local_rank()) * size for micro_step in range(run.config.trainer.accumulate)
    ]
    run.fetched = consumed, [run.data.batch(range(start, start + size)) for start in starts]
    return run.fetched[1]


def prepare(run: Run, consumed: int, last: Mask) -> None:
    """Fetch and plan the next step while GPUs still work on this one, the mask of whose last micro-step is `last`."""
    mask = mask_of(run.config, fetch(run, consumed)[0])
    layout, like = (layout_of(run.config, run.mesh, x).whole for x in (mask, last))
    plan_ahead(mask, layout, (last, like), group=run.mesh.ring.get_group(), device=run.device)


def mask_of(config: Config, batch: Batch) -> Mask:
    """Which tokens of a batch see each other."""
    return Mask.causal(config.model.window, batch.documents if config.data.mask_documents else None)


def layout_of(config: Config, mesh: parallel.Mesh, mask: Mask) -> Layout:
    """Which tokens of a batch each rank of a sequence holds."""
    kind, seq_len, ring = config.parallel.layout, config.data.seq_len, mesh.ring.size()
    whole = balanced_layout(mask, seq_len, ring) if kind == "auto" else Layout(kind, seq_len, ring)
    return whole.split(mesh.ulysses.size())


def _pairs(mask: Mask, batch: Batch) -> int:
    pairs = mask.pairs(batch.tokens.shape[1])
    return sum(pairs) * (len(batch.tokens) // len(pairs))  # one entry stands for all rows where they share the mask


def share_of_loss(run: Run, batch: Batch, mask: Mask, num_valid: int) -> Tensor:
    """The loss on this rank's rows of the batch, divided by the number of valid labels of the whole step."""
    layout, rank = layout_of(run.config, run.mesh, mask), run.mesh.sequence.get_local_rank()
    attend = partial(
        ulysses_attention,
        layout=layout,
        mask=mask,
        ulysses_group=run.mesh.ulysses.get_group(),
        ring_group=run.mesh.ring.get_group(),
        schedule=run.config.parallel.schedule,
        backend=run.config.parallel.kernel,
        exchange_again=run.recompute,
    )
    tokens, labels = (layout.shard(x, rank).to(run.device) for x in (batch.tokens, batch.labels))
    options = dict(vocab_size=run.tokenizer.vocab_size, num_valid=max(num_valid, 1), compiled=_compiles(run.config, run.device))
    finish = partial(cross_entropy, labels=labels, **options)
    return run.model(tokens, layout.positions(rank).to(run.device), attend, finish)


def resume(run: Run, directory: Path) -> tuple[int, int]:
    """Load the checkpoint to go on from, if any. Returns the steps done and the sequences consumed before.

    Raises ConfigError, on every rank: `trainer.resume`, or what else is set, does not fit the checkpoints there are.
    """
    settings, own, found = run.config, directory / "checkpoints", (None, None)
    with parallel.agreed():
        if dist.get_rank() == 0:
            found = resuming.choose(own, settings.trainer)
    path, run.origin = parallel.share(found)
    if path is None:
        if settings.trainer.init_from is not None:
            load_parameters(run, Path(settings.trainer.init_from).expanduser().resolve())
        return 0, 0
    with parallel.agreed():
        meta = checkpoint.read_meta(path)
        if meta.get("corpus") != corpus(run):
            raise ConfigError(
                f"{path} stands in another corpus ({meta.get('corpus')}, in this run {corpus(run)}), where its position means "
                "nothing: resume with the data, tokenizer, data.seq_len and data.seed it was saved with, or begin with its "
                "parameters alone by trainer.init_from"
            )
        resuming.inherit(path, own, meta, settings)
        changed = resuming.differences(path, meta, settings, run.tokens_per_step)
    checkpoint.load(path, checkpoint.train_state(run.model, run.optimizer))
    log.info(f"{'resumed':<12}{path}" + (f", which was trained with {changed}" if changed else ""))
    if not checkpoint.load_rng(path):
        log.info(f"{'':<12}on another number of ranks: random generators start anew")
    return meta["step"], meta["consumed"]


def load_parameters(run: Run, path: Path) -> None:
    """Begin with the parameters of the checkpoint at `path`, and nothing else of it: another text, length or window may follow.

    Raises:
        ConfigError: on every rank: no checkpoint, or one of a model of another shape.
    """
    with parallel.agreed():
        changed = resuming.model_differences(checkpoint.read_meta(path), run.config)
    checkpoint.load(path, checkpoint.model_state(run.model))
    log.info(f"{'parameters':<12}of {path}" + (f", which was trained with {changed}" if changed else ""))


def corpus(run: Run) -> dict[str, int]:
    """What gives a number of sequences its meaning as a position in the data."""
    data = run.data
    order = zlib.crc32(data.lengths.tobytes())  # another order of the same documents is another corpus
    return {"tokens_per_epoch": data.tokens_per_epoch, "documents": order, "seq_len": data.seq_len, "seed": data.seed}


def is_due(step: int, trainer: TrainerConfig) -> bool:
    """Whether a checkpoint is written after `step`: regularly, and at the end."""
    return step == trainer.steps or (trainer.checkpoint_every > 0 and step % trainer.checkpoint_every == 0)


def save(run: Run, directory: Path, step: int, consumed: int) -> None:
    """Write a checkpoint from which `resume` goes on with the very same numbers."""
    tensors = checkpoint.train_state(run.model, run.optimizer) | checkpoint.rng_state()
    config = asdict(run.config)
    config["optim"]["warmup_steps"] = optim.warmup(run.config.trainer.steps, run.config.optim)
    meta = {"consumed": consumed, "tokens_per_step": run.tokens_per_step, "corpus": corpus(run), "origin": run.origin}
    meta["config"] = config
    checkpoint.save(directory / "checkpoints", step, tensors, meta, run.config.trainer.keep_checkpoints)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory used so far: of the GPU by this job, or of the machine by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / memory.GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / memory.GIB


def finish(run: Run, directory: Path, rows: list[dict[str, float]], done: int) -> dict[str, Any]:
    """Sample from the model after `done` steps, plot the loss, and write and return the summary."""
    write_sample(run, directory)
    final_loss = parallel.share(_final_loss(directory, done) if dist.get_rank() == 0 else None)
    summary = summarise(run, rows, done, final_loss)
    log.info("done        " + ", ".join(f"{k} {v:.6g}" for k, v in summary.items() if isinstance(v, float)))
    if dist.get_rank() == 0:
        metrics.plot_loss(directory / "metrics.jsonl", directory / "loss.png")
        metrics.write_whole(directory / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _final_loss(directory: Path, done: int) -> float:
    """The mean over the last tenth of all steps, since the loss of one depends on its text."""
    rows = metrics.read(directory / "metrics.jsonl", until=done)
    return statistics.fmean(row["loss"] for row in rows[-max(done // 10, 1) :])


def summarise(run: Run, rows: list[dict[str, float]], done: int, final_loss: float) -> dict[str, Any]:
    """What a job comes down to.

    Rates are of the median step of `rows`, those since the job was started or resumed; the first, which warms up, counts only
    when alone.
    """
    world_size = dist.get_world_size()
    steady = rows[1:] or rows
    seconds = statistics.median(row["seconds"] for row in steady)
    flops_per_s = statistics.median(row["flops"] / row["seconds"] for row in steady) / world_size
    return {
        "seq_len": run.config.data.seq_len,
        "ranks": world_size,
        "ring": run.mesh.sequence.size(),
        "steps": done,
        "final_loss": final_loss,
        "seconds_per_step": seconds,
        "tokens_per_s": run.tokens_per_step / seconds,
        **flops.utilisation(flops_per_s, run.peak_flops),
        "peak_memory_gib": peak_memory_gib(run.device),
    }


def read_summary(run: Run, directory: Path, done: int) -> dict[str, Any]:
    """The summary of a job that has nothing left to train, but for a sample; made now if it was ended before it had one."""
    path = directory / "summary.json"
    log.info(f"{'done':<12}all {done} steps, in an earlier run: raise trainer.steps to train on")
    summary = parallel.share(json.loads(path.read_text()) if path.exists() else None)
    if summary is not None and summary["steps"] == done:  # else of a run that went on
        write_sample(run, directory)
        return summary
    rows = parallel.share(metrics.read(directory / "metrics.jsonl", until=done))
    with parallel.agreed():
        if not rows:
            raise ConfigError(f"all {done} steps are done already, so nothing is left to train: raise trainer.steps")
    ranks = dist.get_world_size()
    rows = [row | {"flops": row["tflops_per_rank"] * 1e12 * row["seconds"] * ranks} for row in rows]
    return finish(run, directory, rows, done)


def write_sample(run: Run, directory: Path) -> None:
    """Let the model write on, unless `trainer.sample_tokens` is 0."""
    if not run.config.trainer.sample_tokens:
        return
    text = sample(run)
    if dist.get_rank() == 0:
        log.info(f"sample      {text!r}")
        (directory / "sample.txt").write_text(text, encoding="utf-8")


def sample(run: Run) -> str:
    """What the model writes after the prompt, and the prompt."""
    trainer, tokenizer = run.config.trainer, run.tokenizer
    tokens = generate(
        run.model,
        tokenizer.encode(trainer.sample_prompt).tolist(),
        trainer.sample_tokens,
        group=run.mesh.sequence.get_group(),
        device=run.device,
        vocab_size=tokenizer.vocab_size,
        eos=tokenizer.eos,
        backend=run.config.parallel.kernel,
    )
    return tokenizer.decode(tokens)
