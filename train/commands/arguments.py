"""Run generate, evaluate, export and prepare, and parse their options. This module does not import torch."""

import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict, field, fields
from typing import Any

from omegaconf import OmegaConf

from ringattn.train.commands.messages import SETTING_ERRORS, report_error, show_messages
from ringattn.train.data.workers import rank
from ringattn.train.settings.config import Config, ConfigError
from ringattn.train.settings.literal import literal_settings, to_config

# All commands accept these settings. For example, "model." means all settings of the group `model`.
SETTINGS = (
    *("model.", "parallel.", "data.tokenizer", "data.eos_token", "data.special_tokens", "trainer.device"),
    *("trainer.precision", "trainer.compile", "trainer.deterministic", "trainer.fp8_attention"),
)


def option(text: str, **default: Any) -> Any:
    """Return a dataclass field for an option of a command. The output of `--help` contains `text`."""
    return field(metadata={"help": text}, **default)


def run_program(command: Callable[[list[str]], None], options: type, doc: str | None) -> int:
    """Call `command` with the arguments of the command line, and return the exit status.

    Args:
        command: a function that may raise SETTING_ERRORS, which rank 0 reports.
        options: the dataclass of the command's options.
        doc: the first part of the command's help.
    """
    is_first = rank() == 0
    show_messages(is_first)
    try:
        if not {"-h", "--help"} & {*sys.argv[1:]}:
            command(sys.argv[1:])
        elif is_first:
            print(help_text(options, doc), flush=True)
    except SETTING_ERRORS as error:
        if is_first:
            report_error(error)
        return 1
    except BrokenPipeError:  # A program that reads the output, such as `head`, has exited.
        return 1
    return 0


def help_text(options: type, doc: str | None) -> str:
    paragraphs = [(doc or "").strip(), "Options:"]
    for each in fields(options):
        default = "required" if each.default is MISSING else f"default: {shlex.quote(str(each.default))}"
        text = textwrap.fill(each.metadata["help"], 100, initial_indent=" " * 6, subsequent_indent=" " * 6)
        paragraphs.append(f"  {each.name}=...  ({default})\n{text}")
    return "\n\n".join(paragraphs)


def parse(arguments: list[str], options: type, settings: tuple[str, ...] = ()) -> tuple[Any, dict[str, str]]:
    """Split a command line into the options of the command and the overrides of settings, by name.

    `settings` names the settings that the command accepts in addition to SETTINGS.

    Raises:
        ConfigError: an argument lacks `=`, has an unknown name or a wrong type, or a required option is missing.
    """
    types = {each.name: each.type for each in fields(options)}
    values, overrides = dict[str, Any](), dict[str, str]()
    for argument in arguments:
        name, separator, value = argument.partition("=")
        if not separator:
            raise ConfigError(f"{argument} is not of the form name=value: see --help")
        if name in types:
            values[name] = _convert(name, value, types[name])
        elif name.startswith((*SETTINGS, *settings)):
            overrides["data.source" if name == "data" else name] = value
        else:
            known = ", ".join([*types, *(f"{each}*" if each.endswith(".") else each for each in (*SETTINGS, *settings))])
            raise ConfigError(f"unknown option {name}: choose one of {known}")
    for each in fields(options):
        if each.default is MISSING and not values.get(each.name):
            raise ConfigError(f"{each.name}=... is required: see --help")
    return options(**values), overrides


def _convert(name: str, value: str, kind: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        required = {int: "an integer", float: "a number"}[kind]
        raise ConfigError(f"{name}={value}: must be {required}") from None


def apply_overrides(config: Config, overrides: dict[str, str]) -> Config:
    settings = literal_settings(asdict(config))
    for name, value in overrides.items():
        is_list = name in ("model.layer_types", "model.rope_factors")
        OmegaConf.update(settings, name, None if value == "null" else value.strip("[]").split(",") if is_list else value)
    return to_config(settings)


def settings_by_length(config: Config, overrides: dict[str, str], default: Iterable[int]) -> list[Config]:
    """Return the settings for each length in the override `data.seq_len`, or in `default`. Apply the other overrides."""
    lengths = overrides.get("data.seq_len", ",".join(map(str, default))).split(",")
    return [apply_overrides(config, overrides | {"data.seq_len": length}) for length in lengths]
