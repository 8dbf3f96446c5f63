"""Fresh memory is filled with NaN in these tests, so that an element nobody wrote shows."""

import pytest


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(poison: None) -> None:
    """In every test of this folder."""
