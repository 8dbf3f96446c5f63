"""Tests of the checks of the command line."""

import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from ringattn.train.settings.config import ConfigError
from ringattn.train.settings.overrides import (
    MAX_NAME_BYTES,
    check_options,
    check_overrides,
    checked_name,
    options_first,
    quote_paths,
)


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


@pytest.mark.parametrize("arguments", [["a=1", "-m", "b=1,2"], ["a=1", "--cfg", "job", "~b"], ["--multirun", "b=1,2"], []])
def test_options_may_be_between_overrides(arguments, monkeypatch):
    """On a GPU, recipe=gpu precedes the options of the user."""
    ordered = options_first(arguments)
    assert sorted(ordered) == sorted(arguments)
    monkeypatch.setattr(sys, "argv", ["train/run.py", *ordered])
    check_options()


def read(argument: str, *options: str) -> list[str]:
    """The values that Hydra reads from an argument."""
    *_, quoted = quote_paths([*options, argument])
    override = OverridesParser.create().parse_override(quoted)
    return list(override.sweep_string_iterator()) if override.is_sweep_override() else [override.value()]


@pytest.mark.parametrize("setting", ["trainer.resume", "+trainer.init_from", "data.tokenizer", "hydra.run.dir"])
@pytest.mark.parametrize(
    "name", ["seq_len=64", "seq_len=64,lr=0.1", "a (b)", "a[0]", "{a}", "a#b", "é", "1e5", "it's", 'a "b"', "a:b", "a!"]
)
def test_an_existing_path_needs_no_quotes(name, setting, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name / "step_1").mkdir(parents=True)
    for path in (name, f"{name}/step_1", f"{tmp_path}/{name}"):
        assert read(f"{setting}={path}") == [path]


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("trainer.resume=auto", ["auto"]),
        ("trainer.resume=missing/seq_len=64/step_1", ["missing/seq_len=64/step_1"]),
        ("trainer.resume='seq_len=64,lr=1'", ["seq_len=64,lr=1"]),
        ('trainer.init_from="seq_len=64,lr=1"', ["seq_len=64,lr=1"]),
        ("trainer.resume=missing/seq_len=64,lr=1", ["missing/seq_len=64,lr=1"]),
        ("data.path=a/*.txt", ["a/*.txt"]),
        ("data.path=lr=1/*.txt", ["lr=1/*.txt"]),
        ("trainer.init_from=null", [None]),
        ("model={layers: 1}", [{"layers": 1}]),
    ],
)
def test_other_values_are_read_as_before(argument, values):
    assert read(argument) == values


def test_a_sweep_over_paths_needs_no_quotes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    assert read("trainer.init_from=s/lr=1,s/lr=2,null", "-m") == ['"s/lr=1"', '"s/lr=2"', "null"]
    assert read("data.path=a.txt,b.txt", "-m") == ["a.txt", "b.txt"]  # The directories of the jobs have these names.
