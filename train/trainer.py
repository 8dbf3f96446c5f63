"""Run a training job from start to end: set up, resume, take steps, evaluate, save, and write the results."""

import gc
import logging
import math
import os
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ringattn.train import optim, preemption
from ringattn.train.checkpoint import background, state_dict, storage
from ringattn.train.checkpoint import init as initial_weights
from ringattn.train.checkpoint import resume as resume_rules
from ringattn.train.checkpoint.progress import local_bytes
from ringattn.train.data.loader import Positions
from ringattn.train.data.mixture import MixtureDataset
from ringattn.train.data.recall import evaluation_lengths
from ringattn.train.data.stream import StreamDataset
from ringattn.train.inference.generation import write_sample
from ringattn.train.inference.losses import evaluate
from ringattn.train.inference.recall import evaluate_recall
from ringattn.train.parallel.ranks import broadcast_object, set_deterministic, sync_errors
from ringattn.train.reports import metrics, startup
from ringattn.train.reports.description import communication_facts, describe, run_facts
from ringattn.train.reports.packing_report import plot_documents, texts_of
from ringattn.train.reports.profiling import Profiler
from ringattn.train.reports.recall_results import to_metrics
from ringattn.train.reports.summary import complete_summary, peak_memory_gib, plot_loss, write_results
from ringattn.train.reports.wandb_run import WandbRun
from ringattn.train.settings.config import Config, ConfigError, TrainerConfig, check, with_settings
from ringattn.train.settings.sweep import is_job_of_sweep
from ringattn.train.settings.token_budget import default_group_size, resolve_token_budget, resume_token_budget
from ringattn.train.setup import Run, build, choose_fastest_mesh, find_resources
from ringattn.train.step import take_step

log = logging.getLogger(__name__)


def train(config: Config, directory: Path) -> dict[str, Any]:
    """Run one job. All ranks call this function with the same arguments, and return the same summary.

    Args:
        config: the settings.
        directory: the directory of the run, for checkpoints/, metrics.jsonl, pictures, sample.txt and summary.json.

    Raises:
        ConfigError: on every rank, before training starts, if a setting or a file is invalid.
        Diverged: on every rank, if the loss or the gradient norm is not finite.
        TrainingStopped: on every rank, if any rank was asked to stop. The progress of the run is saved.
    """
    startup.begin_job()
    startup.end_part("settings")
    config = resolve(config)
    if preemption.any_rank_stop_requested(config.trainer.time_limit_s):
        log.info(f"{'stopped':<12}on request, before {directory} was started")
        raise preemption.TrainingStopped
    with preemption.acquire_run_directory(directory), ExitStack() as stack:
        with sync_errors():
            check_results(directory)
        checkpoint, parent = resume_rules.find_checkpoint(directory / "checkpoints", config.trainer)
        progress = 0, 0
        if checkpoint is not None:
            config, progress = keep_settings(config, directory, checkpoint)
        elif config.data.group_size is None:
            config = with_settings(config, {"data.group_size": default_group_size(config, dist.get_world_size())})
        run = build(config, initial_weights.initial_weights_path(config) if checkpoint is None else None, parent, progress)
        startup.end_part("data", run.data_ready)
        stack.enter_context(closing(run.loader))
        facts = run_facts(run)
        describe(run, directory, facts)
        done, consumed = resume(run, directory, checkpoint) if checkpoint else (0, 0)
        if run.init_from:
            initial_weights.load(run.init_from, run.model)
        if done >= run.config.trainer.steps:
            return complete_run(run, directory, done, facts)
        startup.end_part("model")
        log.info(f"{'optimizer':<12}AdamW, peak learning rate {run.config.optim.lr:.3g}")
        prepare_directory(run, directory, done)
        with sync_errors():
            wandb_run = WandbRun(run.config, directory, facts)
        startup.end_part("W&B")
        with preemption.handle_stop_signals(), wandb_run:  # A stop request must not interrupt the end of the W&B run.
            take_steps(run, directory, done, consumed, wandb_run)
            write_sample(run, directory, wandb_run)
            return write_results(run, directory, done, wandb_run)


def resolve(config: Config) -> Config:
    """Check the settings on all ranks, without the data and the weights. Return the settings with all derived values."""
    if config.parallel.mesh == "fastest":
        config = choose_fastest_mesh(config)
    with sync_errors():
        config = resolve_token_budget(config, dist.get_world_size())
        check(config, dist.get_world_size())
    return config


def check_job(config: Config, directory: Path) -> None:
    """Check the settings, the data and the memory of a job before any job of the sweep starts. Raise the errors of `train`."""
    config = resolve(config)
    set_deterministic(config.trainer.deterministic)
    is_new = storage.latest(directory / "checkpoints") is None
    find_resources(config, initial_weights.initial_weights_path(config) if is_new else None)


def complete_run(run: Run, directory: Path, done: int, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of a run that has completed all steps.

    If the run was killed after its last step, this function repeats the evaluation and writes the summary. The argument `facts`
    is the result of `run_facts`.
    """
    if (summary := complete_summary(run, directory)) is not None:
        write_sample(run, directory)
        return summary
    with sync_errors():
        wandb_run = WandbRun(run.config, directory, facts)
    with preemption.handle_stop_signals(), wandb_run:
        with sync_errors():
            # A run that went back to an earlier step keeps the checkpoints and the records of later steps.
            recorder = metrics.Recorder(run.config, directory, math.inf, wandb_run=wandb_run)
        with closing(recorder):
            repeat_evaluation(run, directory, done, recorder, wandb_run)
        write_sample(run, directory, wandb_run)
        return write_results(run, directory, 0, wandb_run)


def check_results(directory: Path) -> None:
    """Check before the first step that the run can write its results.

    Raises:
        ConfigError: a folder has the name of a file that the run writes, or the checkpoint folder is not writable.
    """
    checkpoints = directory / "checkpoints"
    if os.path.lexists(checkpoints) and not (checkpoints.is_dir() and os.access(checkpoints, os.W_OK | os.X_OK)):
        raise ConfigError(f"{checkpoints} is not a folder that this run can write: change its permissions, or rename it")
    pictures = "loss.png", "data_wait.png", "recall.png"
    for name in ("metrics.jsonl", "metrics.tmp", *pictures, "sample.txt", "summary.json", "summary.tmp"):
        if (directory / name).is_dir():
            raise ConfigError(f"{directory / name} is a folder, but the run writes a file of this name: rename the folder")


def prepare_directory(run: Run, directory: Path, done: int) -> None:
    """Remove all results of steps after `done` from the directory, except their metrics.

    Raises:
        ConfigError: on every rank, if the disk cannot hold one checkpoint.
    """
    with sync_errors():
        # Check the space before removing anything.
        if dist.get_rank() == 0:
            check_space(run, directory / "checkpoints", done)
        # If this run adds or repeats steps, an old summary is wrong.
        (directory / "summary.json").unlink(missing_ok=True)
        # If the run is killed, its next launch must not resume from a checkpoint of later steps.
        if dist.get_rank() == 0:
            storage.delete_later_checkpoints(directory / "checkpoints", done)


def take_steps(run: Run, directory: Path, done: int, consumed: int, wandb_run: WandbRun) -> None:
    """Take all steps after step `done`. Record metrics, evaluate the model, and save checkpoints.

    `consumed` is the number of sequences of the first `done` steps. The caller closes `wandb_run`.

    Raises:
        TrainingStopped: on every rank, if any rank was asked to stop before the end of the last evaluation. The last complete
            step is saved.
    """
    trainer = run.config.trainer
    gc.freeze()  # Garbage collection of existing objects would delay all ranks by 0.2 s.
    with sync_errors():
        recorder = metrics.Recorder(run.config, directory, done, run.peak_flops, wandb_run)
    profiler = Profiler(trainer, directory, run.device, done)
    saved = done  # the step of the newest checkpoint
    with closing(recorder), closing(profiler), build_saver(run, done) as saver:

        def stop_after(step: int) -> NoReturn:
            if saved < step:
                timed_save(run, directory, step, consumed, recorder, saver)
            saver.wait()
            end_stopped_run(run, directory, step, wandb_run)

        repeat_evaluation(run, directory, done, recorder, wandb_run)
        for step in range(done + 1, trainer.steps + 1):
            start = time.perf_counter()
            try:
                with profiler.profile_step(step):
                    record, stop = take_step(run, step, consumed)
            except preemption.StoppedEarly:
                stop_after(step - 1)
            seconds = time.perf_counter() - start
            if step == done + 1:
                startup.end_part("first step")
            evaluates = is_evaluated(run, step)
            # After the last step, a stop request can only interrupt the evaluation.
            stop = stop and (step < trainer.steps or evaluates)
            record |= report_sources(run, step, consumed)
            consumed += run.sequences_per_step
            record["total_tokens"] = consumed * run.config.data.seq_len
            record["peak_memory_gib"] = peak_memory_gib(run.device, run.uncounted_bytes)
            recorder.log(step, tokens=run.tokens_per_step, seconds=seconds, show=stop or not evaluates, **record)
            if step == done + 1:
                report_first_step(run, directory, wandb_run)
            # Save before the evaluation, so that a kill during the evaluation does not lose the step.
            is_saved = stop or saves_after_step(step, trainer)
            if is_saved:
                timed_save(run, directory, step, consumed, recorder, saver)
                saved = step
            # After a stop request, leave the evaluation to the next launch, because this launch may soon be killed.
            if evaluates and not stop:
                try:
                    recorder.extend(step, **timed_evaluation(run))
                except preemption.StoppedEarly:
                    stop = True
            if step < trainer.steps and (is_saved or evaluates) and not stop:
                # Check for a stop request that came during the save or the evaluation.
                stop = preemption.any_rank_stop_requested(trainer.time_limit_s)
            if stop:
                stop_after(step)


def report_first_step(run: Run, directory: Path, wandb_run: WandbRun) -> None:
    """Report the start-up, the documents and the communication. All ranks call this function."""
    log.info(f"{'start-up':<12}{startup.describe()}")
    if dist.get_rank() == 0 and (texts := texts_of(run.data)):
        plot_documents(texts, directory / "documents.png")
    wandb_run.add_facts(communication_facts(run))


def report_sources(run: Run, step: int, consumed: int) -> dict[str, float]:
    """Log which texts begin a new epoch. Return the tokens and the epochs of each source after `step`.

    `consumed` is the number of sequences that earlier steps consumed.
    """
    counts = consumed, consumed + run.sequences_per_step
    if isinstance(run.data, StreamDataset):
        # Every data-parallel rank reports its own readers. Ranks other than rank 0 show only warnings.
        if run.mesh.sequence.get_local_rank() == 0:
            report_stream(run.data, step, *map(run.loader.positions, counts))
        return {}
    before, after = map(run.data.progress, counts)
    for name, (_, epochs) in after.items():
        if (epoch := math.ceil(epochs)) > max(math.ceil(before[name].epochs), 1):
            text = f"the source {name}" if name else "the text"
            log.info(f"{'repeats':<12}{text} ran out, and step {step} began to read it again (epoch {epoch})")
    if not isinstance(run.data, MixtureDataset):
        return {}
    tokens = {f"tokens/{name}": progress.tokens for name, progress in after.items()}
    return tokens | {f"epochs/{name}": progress.epochs for name, progress in after.items()}


def report_stream(data: StreamDataset, step: int, before: Positions, after: Positions) -> None:
    """Log which readers begin a new epoch in `step`. Log skipped documents when their number reaches a power of two."""
    if repeated := data.repeated(before, after):
        log.warning(f"{'repeats':<12}step {step} began to read parts of the text again: {repeated}")
    (earlier, _), (count, fault) = data.faults(before), data.faults(after)
    if count.bit_length() > earlier.bit_length():
        log.warning(f"{'skipped':<12}{count:,} faulty documents of the stream until step {step}, for example: {fault}")


def is_evaluated(run: Run, step: int) -> bool:
    return bool(run.held_out) and runs_after_step(step, run.config.trainer.eval_every, run.config.trainer.steps)


def repeat_evaluation(run: Run, directory: Path, step: int, recorder: metrics.Recorder, wandb_run: WandbRun) -> None:
    """Evaluate the model after `step` if no earlier launch has completed this evaluation.

    Raises:
        TrainingStopped: on every rank, if any rank was asked to stop before the end of the evaluation.
    """
    if is_evaluated(run, step) and broadcast_object(recorder.lacks_evaluation(step)):
        try:
            recorder.amend(step, **timed_evaluation(run))
        except preemption.StoppedEarly:
            end_stopped_run(run, directory, step, wandb_run)


def build_saver(run: Run, done: int) -> background.Saver:
    """All ranks call this function."""
    trainer = run.config.trainer
    states = (tensor for state in run.optimizer.state.values() for tensor in state.values())
    size = local_bytes([*run.model.parameters(), *states])
    every = trainer.checkpoint_every
    saves_early = every > 0 and done + every - done % every < trainer.steps
    is_background = background.choose(trainer.background_saves, size, saves_early, run.memory_needed.offloaded)
    return background.Saver(run.device, size if is_background else None, run.config.parallel.timeout_s)


def timed_save(
    run: Run, directory: Path, step: int, consumed: int, recorder: metrics.Recorder, saver: background.Saver
) -> None:
    """Save a checkpoint, and record the seconds that the step waited for it as `checkpoint_s`."""
    start = time.perf_counter()
    save_checkpoint(run, directory, step, consumed, saver)
    recorder.extend(step, checkpoint_s=time.perf_counter() - start)


def end_stopped_run(run: Run, directory: Path, step: int, wandb_run: WandbRun) -> NoReturn:
    if storage.latest(directory / "checkpoints") is None:
        log.info(f"{'stopped':<12}on request, before the first step was complete: launch the same command again")
    else:
        log.info(f"{'stopped':<12}on request; step {step} is saved: launch the same name again to resume")
    if dist.get_rank() == 0:
        plot_loss(run, directory)
        wandb_run.log_picture("loss_curve", step, directory / "loss.png")
    raise preemption.TrainingStopped


def timed_evaluation(run: Run) -> dict[str, float]:
    """Evaluate the model. Return the losses, the accuracies on the recall task if there are any, and the time `evaluation_s`.

    Raises:
        StoppedEarly: on every rank, if any rank was asked to stop.
    """
    start = time.perf_counter()
    results = evaluate(run)
    if run.config.data.source == "recall":
        results |= to_metrics(evaluate_recall(run, evaluation_lengths(run.config.data.seq_len)))
    return results | {"evaluation_s": time.perf_counter() - start}


def runs_after_step(step: int, every: int, steps: int) -> bool:
    """Return whether `step` is the last step, or a multiple of a positive `every`."""
    return step == steps or (every > 0 and step % every == 0)


def saves_after_step(step: int, trainer: TrainerConfig) -> bool:
    if step == trainer.steps:
        return trainer.save_final
    return runs_after_step(step, trainer.checkpoint_every, trainer.steps)


def check_space(run: Run, directory: Path, done: int) -> None:
    """Check the disk space for the checkpoints after step `done`. If no checkpoint will be saved, log the reason."""
    trainer = run.config.trainer
    # AdamW stores two averages of the same size as the parameters.
    needed = 3 * storage.estimate_size(run.model.parameters())
    every = trainer.checkpoint_every or trainer.steps
    saves = -(-trainer.steps // every) - done // every - (not trainer.save_final)
    if saves == 0:
        settings = f"trainer.save_final=false and trainer.checkpoint_every={trainer.checkpoint_every}"
        log.info(f"{'checkpoint':<12}none, because of {settings}: the trained model is not kept, unless the run stops early")
        return
    storage.check_space(directory, done, needed, trainer.keep_checkpoints, saves)


def keep_settings(config: Config, directory: Path, checkpoint: Path) -> tuple[Config, tuple[int, int]]:
    """Return the settings of a run that resumes from `checkpoint`, and its completed steps and sequences."""
    with sync_errors():
        meta = resume_rules.read_run_meta(checkpoint)
        consumed: Any = meta.get("consumed")  # which `resume` checks
        progress = meta["step"], consumed if storage.is_count(consumed) else 0
        config = resume_token_budget(config, dist.get_world_size(), *progress)
        return resume_rules.apply_saved_settings(checkpoint, directory / "checkpoints", meta, config), progress


def resume(run: Run, directory: Path, checkpoint: Path) -> tuple[int, int]:
    """Load a checkpoint. Return the number of completed steps, and the number of sequences in these steps.

    Raises:
        ConfigError: on every rank, if the settings or the data do not fit the checkpoint.
    """
    with sync_errors():
        meta = resume_rules.read_run_meta(checkpoint)
        resume_rules.check_corpus(checkpoint, meta, run.data.fingerprint, run.config)
        if is_job_of_sweep(directory) and checkpoint.parent.resolve() == (directory / "checkpoints").resolve():
            resume_rules.check_job_of_sweep(checkpoint, meta, run.config)
        changed = resume_rules.compare_settings(checkpoint, meta, run.config, run.tokens_per_step)
        initial_weights.check_tokenizer_of(checkpoint, meta, run.config, run.tokenizer)
        if isinstance(run.data, StreamDataset):
            stream = run.data.at(meta.get("stream"), meta["consumed"])
            run.loader.begin(replace(run.loader.preparation, data=stream))
    storage.load(checkpoint, state_dict.train_state(run.model, run.optimizer))
    log.info(f"{'resumed':<12}{checkpoint}" + (f", which was trained with {changed}" if changed else ""))
    if run.held_out and meta.get("held_out") not in (None, run.held_out.fingerprint):
        log.info(f"{'':<12}the held-out text has changed, so earlier values of eval_loss are not comparable")
    if not state_dict.load_rng_state(checkpoint):
        log.info(f"{'':<12}on another number of ranks, so the random generators are seeded again")
    return meta["step"], meta["consumed"]


def save_checkpoint(run: Run, directory: Path, step: int, consumed: int, saver: background.Saver | None = None) -> None:
    """Write a checkpoint after the completed `step`. Resuming from this checkpoint continues the run bit for bit.

    Without a `saver`, the checkpoint is complete when this function returns.
    """
    tensors = state_dict.train_state(run.model, run.optimizer) | state_dict.rng_state()
    config = asdict(run.config)
    # Save the number of warmup steps, because a larger `trainer.steps` must not change the warmup of a resumed run.
    config["optim"]["warmup_steps"] = optim.resolve_warmup_steps(run.config.trainer.steps, run.config.optim)
    meta = {"consumed": consumed, "tokens_per_step": run.tokens_per_step, "corpus": run.data.fingerprint}
    meta |= {"origin": run.parent, "config": config, "tokenizer": run.tokenizer.fingerprint}
    meta |= {"held_out": None if run.held_out is None else run.held_out.fingerprint}
    if isinstance(run.data, StreamDataset):
        positions: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(positions, dict(run.loader.positions(consumed)))
        meta["stream"] = run.data.saved_positions(positions, consumed)
    save = saver.save if saver else storage.save
    save(directory / "checkpoints", step, tensors, meta, run.config.trainer.keep_checkpoints)
