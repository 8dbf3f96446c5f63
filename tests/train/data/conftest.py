"""A cache of its own for every test, so that no test finds tokens that another test, or the user, has left."""

import datasets
import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
