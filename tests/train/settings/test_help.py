"""Tests of the text of `train/run.py --help`."""

import dataclasses
import logging
import os
import re
import sys
from unittest.mock import Mock

import pytest

from ringattn.train.commands import messages, run
from ringattn.train.commands.run import CONFIGS
from ringattn.train.settings import help as help_text
from ringattn.train.settings.config import Config

GROUPS = {
    path.name: sorted(file.stem for file in path.glob("*.yaml")) for path in CONFIGS.iterdir() if any(path.glob("*.yaml"))
}


@pytest.fixture
def show_help(run_command_line, capfd):
    """A function that returns the output of --help after the given arguments."""

    def run_help(*arguments: str) -> str:
        capfd.readouterr()
        assert run_command_line(*arguments, "--help") == 0
        output = capfd.readouterr()
        assert output.err == ""
        return output.out

    return run_help


def test_help_lists_every_group_with_its_files(show_help, tmp_path):
    output = show_help()
    assert "model" in GROUPS
    assert [f"{name}: {', '.join(files)}" for name, files in GROUPS.items()] == [
        text for name in GROUPS for text in output.splitlines() if text.startswith(f"{name}: ")
    ]
    assert not (tmp_path / "outputs").exists()


def test_help_explains_the_common_settings_in_one_line_each(show_help):
    """Every line has the value that the command line gives to the setting."""
    lines = re.findall(
        r"^([a-z][\w.]*)=(\S*) +(\S.*)\.$", show_help("trainer.steps=7", "name=a$b", "experiment=124m-64k"), re.MULTILINE
    )
    assert tuple(name for name, _, _ in lines) == help_text.COMMON
    values, texts = ({line[0]: line[i] for line in lines} for i in (1, 2))
    assert (values["trainer.steps"], values["name"], values["data.seq_len"], values["optim.lr"]) == (
        "7",
        "a$b",
        "65536",
        "null",
    )
    assert texts["trainer.steps"] == "The number of optimizer steps of the whole run"


def test_help_fits_on_two_screens_and_names_the_other_commands(show_help):
    output = show_help()
    assert len(output.splitlines()) <= 50
    assert max(map(len, output.splitlines())) <= 140
    for path in re.findall(r"(?:train|docs)/\w+\.\w+", output):
        assert (CONFIGS.parent / path).exists(), path
    assert {"train/run.py", "train/generate.py", "train/evaluate.py", "train/export.py", "docs/settings.md"} <= set(
        output.replace(":", " ").split()
    )


def test_reader_of_the_help_may_exit(run_command_line, capfd, monkeypatch):
    """After `train/run.py --help | head`, there is no message about a broken pipe."""
    monkeypatch.setattr(run.hydra, "main", lambda **settings: lambda run_job: Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(sys, "stdout", Mock(flush=Mock(side_effect=BrokenPipeError)))
    monkeypatch.setattr(logging, "shutdown", Mock())  # It would close the log of pytest.
    monkeypatch.setattr(os, "_exit", exit_process := Mock())
    messages.exit_process(run_command_line("--help"))
    assert exit_process.call_args.args == (1,)
    assert capfd.readouterr().err == ""


def test_every_setting_has_an_explanation():
    for group in dataclasses.fields(Config):
        if dataclasses.is_dataclass(group.type):
            texts = help_text.explanations(group.type)
            assert [name for name in texts if texts[name]] == [field.name for field in dataclasses.fields(group.type)]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "null"), (True, "true"), ((0.9, 0.95), "[0.9,0.95]"), ("def ", "'def '"), (1e-5, "1e-05")]
)
def test_values_are_written_as_on_the_command_line(value, text):
    assert help_text.as_yaml(value) == text
