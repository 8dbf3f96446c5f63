"""Only the marks of a test decide whether it is skipped or left out."""

from collections import Counter

import pytest
import torch

from tests import conftest, worker


def test_a_folder_with_the_name_of_a_mark_changes_nothing(request, monkeypatch):
    """Pytest's `keywords` contain the names of folders. They must not skip the tests of a clone in a folder named `gpu`."""
    item: pytest.Item = request.node
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(conftest, "left_out", Counter())
    item.keywords.update({"gpu": True, "slow": True})
    worker.pytest_collection_modifyitems([item])
    conftest.pytest_deselected([item])
    assert item.get_closest_marker("skip") is None
    assert not conftest.left_out
