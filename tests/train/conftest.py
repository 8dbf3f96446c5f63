"""Fixtures for tests that run the training command in this process."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pytest
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.types import RunMode
from matplotlib.figure import Figure

from ringattn.train import setup as run_setup
from ringattn.train.commands import run
from tests.processes import save_blank_picture
from tests.train.launch import write_corpus


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The value of data.path for a small corpus. The test runs in its temporary directory, with a cache of its own."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    # Hydra replaces the handlers of the root logger and changes its level.
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    level = root.level
    yield write_corpus(tmp_path / "corpus")
    root.setLevel(level)


@pytest.fixture
def blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save blank pictures."""
    monkeypatch.setattr(Figure, "savefig", save_blank_picture)


@pytest.fixture
def run_command_line(corpus: str, blank_pictures: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """A function that runs the training command with its arguments, in this process, and returns the exit status."""

    # Hydra composes the settings a first time to find out whether an experiment is a sweep.
    get_mode = Hydra.get_mode

    def mode_of_experiment(hydra: Hydra, config_name: str, overrides: list[str]) -> RunMode | None:
        is_experiment = any("experiment=" in each or each.startswith("hydra.") for each in overrides)
        return get_mode(hydra, config_name, overrides) if is_experiment else None

    monkeypatch.setattr(Hydra, "get_mode", mode_of_experiment)

    # Every launch stores the same schema.
    store_config = ConfigStore.store

    def store_once(store: ConfigStore, name: str, node: object, **options: object) -> None:
        if options or f"{name}.yaml" not in store.repo:
            store_config(store, name, node, **options)

    monkeypatch.setattr(ConfigStore, "store", store_once)
    # A collection of all objects takes long in this process, which has imported many packages.
    monkeypatch.setattr(run_setup, "_free_memory", lambda device: None)

    def run_arguments(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train/run.py", *arguments])
        return run.run_command_line()

    return run_arguments


@pytest.fixture
def only_error(capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """A function that returns the error that has been printed since the last call, and checks that it is a single line."""

    def read_error() -> str:
        output = capfd.readouterr().err
        errors = [text for text in output.splitlines() if text.startswith("error: ")]
        assert len(errors) == 1, output
        assert "Traceback" not in output, output
        return errors[0]

    return read_error
