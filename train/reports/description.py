"""Describe a run by its properties, the machine and the versions of the software."""

import logging
import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from ringattn import Mask
from ringattn.comm.connect import connect
from ringattn.planning.rank_plan import Plan
from ringattn.planning.ulysses_degree import MAX_PLANNED_RANKS, chunk_of_heads
from ringattn.planning.workload import chunk_work
from ringattn.train.checkpoint import huggingface
from ringattn.train.data.best_fit import BestFitDataset
from ringattn.train.data.documents import TokenisedDocuments
from ringattn.train.data.mixture import MixtureDataset
from ringattn.train.data.records import RecordDataset
from ringattn.train.data.stream import StreamDataset
from ringattn.train.model import flops
from ringattn.train.parallel import prediction
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.capacity import describe_bytes
from ringattn.train.parallel.mesh import attention_inputs, causal_masks, choose_layout
from ringattn.train.reports.packing_report import describe_packing, packing_facts, texts_of
from ringattn.train.setup import Run, machine_of

log = logging.getLogger(__name__)

# The root folder of the repository. In an installed package, it has no .git.
ROOT = Path(__file__).resolve().parents[2]


# The number of sequences that are read to predict the time of a step.
SAMPLED_SEQUENCES = 32

FP8_DESCRIPTIONS = {
    "never": "",
    "inference": ", FP8 attention in evaluation and generation",
    "always": ", FP8 attention in every forward pass",
}

FLOAT8_DESCRIPTION = ", FP8 linear layers in training steps (the MFU is relative to the peak of bf16)"


def run_facts(run: Run) -> dict[str, Any]:
    """Return the properties of a run as values that JSON can represent."""
    config, mesh, seq_len = run.config, run.mesh, run.config.data.seq_len
    pairs = sum(Mask.causal(window).pairs(seq_len)[0] for window in config.model.windows)
    return {
        "device": run.device.type,
        "device_name": torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else platform.machine(),
        "ranks": dist.get_world_size(),
        "mesh": {"data_parallel": mesh.dp.size(), "ring": mesh.ring.size(), "ulysses": mesh.ulysses.size()},
        "kernel": run.kernel.backend,
        "kernel_reason": run.kernel.reason,
        "layout": config.parallel.layout,
        "schedule": config.parallel.schedule,
        "route": config.parallel.route,
        "tokens_per_rank": estimate.tokens_per_rank(config, mesh.shape),
        "precision": "bf16, fp32 parameters" if run.bf16 else "fp32",
        "fp8_attention": config.trainer.fp8_attention,
        "float8": config.trainer.float8,
        "deterministic": config.trainer.deterministic,
        "compiled": run.compiled,
        "cuda_graphs": run.graphs is not None,
        "memory_plan": asdict(run.plan),
        "parameters": run.num_parameters,
        "vocab_size": run.tokenizer.vocab_size,
        "sequences_per_epoch": None if isinstance(run.data, StreamDataset) else run.data.sequences_per_epoch,
        "held_out_sequences": run.held_out.sequences_per_epoch if run.held_out else 0,
        "packing": {name: packing_facts(text, config.data.mask_documents) for name, text in texts_of(run.data).items()},
        "dropped_records": run.data.num_dropped if isinstance(run.data, RecordDataset) else 0,
        "sequences_per_step": run.sequences_per_step,
        "tokens_per_step": run.tokens_per_step,
        # The FLOPs per token of a sequence with one document.
        "flops_per_token": flops.step_flops(run.model, seq_len, pairs) / seq_len,
        "peak_tflops_per_rank": run.peak_flops / 1e12 if run.peak_flops else None,
        "estimated_memory_gib": run.memory_needed.allocated / estimate.GIB,
        "estimated_offloaded_gib": run.memory_needed.offloaded / estimate.GIB,
        "init_from": str(run.init_from) if run.init_from else None,
        "git_commit": git_commit(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in ("torch", "triton", "ringattn")},
    }


def describe(run: Run, directory: Path, facts: dict[str, Any]) -> None:
    config, mesh, per_step = run.config, facts["mesh"], facts["sequences_per_step"]
    rows = config.model.vocab_size or 0
    padding = f" of {rows:,} rows (the loss ignores the other rows)" if rows > facts["vocab_size"] else ""
    kinds = f", layers {','.join(config.model.layer_types)}" if config.model.layer_types else ""
    entries: dict[str, Any] = {
        "directory": directory,
        "model": f"{facts['parameters']:,} parameters, vocabulary {facts['vocab_size']:,}{padding}{kinds}",
        "data": _describe_data(run, facts),
        "mesh": f"{mesh['data_parallel']} data-parallel x {mesh['ring']} ring x {mesh['ulysses']} Ulysses ranks "
        f"on {facts['device']}",
        "step": f"{per_step} sequence{'s' * (per_step > 1)}, {facts['tokens_per_step']:,} tokens",
        "ring": f"layout {facts['layout']}, {facts['tokens_per_rank']:,} tokens per rank, schedule {facts['schedule']}, "
        f"route {facts['route']}",
        "kernel": f"{facts['kernel']}: {facts['kernel_reason']}" + (", deterministic" if facts["deterministic"] else ""),
        "precision": facts["precision"] + FP8_DESCRIPTIONS[facts["fp8_attention"]] + FLOAT8_DESCRIPTION * facts["float8"],
        "FLOPs": f"{facts['flops_per_token']:.3g} per token, for a sequence of one document",
        "memory": f"about {describe_bytes(run.memory_needed.device)} per rank",
    }
    if host := describe_bytes(run.memory_needed.host):
        entries["host memory"] = f"about {host} per rank"
    if choices := run.plan.describe(config.model.layers):
        entries["memory plan"] = choices
    for name, numbers in facts["packing"].items():
        entries[f"documents {name}".strip()] = describe_packing(numbers)
    if facts["cuda_graphs"]:
        entries["CUDA graphs"] = "replay the forward and the backward pass of every training step"
    machine = machine_of(config, run.device, run.tokenizer.vocab_size, run.bf16)
    is_predictable = machine.gpu is not None and not config.data.streaming
    if is_predictable and dist.get_rank() == 0 and run.mesh.sequence.size() <= MAX_PLANNED_RANKS:
        entries["prediction"] = prediction.describe_step(config, run.mesh.shape, machine, pair_shares(run))
    documents, held_out = run.data, run.held_out
    are_texts = isinstance(documents, TokenisedDocuments) and isinstance(held_out, TokenisedDocuments)
    if are_texts and config.data.resolved_eval_fraction:
        share = held_out.tokens_per_epoch / (documents.tokens_per_epoch + held_out.tokens_per_epoch)
        entries["held out"] = f"{share:.1%} of the tokens, because data.eval_split is not set (see data.eval_fraction)"
    if run.init_from:
        changes = f", which were trained with {run.init_from_changes}" if run.init_from_changes else ""
        entries["weights"] = f"from {run.init_from}{changes}"
        if huggingface.is_model(run.init_from):
            warning = huggingface.warn_of_length(run.init_from, config.model, config.data.seq_len)
            entries |= {"positions": warning} if warning else {}
    for name, value in entries.items():
        log.info(f"{name:<11} {value}")


def _describe_data(run: Run, facts: dict[str, Any]) -> str:
    config, ranks = run.config, facts["mesh"]["data_parallel"]
    held_out = f", {facts['held_out_sequences']:,} held-out sequences" if run.held_out else ""
    data = f"{facts['sequences_per_epoch'] or 0:,} sequences of {config.data.seq_len:,} tokens per epoch{held_out}"
    if config.data.source == "recall":
        data = f"generated sequences of {config.data.seq_len:,} tokens"
    if isinstance(run.data, StreamDataset):
        data = f"streamed by {run.data.num_readers} readers, which shuffle {config.data.shuffle_buffer:,} documents{held_out}"
        if ranks > 1 and run.data.num_readers % (ranks * config.trainer.batch_size):
            data += f", and {ranks} data-parallel ranks do not divide the readers evenly: some read the same text"
    if isinstance(run.data, MixtureDataset):
        shares = [
            f"{weight:.1%} {name} ({run.data.sources[name].sequences_per_epoch:,} sequences)"
            for name, weight in run.data.weights.items()
        ]
        data = f"{', '.join(shares)}{held_out}; {run.data.first_exhausted} runs out after "
        data += f"{run.data.sequences_per_epoch:,} sequences"
    if isinstance(run.data, RecordDataset | BestFitDataset):
        data += f", {run.data.padding:.1%} padding"
    return f"{config.data.description}, {data}"


def pair_shares(run: Run) -> prediction.Shares:
    """Return the mean fraction of (query, key) pairs that document masks allow, by window."""
    if not run.config.data.mask_documents:
        return prediction.NO_DOCUMENTS
    seq_len, count = run.config.data.seq_len, run.data.sequences_per_epoch
    # Consecutive sequences may have a similar cost (`data.group_size`), so sample the whole epoch.
    numbers = range(0, count, max(count // SAMPLED_SEQUENCES, 1))[:SAMPLED_SEQUENCES]
    documents = [run.data.batch([number]).documents for number in numbers]
    pairs = {
        window: [sum(Mask.causal(window, x).pairs(seq_len)) for x in documents] for window in set(run.config.model.windows)
    }
    return {window: fmean(counts) / Mask.causal(window).pairs(seq_len)[0] for window, counts in pairs.items()}


def communication_facts(run: Run) -> dict[str, Any]:
    """Return the ring's transport, route and schedules for sequences with one document.

    All ranks must call this function after the first step.

    Returns:
        `transport`: "nvlink", "nccl", "gloo" or None. For a ring, the dict also contains `route`, `schedule_forward`,
        `schedule_backward` and `predicted_exposed_communication_s_per_step`.
    """
    mesh, parallel = run.mesh, run.config.parallel
    if mesh.ring.size() == 1:
        group = mesh.ulysses.get_group().group_name if mesh.ulysses.size() > 1 else ""
        return {"transport": connect(group, run.device).interconnect.name if group else None}
    connection = connect(mesh.ring.get_group().group_name, run.device, relays=parallel.route == "relay")
    joined = connection.interconnect.with_route(parallel.route)
    masks, windows = causal_masks(run.config.model), run.config.model.windows
    layout = choose_layout(run.config, mesh.shape, masks).whole
    facts = {"transport": joined.name, "route": "direct" if joined.all_pairs else "relay"}
    inputs = attention_inputs(run.config, run.bf16)
    chunks, (q, k, v, _) = chunk_of_heads(*inputs, mesh.sequence.size(), mesh.ulysses.size())
    schedules, exposed = dict[str, list[str]](), 0.0
    for window, mask in masks.items():
        # A plan on the CPU suffices to predict the schedules.
        plan = Plan(mask, layout, connection.rank, torch.device("cpu"))
        count, passes = chunk_work(q, k, v, plan.pairs / layout.ranks, run.config.trainer.attention_precision(training=True))
        for work in passes:
            chosen = plan.choose_schedule(parallel.schedule, work, joined)
            schedules.setdefault(work.direction, []).append(chosen)
            hops = plan.costs(chosen, work, joined)
            exposed += windows.count(window) * chunks * count * sum(max(hop.communication - hop.compute, 0) for hop in hops)
    # If sliding and full layers have different schedules, both schedules are listed in the order of the layers.
    facts |= {f"schedule_{direction}": ", ".join(dict.fromkeys(names)) for direction, names in schedules.items()}
    return facts | {"predicted_exposed_communication_s_per_step": exposed * run.config.trainer.accumulate}


def git_commit() -> str | None:
    if not (ROOT / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
