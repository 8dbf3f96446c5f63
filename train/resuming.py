"""What a checkpoint was trained with, beside the settings of a run that shall go on from it."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from train.config import Config, ConfigError

DECISIVE = ("model", "data", "optim", "trainer")  # groups of settings that decide what is trained
FIXED = ("model.", "data.mask_documents")  # of these, what parameters mean
FREE = (
    *("data.path", "optim.warmup_steps"),  # compared as the corpus; kept
    *("trainer.steps", "trainer.seed", "trainer.device", "trainer.compile", "trainer.resume", "trainer.peak_tflops"),
    *("trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.log_every"),
    *("trainer.sample_tokens", "trainer.sample_prompt"),
)

Changes = dict[str, tuple[Any, Any]]  # settings that are not as they were, by name: (then, now)


def differences(path: Path, meta: dict[str, Any], config: Config) -> str:
    """What the checkpoint at `path`, with this `meta`, was trained with and is not to be trained with; "" if all is the same.

    Raises:
        ConfigError: another model; or steps that are all done already, with other settings.
    """
    changed = _changes(meta["config"], json.loads(json.dumps(asdict(config))))
    if fixed := [name for name in changed if name.startswith(FIXED)]:
        raise ConfigError(
            f"{path} was trained with {_listed(changed, fixed)}: resume with the same, or give the run another name"
        )
    if changed and meta["step"] >= config.trainer.steps:
        raise ConfigError(
            f"{path} has done all {meta['step']} steps, with {_listed(changed, changed)}: give the run another name, or raise "
            "trainer.steps"
        )
    return _listed(changed, changed)


def _changes(then: dict[str, Any], now: dict[str, Any]) -> Changes:
    pairs = {
        f"{group}.{name}": (value, now[group][name])
        for group in DECISIVE
        for name, value in then[group].items()
        if name in now[group]
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in FREE}


def _listed(changed: Changes, names: Iterable[str]) -> str:
    return ", ".join(f"{name}={changed[name][0]} (now {changed[name][1]})" for name in names)
