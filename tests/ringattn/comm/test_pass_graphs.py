"""Test when passes are captured. `test_gpus.py` compares replays with passes that are not captured."""

import gc
from types import SimpleNamespace

import pytest
import torch

from ringattn import Layout, Mask
from ringattn.comm import pass_graphs
from ringattn.comm.p2p import SingleRankTransport
from ringattn.comm.pass_graphs import PassGraphs
from ringattn.planning.rank_plan import get_plan
from ringattn.ring import Ring
from ringattn.spec import AttentionSpec


def can_capture(tokens: int, window: int | None = None, graphs: object = True, **options: object) -> bool:
    """Whether passes with this many tokens per rank are captured, on eight ranks with 16 heads of 128 dims in bf16."""
    mask, layout = Mask.causal(window=window), Layout.zigzag(8 * tokens, 8)
    spec = AttentionSpec.create(mask, layout, scale=1.0, **options)
    plan = get_plan(mask, layout, 0, torch.device("cpu"))
    q = torch.empty(1, tokens, 16, 128, dtype=torch.bfloat16, device="meta")
    return Ring(plan, SimpleNamespace(graphs=graphs), spec).can_capture(q, q, q)


def test_only_short_shards_are_captured() -> None:
    assert can_capture(3072)
    assert not can_capture(4096), "too many FLOPs"
    assert can_capture(4096, window=256)
    assert not can_capture(8192, window=256), "too many bytes"
    assert not can_capture(1024, dropout_p=0.1)
    assert not can_capture(1024, graphs=None)


class Plan:
    """A plan, which is compared by identity."""


class Captured:
    """A captured pass that computes its results when it is replayed."""

    def __init__(self, function, inputs) -> None:
        self.function = function

    def replay(self, inputs):
        return ("replayed", *self.function(*inputs))


def identity(*inputs):
    return inputs


TRANSPORT = SingleRankTransport()


@pytest.fixture
def graphs(monkeypatch) -> PassGraphs:
    monkeypatch.setattr(pass_graphs, "CapturedPass", Captured)
    monkeypatch.setattr(pass_graphs, "CALLS_BEFORE_CAPTURE", 2)
    return PassGraphs(TRANSPORT)


def is_replayed(graphs: PassGraphs, plan: Plan, *inputs, settings: tuple = ()) -> bool:
    return graphs.run(plan, settings, identity, inputs)[0] == "replayed"


def test_equal_passes_are_replayed_after_some_calls(graphs: PassGraphs) -> None:
    plan, x = Plan(), torch.zeros(2)
    assert [is_replayed(graphs, plan, x, None) for _ in range(4)] == [False, False, True, True]
    # Different passes are counted separately.
    assert not is_replayed(graphs, plan, x, x)
    assert not is_replayed(graphs, plan, torch.zeros(3), None)
    assert not is_replayed(graphs, plan, x.double(), None)
    assert not is_replayed(graphs, plan, x, None, settings=("backward",))
    assert not is_replayed(graphs, Plan(), x, None)
    torch.use_deterministic_algorithms(True)
    try:
        assert not is_replayed(graphs, plan, x, None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert is_replayed(graphs, plan, x, None)


def test_graphs_are_freed(graphs: PassGraphs) -> None:
    """A graph is freed with its plan, and `clear` restarts the count of all passes."""
    plan = Plan()
    for _ in range(3):
        replayed = is_replayed(graphs, plan, None)
    assert replayed
    graphs.clear()
    assert not is_replayed(graphs, plan, None)
    del plan
    gc.collect()
    assert not graphs._by_plan


def test_a_pass_that_cannot_be_captured_is_never_tried_again(graphs: PassGraphs, monkeypatch, caplog) -> None:
    def fail(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(pass_graphs, "CapturedPass", fail)
    plan = Plan()
    assert not any(is_replayed(graphs, plan, None) for _ in range(9))
    assert caplog.text.count("cannot be captured") == 1
