"""Tests of the names of the directories of a sweep's jobs."""

import sys

import pytest

from ringattn.train.settings import sweep
from ringattn.train.settings.sweep import is_job_of_sweep, job_directory, varied_lengths, varied_settings


@pytest.fixture
def name_of(monkeypatch):
    """A function that returns the name of a job's directory. Its arguments are the command line and the job's overrides."""

    def directory(arguments: str, overrides: str, **params: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train/run.py", "-m", *arguments.split()])
        return job_directory(overrides.split(), params)

    return directory


@pytest.mark.parametrize(
    ("arguments", "overrides", "name"),
    [
        ("data.seq_len=64,128 optim.lr=0.1", "data.seq_len=64 optim.lr=0.1", "seq_len=64"),
        ("a.n=1 data.seq_len=64,128 optim.lr=0.1,0.2", "a.n=1 data.seq_len=64 optim.lr=0.2", "seq_len=64,lr=0.2"),
        ("data.seed=0,1 trainer.seed=range(3) a.b=1,2", "data.seed=0 trainer.seed=2 a.b=1", "data.seed=0,trainer.seed=2,b=1"),
        ("model=tiny,8b +a.x=1,2", "model=tiny +a.x=2", "model=tiny,x=2"),
        ("--config-name=train optim.lr=1", "optim.lr=1", "0"),
    ],
)
def test_name_consists_of_the_values_that_vary(arguments, overrides, name, name_of):
    assert name_of(arguments, overrides) == name


def test_settings_of_a_configuration_file_may_vary(name_of):
    params = {"data.seed": "0,1", "optim.lr": "0.1,0.2"}
    assert name_of("optim.lr=0.3", "data.seed=1 optim.lr=0.3", **params) == "seed=1"


def test_name_is_a_valid_path_component_for_every_value(name_of):
    values = ["a/b", "a_b", "../x", "'a b'", "[0.9,0.95]", "é"]
    names = [name_of("data.path=1,2", f"data.path={value}".replace(" ", "")) for value in values]
    assert names[1] == "path=a_b"
    assert names[0].startswith("path=a_b-")
    assert len(set(names)) == len(values)
    assert all("/" not in name and name.isascii() for name in names)


def test_long_name_is_cut_and_remains_distinct(name_of):
    names = {name_of("data.path=1,2", f"data.path={'x' * 300}{i}") for i in range(3)}
    assert len(names) == 3
    assert all(len(name) <= sweep.MAX_LENGTH + 9 for name in names)


def test_directory_of_a_job_is_below_the_file_of_the_sweep(tmp_path):
    assert not is_job_of_sweep(tmp_path / "0")
    (tmp_path / "multirun.yaml").touch()
    assert is_job_of_sweep(tmp_path / "lr=0.1")
    assert not is_job_of_sweep(tmp_path)


def test_varied_settings_have_short_names(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train/run.py", "-m", "data.seq_len=64,128", "data.seed=0,1", "trainer.seed=0,1"])
    overrides = ["data.seq_len=64", "data.seed=1", "trainer.seed=0", "optim.lr=1"]
    assert varied_settings(overrides) == {"seq_len": "64", "data.seed": "1", "trainer.seed": "0"}


@pytest.mark.parametrize(
    ("argument", "params", "lengths"),
    [
        ("data.seq_len=64,128", {}, [64, 128]),
        ("data.seq_len=range(32,97,32)", {}, [32, 64, 96]),
        ("data.seq_len=64,0,-1,x", {}, [64]),
        ("data.seq_len=64", {}, []),
        ("optim.lr=0.1,0.2", {}, []),
        ("name=a", {"data.seq_len": "8,16"}, [8, 16]),
        ("data.seq_len=64,128", {"data.seq_len": "8,16"}, [64, 128]),
        ("data.seq_len=64", {"data.seq_len": "8,16"}, []),
    ],
)
def test_lengths_of_a_sweep(argument, params, lengths, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train/run.py", "-m", argument])
    assert varied_lengths(params) == lengths
