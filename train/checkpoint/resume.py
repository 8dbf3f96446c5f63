"""Find the checkpoint from which a run resumes, and compare the checkpoint with the run's settings and corpus."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from logging import WARNING
from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf.errors import OmegaConfBaseException

from ringattn.train.checkpoint import storage
from ringattn.train.data.workers import log_once
from ringattn.train.parallel.ranks import broadcast_object, sync_errors
from ringattn.train.settings.config import GROUPS, Config, ConfigError, TrainerConfig, resolve_path, with_settings
from ringattn.train.settings.literal import literal_config
from ringattn.train.settings.resolution import reset_unused

# The settings that a resumed run must not change
FIXED = ("model.", "data.mask_documents", "memory.moments")

# The settings that a resumed run may change without a message. The function `check_corpus` compares the corpus itself.
FREE = (
    *("data.path", "data.max_document_mb", "data.num_proc", "parallel.timeout_s", "trainer.device", "trainer.compile"),
    *("trainer.cuda_graphs", "trainer.resume", "trainer.init_from", "trainer.peak_tflops", "trainer.time_limit_s"),
    *("trainer.eval_every", "trainer.checkpoint_every", "trainer.save_final", "trainer.keep_checkpoints", "trainer.log_every"),
    *("trainer.background_saves",),
    *("trainer.sample_tokens", "trainer.sample_prompt", "trainer.profile"),
)

# The groups of settings that a resumed run compares with its checkpoint
COMPARED = tuple(group for group in GROUPS if group != "logger")


def saved_config(meta: dict[str, Any]) -> Config:
    """Return the settings with which a checkpoint was trained.

    Settings that are missing in meta.json have their defaults. Unknown settings are ignored, unless they are model settings.

    Raises:
        ConfigError: a setting has an invalid type, or a model setting of the checkpoint is unknown.
    """
    stored = meta.get("config")
    if not isinstance(stored, dict) or not all(isinstance(stored.get(group, {}), dict) for group in GROUPS):
        raise ConfigError("meta.json of the checkpoint is damaged: it contains no settings; restore the file")
    saved: dict[str, Any] = {"name": stored.get("name")}
    unknown: list[str] = []
    for group in GROUPS:
        values, known = stored.get(group, {}), vars(getattr(Config(), group))
        saved[group] = {name: value for name, value in values.items() if name in known}
        unknown += [f"{group}.{name}={value}" for name, value in values.items() if name not in known and value is not None]
    if any(setting.startswith("model.") for setting in unknown):
        raise ConfigError(
            f"the checkpoint was saved with {', '.join(unknown)}, which this version does not know: use the version that saved "
            "the checkpoint"
        )
    if unknown:
        reason = "because this version does not have them"
        log_once(f"{'settings':<12}of another version are ignored, {reason}: {', '.join(unknown)}", WARNING)
    try:
        config = literal_config(saved)
    except (OmegaConfBaseException, RecursionError) as error:
        key, reason = getattr(error, "full_key", "settings"), str(error).splitlines()[0]
        raise ConfigError(f"meta.json of the checkpoint is damaged: {key}: {reason}; restore the file") from error
    if config.data.held_out is None and "eval_fraction" not in saved["data"]:
        config = with_settings(config, {"data.eval_fraction": 0.0})  # Earlier versions trained on the whole text.
    return reset_unused(config, given=set())  # Earlier versions also saved unused values.


def read_run_meta(path: Path) -> dict[str, Any]:
    """Return the meta.json of a checkpoint that a training run has saved.

    Raises:
        CheckpointError: `path` is not such a checkpoint, or its meta.json is damaged.
    """
    meta = storage.read_meta(path)
    try:
        saved_config(meta)
    except ConfigError as error:
        raise storage.CheckpointError(f"{path}: {error}") from error
    if meta.get("corpus") is not None and not isinstance(meta["corpus"], dict):
        raise storage.CheckpointError(f"{path} is damaged: meta.json lacks the corpus of its run; choose another checkpoint")
    return meta


def find_checkpoint(directory: Path, trainer: TrainerConfig) -> tuple[Path | None, str | None]:
    """Find the checkpoint from which a run resumes. All ranks call this function.

    If `trainer.resume` is a checkpoint of this run, every launch starts from this checkpoint. If `trainer.resume` is a
    checkpoint of another run, only the first launch starts from this checkpoint. Later launches then resume from this run's own
    checkpoints.

    Returns:
        (checkpoint, parent). The checkpoint is None for a new run. The parent is the checkpoint of another run from which this
        run branched, or None.

    Raises:
        ConfigError: on every rank, if the checkpoints contradict `trainer.resume` or `trainer.init_from`, or cannot be read.
    """
    # Rank 0 chooses the checkpoint, so that all ranks resume from the same checkpoint.
    with sync_errors():
        found = choose_checkpoint(directory, trainer) if dist.get_rank() == 0 else None
    return broadcast_object(found)


def choose_checkpoint(directory: Path, trainer: TrainerConfig) -> tuple[Path | None, str | None]:
    """Do the work of `find_checkpoint` on one rank, without communication."""
    newest = storage.latest(directory)
    if newest is not None:
        if trainer.init_from is not None:
            _check_init_from(newest, trainer.init_from)
        if trainer.resume == "never":
            raise ConfigError(f"trainer.resume=never, but {newest} would be overwritten: choose another name for this run")
    if trainer.resume in ("auto", "never"):
        return newest, _parent(newest) if newest else None
    path = resolve_path("trainer.resume", trainer.resume)
    if path.parent == directory.resolve():
        return path, _parent(path)
    if newest is not None and _parent(newest) != str(path):
        raise ConfigError(
            f"trainer.resume={trainer.resume}, but {newest} belongs to a run that did not branch from that checkpoint, and "
            "would be overwritten: choose another name for this run, or remove trainer.resume"
        )
    return newest or path, str(path)


def _check_init_from(newest: Path, init_from: str) -> None:
    saved = read_run_meta(newest)["config"]["trainer"].get("init_from")
    if saved is None or Path(saved).expanduser().resolve() != resolve_path("trainer.init_from", init_from):
        raise ConfigError(
            f"trainer.init_from={init_from}, but {newest} belongs to a run that started from {saved or 'random weights'}: "
            "choose another name for this run, or remove trainer.init_from"
        )


def _parent(path: Path) -> str | None:
    return storage.read_meta(path).get("origin")


def apply_saved_settings(path: Path, directory: Path, meta: dict[str, Any], config: Config) -> Config:
    """Return `config` with the settings that a resumed run must take from its checkpoint.

    The learning rate and the warmup stay as in the checkpoint, unless the user sets them. Therefore, raising `trainer.steps`
    does not lengthen the warmup.

    Args:
        path: the checkpoint.
        directory: the directory of the run's checkpoints.
        meta: the content of the checkpoint's meta.json.

    Raises:
        ConfigError: the run would end during the warmup.
    """
    kept = {}
    if config.optim.lr is None:
        kept["optim.lr"] = meta["config"]["optim"]["lr"]
    if config.optim.warmup_steps is None:
        kept["optim.warmup_steps"] = warmup = meta["config"]["optim"]["warmup_steps"]
        if warmup > config.trainer.steps:
            raise ConfigError(
                f"trainer.steps={config.trainer.steps} would end during the {warmup} warmup steps of {path}: use more "
                "steps, or set optim.warmup_steps"
            )
    if path.parent.resolve() == directory.resolve():
        kept["trainer.init_from"] = meta["config"]["trainer"].get("init_from")
    return with_settings(config, kept)


def check_corpus(path: Path, meta: dict[str, Any], current: dict[str, Any], config: Config) -> None:
    """Check that the run reads the same text as the checkpoint, and that the saved position is valid.

    `current` is the fingerprint of the run's corpus. Other arguments as in `apply_saved_settings`.

    Raises:
        ConfigError: the corpora differ, or the saved position is damaged.
    """
    # Checkpoints of earlier versions lack the entry "sequences".
    saved = {"sequences": "in order"} | (meta.get("corpus") or {})
    current = {name: value for name, value in current.items() if name in saved}
    if not meta.get("corpus") or saved != current:
        raise ConfigError(
            f"{path} was trained on another corpus: {_describe_corpus_change(meta, saved, current, config)}; its position in "
            "the data is not valid here: resume with the same settings and the same text, or start a new run from its weights "
            "with trainer.init_from"
        )
    if not storage.is_count(consumed := meta.get("consumed")):
        raise ConfigError(
            f"{path} is damaged: meta.json has consumed={consumed!r:.60}, which must be an integer of at least 0; choose "
            "another checkpoint"
        )


def _describe_corpus_change(meta: dict[str, Any], saved: dict[str, Any], current: dict[str, Any], config: Config) -> str:
    if not meta.get("corpus"):
        return "it does not describe its corpus"
    changes = _changes(meta, config, ("data",), free=("data.mask_documents", "data.max_document_mb", "data.num_proc"))
    if changes:
        return ", ".join(changes.values())
    if any(saved.get(name) != current.get(name) for name in ("tokens_per_epoch", "documents", "text", "checksum")):
        tokens = [fingerprint.get("tokens_per_epoch") for fingerprint in (saved, current)]
        change = "" if None in tokens else f" from {tokens[0]} to {tokens[1]} tokens"
        return f"the text of {config.data.description} has changed{change}, although the settings are equal"
    return ", ".join(f"{name} {saved[name]} (now {current.get(name)})" for name in saved if saved[name] != current.get(name))


def compare_settings(path: Path, meta: dict[str, Any], config: Config, tokens_per_step: int) -> str:
    """Compare a resumed run's settings with its checkpoint. Return the differences, or "" if there are none.

    Arguments as in `apply_saved_settings`.

    Raises:
        ConfigError: a setting in FIXED differs, or the run is complete and another setting differs.
    """
    changes = _changes(meta, config, COMPARED)
    if (before := meta.get("tokens_per_step", tokens_per_step)) != tokens_per_step:
        changes = {"tokens_per_step": f"tokens_per_step={before} (now {tokens_per_step})"} | changes
    if fixed := [change for name, change in changes.items() if name.startswith(FIXED)]:
        raise ConfigError(f"{path} was trained with {', '.join(fixed)}: resume with the same settings, or choose another name")
    # After the last step, a run only generates a sample. The mesh, the memory plan and the tokens per step do not affect a
    # sample.
    irrelevant = ("parallel.", "memory.", "tokens_per_step")
    relevant = [change for name, change in changes.items() if not name.startswith(irrelevant)]
    if relevant and meta["step"] >= config.trainer.steps:
        raise ConfigError(
            f"{path} has completed all {meta['step']} steps, with {', '.join(relevant)}: choose another name for this "
            "run, or raise trainer.steps"
        )
    return ", ".join(changes.values())


def check_job_of_sweep(path: Path, meta: dict[str, Any], config: Config) -> None:
    """Check that a resumed job of a sweep keeps its settings, except for the number of steps."""
    changes = _changes(meta, config, COMPARED)
    for name in ("trainer.steps", "trainer.total_tokens"):
        changes.pop(name, None)  # `compare_settings` reports too few steps.
    if changes:
        raise ConfigError(
            f"{path} belongs to a job of a sweep that was launched with {', '.join(changes.values())}: choose another name for "
            "this sweep, or launch it with the earlier settings"
        )


def compare_model_settings(path: Path, meta: dict[str, Any], config: Config) -> str:
    """Compare the model settings of a new run with the checkpoint of its initial weights. Return the differences.

    Raises:
        ConfigError: the number of heads differs.
    """
    changes = _changes(meta, config, ("model",))
    if fixed := [change for name, change in changes.items() if name in ("model.heads", "model.kv_heads")]:
        raise ConfigError(f"{path} contains a model with {', '.join(fixed)}: use the same settings")
    if "model.rope_factor" in changes and config.model.rope_factor is not None:
        changes.setdefault("model.rope_scaling", f"model.rope_scaling={config.model.rope_scaling}")
    return ", ".join(changes.values())


def _changes(meta: dict[str, Any], config: Config, groups: Iterable[str], free: Iterable[str] = FREE) -> dict[str, str]:
    """Describe the settings of `groups` that differ from the checkpoint, except settings in `free`.

    Returns:
        A dict from the name of each differing setting to its description.
    """
    # Convert the saved and the current settings to JSON, because JSON turns tuples into lists.
    before, now = (json.loads(json.dumps(asdict(each))) for each in (saved_config(meta), config))
    changes = {}
    for group in groups:
        for name, value in now[group].items():
            if (saved := before[group][name]) != value and f"{group}.{name}" not in free:
                changes[f"{group}.{name}"] = f"{group}.{name}={saved} (now {value})"
    return changes
