"""Name the directory of each job of a sweep by the values that the sweep varies."""

import hashlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

# A longer name of a directory is cut, because most file systems limit a name to 255 bytes.
MAX_LENGTH = 100


def is_job_of_sweep(directory: Path) -> bool:
    """Return whether `directory` is the directory of a job of a sweep.

    Hydra writes the file multirun.yaml to the directory that contains the directories of all jobs.
    """
    return (directory.parent / "multirun.yaml").exists()


def job_directory(overrides: Iterable[str], params: Mapping[str, Any] | None = None) -> str:
    """Return the name of the directory of a job, for example "seq_len=1024,lr=0.001".

    The name consists of the settings that the sweep varies. The same settings therefore always have the same directory. A
    setting has its short name, unless the sweep varies another setting with the same short name. If some characters must not
    occur in a name, or if the name is too long, a checksum of the settings follows the name.

    Args:
        overrides: all overrides of the job. Each override has a single value.
        params: the values of `hydra.sweeper.params`, which a configuration file may vary in addition to the command line.
    """
    varied = _varied_keys(params or {})
    values = {key.lstrip("+"): value for key, _, value in (override.partition("=") for override in overrides) if key in varied}
    short = Counter(key.rpartition(".")[2] for key in values)
    names = {key: name if short[name := key.rpartition(".")[2]] == 1 else key for key in values}
    text = ",".join(f"{names[key]}={value}" for key, value in values.items()) or "0"
    safe = re.sub(r"[^\w.=,+-]", "_", text, flags=re.ASCII)[:MAX_LENGTH]
    # Two different texts may have the same safe characters. The checksum distinguishes them.
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _varied_keys(params: Mapping[str, Any]) -> set[str]:
    """Return the names of the settings that the sweep varies. The command line has precedence over `params`."""
    arguments = [f"{key}={value}" for key, value in params.items()]
    arguments += [argument for argument in sys.argv[1:] if "=" in argument and not argument.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(arguments)
    is_varied = {override.get_key_element(): override.is_sweep_override() for override in parsed}
    return {key for key in is_varied if is_varied[key]}
