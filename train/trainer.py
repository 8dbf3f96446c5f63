"""Training: build the pieces, say what they amount to, resume, step, and leave a summary."""

import gc
import logging
import time
import zlib
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ringattn.train import metrics, optim
from ringattn.train.checkpoint import init as initial_weights
from ringattn.train.checkpoint import resume as resume_rules
from ringattn.train.checkpoint import storage
from ringattn.train.config import Config, ConfigError, check
from ringattn.train.evaluate import evaluate
from ringattn.train.lock import alone_in
from ringattn.train.parallel import mesh as parallel
from ringattn.train.preemption import Stopped, any_asked, is_asked, listening
from ringattn.train.setup import Run, build, describe
from ringattn.train.step import take_step
from ringattn.train.summary import finish, peak_memory_gib, read_summary

log = logging.getLogger(__name__)


def train(config: Config, directory: Path) -> dict[str, Any]:
    """Run one job. All ranks call it with the same arguments.

    Args:
        directory: gets checkpoints/, metrics.jsonl, loss.png, sample.txt and summary.json.

    Returns:
        The summary, on every rank.

    Raises:
        ConfigError: on every rank, before training starts: settings or files that cannot be honoured.
        Diverged: on every rank.
        Stopped: on every rank: the launch was asked to end, and what the run has done is saved.
    """
    with parallel.sync_errors():
        check(config, dist.get_world_size())
    if any_asked(config.trainer.time_limit_s):
        log.info(f"{'stopped':<12}as asked, before {directory} began")
        raise Stopped
    with alone_in(directory):
        saved, origin = find(config, directory)
        run = build(config, initial_weights.choose(config) if saved is None else None)
        run.origin = origin
        describe(run, directory)
        done, consumed = resume(run, directory, saved) if saved else (0, 0)
        if run.begin:
            initial_weights.load(run.begin, run.model)
        if done >= config.trainer.steps:
            return read_summary(run, directory, done)
        return finish(run, directory, take_steps(run, directory, done, consumed), config.trainer.steps)


def take_steps(run: Run, directory: Path, done: int, consumed: int) -> list[dict[str, float]]:
    """All steps after `done`, with their metrics and checkpoints. Returns what `take_step` does and the seconds of each."""
    trainer, rows = run.config.trainer, []
    gc.freeze()  # to look through all that is loaded by now takes Python 0.2 s, for which every rank would wait
    with parallel.sync_errors():
        (directory / "summary.json").unlink(missing_ok=True)  # of fewer steps, or of those that this run turns back from
        if dist.get_rank() == 0:  # before their rows go: the next launch must find what this one goes on from
            storage.turn_back(directory / "checkpoints", done)
        recorder = metrics.Recorder(run.config, directory, done, run.peak_flops)
    with closing(recorder), listening():
        for step in range(done + 1, trainer.steps + 1):
            began = time.perf_counter()
            row, asked = take_step(run, step, consumed, partial(is_asked, trainer.time_limit_s))
            stop = asked and step < trainer.steps
            consumed += run.sequences_per_step
            rows.append(row | {"seconds": time.perf_counter() - began})
            due = run.held_out and not stop and is_due(step, trainer.eval_every, trainer.steps)
            known = {"total_tokens": consumed * run.config.data.seq_len, "peak_memory_gib": peak_memory_gib(run.device)}
            recorder.log(step, tokens=run.tokens_per_step, **rows[-1], **known, **(evaluate(run) if due else {}))
            if stop or is_due(step, trainer.checkpoint_every, trainer.steps):
                save(run, directory, step, consumed)
            if stop:
                log.info(f"{'stopped':<12}as asked, after step {step}, which is saved: the same name goes on from there")
                raise Stopped
    return rows


def find(config: Config, directory: Path) -> tuple[Path | None, str | None]:
    """The checkpoint to go on from and its run's origin, see `resuming.choose`; rank 0 looks for all.

    Raises ConfigError, on every rank: `trainer.resume` does not fit the checkpoints there are.
    """
    found = None, None
    with parallel.sync_errors():
        if dist.get_rank() == 0:
            found = resume_rules.choose(directory / "checkpoints", config.trainer)
    return parallel.broadcast_object(found)


def resume(run: Run, directory: Path, path: Path) -> tuple[int, int]:
    """Load the checkpoint at `path`. Returns the steps done and the sequences consumed before.

    Raises ConfigError, on every rank: what is set does not fit it.
    """
    settings, own = run.config, directory / "checkpoints"
    with parallel.sync_errors():
        meta = storage.read_meta(path)
        known = meta.get("corpus") or {}
        here = {name: value for name, value in corpus(run).items() if name in known}
        if not known or known != here:
            raise ConfigError(
                f"{path} stands in another corpus ({known}, in this run {here}), where its position means "
                "nothing: resume with the data, tokenizer, data.seq_len and data.seed it was saved with, or begin with its "
                "parameters alone by trainer.init_from"
            )
        resume_rules.inherit(path, own, meta, settings)
        changed = resume_rules.differences(path, meta, settings, run.tokens_per_step)
    storage.load(path, storage.train_state(run.model, run.optimizer))
    log.info(f"{'resumed':<12}{path}" + (f", which was trained with {changed}" if changed else ""))
    if not storage.load_rng(path):
        log.info(f"{'':<12}on another number of ranks: random generators start anew")
    return meta["step"], meta["consumed"]


def corpus(run: Run) -> dict[str, int]:
    """What gives a number of sequences its meaning as a position in the data."""
    data = run.data
    order = zlib.crc32(data.lengths.tobytes())  # another order of the same documents is another corpus
    known = {"tokens_per_epoch": data.tokens_per_epoch, "documents": order, "text": data.sampled}
    return known | {"seq_len": data.seq_len, "seed": data.seed}


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether what comes `every` so many steps, and at the end of all `steps`, does so after `step`; 0: only at the end."""
    return step == steps or (every > 0 and step % every == 0)


def save(run: Run, directory: Path, step: int, consumed: int) -> None:
    """Write a checkpoint from which `resume` goes on with the very same numbers."""
    tensors = storage.train_state(run.model, run.optimizer) | storage.rng_state()
    config = asdict(run.config)
    config["optim"]["warmup_steps"] = optim.warmup(run.config.trainer.steps, run.config.optim)
    meta = {"consumed": consumed, "tokens_per_step": run.tokens_per_step, "corpus": corpus(run), "origin": run.origin}
    meta |= {"config": config, "tokenizer": run.tokenizer.fingerprint}
    storage.save(directory / "checkpoints", step, tensors, meta, run.config.trainer.keep_checkpoints)
