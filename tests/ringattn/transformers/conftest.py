"""A pool of two ranks, which all tests of this folder share, because importing transformers takes seconds."""

from collections.abc import Iterator

import pytest

from tests.distributed import RankPool


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(2, tmp_path_factory.mktemp("ranks"), "gloo")
    yield pool
    pool.close()
