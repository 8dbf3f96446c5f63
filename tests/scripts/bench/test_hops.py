"""Tests of the benchmark of single hops, on the CPU and without real measurements."""

import pytest
import torch

from ringattn.kernels import dispatch
from scripts.bench import hops


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hops, "DEVICE", torch.device("cpu"))


def test_wrong_merges_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge with wrong weights is found, because the hops have different keys."""
    problem = hops.Problem(128)
    problem.check()
    merge = dispatch.merge_states
    monkeypatch.setattr(dispatch, "merge_states", lambda own, parts, dtype: merge((own[0] + 1, *own[1:]), parts, dtype))
    with pytest.raises(SystemExit, match=hops.PASSES[1]):
        problem.check()


def test_hops_and_passes_are_compared_with_the_kv_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake times are 1 ms for the first call, 2 ms for the second, and so on."""

    def time_in_rounds(calls, rounds, use_graphs):
        for call in calls.values():
            call()
        return {key: rounds * [float(i)] for i, key in enumerate(calls, 1)}, {}

    monkeypatch.setattr(hops, "time_in_rounds", time_in_rounds)
    rows = hops.measure(128, rounds=2, use_graphs=False)
    assert [name for _, name, *_ in rows] == [*hops.HOPS, *hops.PASSES]
    assert [ratio for *_, ratio in rows] == ["0.500", "1.000", "1.500", "2.000", "1.000", "1.200"]
