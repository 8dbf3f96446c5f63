"""A cache of its own for every test, so that no test finds tokens that another test, or the user, has left."""

from collections.abc import Iterator

import datasets
import pytest

from tests.train.jobs import one_rank


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(autouse=True)
def only_rank() -> Iterator[None]:
    """Make this process the only rank, because all ranks load a corpus."""
    with one_rank():
        yield
