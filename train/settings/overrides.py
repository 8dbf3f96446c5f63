"""Check the command line for mistakes that Hydra does not report, or reports in several lines."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ringattn.train.settings.config import Config, ConfigError

# File systems limit names to 255 bytes, and some file names are a run's name with a suffix.
MAX_NAME_BYTES = 200

# The settings that are paths.
PATHS = ("trainer.resume", "trainer.init_from", "data.path", "data.eval_path", "data.tokenizer", "hydra.run.dir")


def quote_paths(arguments: Iterable[str]) -> list[str]:
    """Quote paths that Hydra could not read, such as seq_len=64,lr=0.1.

    In a sweep, the value of a path setting may be a list of paths. Values that begin with a quote are not changed.
    """
    arguments = list(arguments)
    is_sweep = not {"-m", "--multirun"}.isdisjoint(arguments)
    return [_quote_path(argument, is_sweep) for argument in arguments]


def _quote_path(argument: str, is_sweep: bool) -> str:
    name, _, value = argument.partition("=")
    if name.lstrip("+") not in PATHS or value.startswith(("'", '"')):
        return argument

    def exists(path: str) -> bool:
        return os.path.exists(os.path.expanduser(path))

    def quote(path: str) -> str:
        with suppress(HydraException):
            if OverridesParser.create().parse_override(f"{name}={path}").value() == path:
                return path  # In a sweep, quotes would become part of the directory names of jobs.
        return '"' + path.replace('"', '\\"') + '"' if "=" in path or exists(path) else path

    return f"{name}={','.join(map(quote, value.split(',') if is_sweep and not exists(value) else [value]))}"


def options_first(arguments: Iterable[str]) -> list[str]:
    """Sort the arguments, because Hydra rejects an option such as `-m` between overrides."""
    return sorted(arguments, key=lambda argument: not argument.startswith("-") and ("=" in argument or argument[:1] in "~+"))


def check_options() -> None:
    """Check the options of the command line, such as `--cfg`. Hydra's parser would print a usage text and exit.

    Raises:
        ConfigError: an option is unknown, or its value is invalid.
    """

    def raise_error(message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --hydra-help for the options")

    parser: Any = get_args_parser()
    parser.error = raise_error
    parser.parse_args()


def check_overrides(overrides: Iterable[str]) -> None:
    """Check the overrides of one job for mistakes that are not visible in the composed settings.

    Raises:
        ConfigError: an override deletes settings, or sets a boolean setting to a number other than 0 and 1.
    """
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        if override.is_delete():
            raise ConfigError(f"~{key} deletes settings that every run needs: remove this override, or set {key} to a value")
        group, _, option = key.partition(".")
        # OmegaConf converts any nonzero number to true.
        settings = getattr(Config(), group, None)
        kinds = {field.name: field.type for field in fields(settings)} if is_dataclass(settings) else {}
        if "bool" in str(kinds.get(option)) and isinstance(value, int) and value not in (0, 1):
            raise ConfigError(f"{key}={value}: must be true or false")


def checked_name(name: str | int | None) -> str:
    """Check that a directory under `outputs/` can have the name of a run, and return the name.

    Raises:
        ConfigError: the name is empty, is not a single component of a path, or is too long.
    """
    if not name:
        given = "null" if name is None else name
        raise ConfigError(f"name={given} gives the run no directory: set a name, or leave it out to use the time of the launch")
    name = str(name)
    if "/" in name or name in (".", "..") or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise ConfigError(
            f"name={name:.60} must be at most {MAX_NAME_BYTES} bytes, without slashes and control characters, and "
            "neither . nor ..; set hydra.run.dir, or hydra.sweep.dir for a sweep, to write to another location"
        )
    return name
