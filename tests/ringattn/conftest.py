"""Fixtures of the tests of ringattn."""

import pytest


@pytest.fixture(autouse=True)
def new_tensors_contain_nan(poison: None) -> None:
    """Fill new tensors with NaN in every test of this folder."""
