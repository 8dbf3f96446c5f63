"""Tests of the checks of the command line."""

import sys

import pytest

from ringattn.train.config import ConfigError
from ringattn.train.overrides import MAX_NAME_BYTES, check_options, check_overrides, checked_name


@pytest.mark.parametrize("override", ["~model", "~trainer.steps", "model.qkv_bias=2", "data.mask_documents=-1"])
def test_overrides_without_meaning_are_errors(override):
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        check_overrides(["name=a", override])


@pytest.mark.parametrize(
    "override",
    ["model=8b", "model.qkv_bias=1", "model.qkv_bias=true", "trainer.steps=2", "data.column=${a}", "+x.y=1"],
)
def test_other_overrides_are_valid(override):
    check_overrides([override])


@pytest.mark.parametrize("name", ["", None, ".", "..", "/", "a/b", "../x", "a\n", "\x1b[0m", "é" * MAX_NAME_BYTES])
def test_names_that_are_not_one_component_of_a_path_are_errors(name):
    with pytest.raises(ConfigError, match="name="):
        checked_name(name)


@pytest.mark.parametrize("name", ["a", "2026-01-01_00-00-00", "long run (2)", ".hidden", "é", 7, "a" * MAX_NAME_BYTES])
def test_other_names_are_valid(name):
    assert checked_name(name) == str(name)


@pytest.mark.parametrize("options", [["--nonsense"], ["-m", "--cfg"], ["--cfg", "nothing"]])
def test_unknown_options_are_errors(options, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train/run.py", *options])
    with pytest.raises(ConfigError, match="--hydra-help"):
        check_options()


@pytest.mark.parametrize("options", [[], ["-m", "trainer.steps=1,2"], ["--cfg", "job", "--resolve"], ["--help"]])
def test_options_of_hydra_are_valid(options, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train/run.py", *options])
    check_options()
