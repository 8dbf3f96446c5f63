"""Fresh memory is filled with NaN in these tests, so that an element nobody wrote shows."""

import pytest
import torch


def _poisoned(allocate):
    def wrapper(*args, **kwargs):
        x = allocate(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x

    return wrapper


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
