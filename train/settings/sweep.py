"""Find the settings that a sweep varies, and build the directory name of each job from their values."""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

# Longer directory names are shortened, because most file systems limit a name to 255 bytes.
MAX_LENGTH = 100


def is_job_of_sweep(directory: Path) -> bool:
    """The parent directory of a sweep's job contains multirun.yaml."""
    return (directory.parent / "multirun.yaml").exists()


def job_directory(overrides: Iterable[str], params: Mapping[str, Any] | None = None) -> str:
    """Return the name of the directory of a job, for example "seq_len=1024,lr=0.001".

    The name contains the settings that the sweep varies. Long names, and names with characters such as /, are changed and end
    in a checksum. The argument `params` is `hydra.sweeper.params`, with which a configuration file varies settings.
    """
    text = ",".join(f"{name}={value}" for name, value in varied_settings(overrides, params).items()) or "0"
    safe = re.sub(r"[^\w.=,+-]", "_", text, flags=re.ASCII)[:MAX_LENGTH]
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def varied_settings(overrides: Iterable[str], params: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Return the settings that the sweep varies, with their values in one job. Arguments as in `job_directory`.

    The names are short, such as "seq_len", unless two varied settings have the same short name.
    """
    varied = {key for key, override in _parse(params).items() if override.is_sweep_override()}
    values = {key.lstrip("+"): value for key, _, value in (override.partition("=") for override in overrides) if key in varied}
    short = Counter(key.rpartition(".")[2] for key in values)
    return {name if short[name := key.rpartition(".")[2]] == 1 else key: value for key, value in values.items()}


def varied_lengths(params: Mapping[str, Any] | None = None) -> list[int]:
    """Return the values of `data.seq_len` in the sweep that are positive integers. Jobs with other values fail."""
    override = _parse(params).get("data.seq_len")
    if override is None or not override.is_discrete_sweep():
        return []
    return [int(value) for value in override.sweep_string_iterator() if value.isdecimal() and int(value) > 0]


def jobs_of_sweep(params: Mapping[str, Any] | None = None) -> list[list[str]]:
    """The jobs are in the order in which Hydra runs them."""
    overrides = [each for key, each in _parse(params).items() if not key.startswith(("hydra.", "hydra/"))]
    return BasicSweeper.split_arguments(overrides, max_batch_size=None)[0]


def _parse(params: Mapping[str, Any] | None) -> dict[str, Override]:
    arguments = [f"{key}={value}" for key, value in (params or {}).items()]
    arguments += [argument for argument in sys.argv[1:] if "=" in argument and not argument.startswith("-")]
    return {override.get_key_element(): override for override in OverridesParser.create().parse_overrides(arguments)}
