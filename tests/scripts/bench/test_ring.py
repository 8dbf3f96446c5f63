"""What the ring benchmark says of messages: by hand at a small case, and beside the times of the same run."""

from types import SimpleNamespace

import pytest
import torch

from ringattn.planning import rank_plan
from ringattn.planning.cost_model import interconnect
from ringattn.ring import Ring
from scripts.bench import ring as bench_ring
from scripts.bench.ring import RingCase, Standstill, add_communication, messages

NVLINK = interconnect("nvlink")
SMALL = RingCase("causal", 16, heads=2, key_heads=1)


@pytest.mark.parametrize(
    "schedule, forward, both",
    (
        # a row of k, v has 512 bytes, of dk, dv 1,024
        ("kv", max(4 * 512, 8 * 512), max(4 * 512 + 4 * 512 + 8 * 1024, 8 * 512 + 8 * 512 + 4 * 1024)),
        # a row of q has 512 bytes, of m, l, o 1,040; of q, dout, lse, delta 1,040, of dq 1,024
        (
            "state",
            max(4 * 512 + 8 * 1040, 8 * 512 + 4 * 1040),
            max(4 * 512 + 8 * 1040 + 4 * 1040 + 8 * 1024, 8 * 512 + 4 * 1040 + 8 * 1040 + 4 * 1024),
        ),
    ),
)
def test_two_ranks_by_hand(schedule: str, forward: int, both: int) -> None:
    """Rank 0 holds positions 0-3 and 12-15, rank 1 those between.

    Of rank 0 only the first four keys, or the last four queries, have anything to do at rank 1; of rank 1 all eight. Where
    results come home, the step between has no message.
    """
    hops = {"kv": (1, 3), "state": (2, 4)}[schedule]
    assert messages(SMALL, schedule, 2, NVLINK) == {
        "forward": {"schedule": schedule, "hops": hops[0], "bytes_sent": forward},
        "both": {"schedule": f"{schedule} / {schedule}", "hops": hops[1], "bytes_sent": both},
    }


def test_auto_is_what_would_be_chosen() -> None:
    """With one key head for 32 query heads keys are by far the lighter; a relay takes as many hops, and results one more."""
    case = RingCase("causal", 2**13, heads=32, key_heads=1)
    direct, relayed = (messages(case, "auto", 4, joined) for joined in (NVLINK, interconnect("nccl", one_host=False)))
    assert direct == messages(case, "kv", 4, NVLINK)
    assert (direct["forward"]["hops"], direct["both"]["hops"]) == (3, 3 + 5)
    assert relayed["both"]["schedule"] == "kv / kv" and relayed["forward"]["hops"] == 3


def test_exposed_is_measured_against_the_same_without_communication() -> None:
    def row(forward: float, both: float) -> dict:
        return {"forward": {"ms": forward}, "both": {"ms": both}}

    found = {
        "local": row(1.0, 4.0),
        "nvlink-kv": row(1.5, 3.75),
        "nvlink-auto-graph": row(1.0, 4.0),
        "p2p-kv": {"errors": {"out": 1.0}},
    }
    fabrics = {variant: NVLINK for variant in found if bench_ring.is_ring(variant)}
    add_communication(SMALL, found, 2, fabrics)
    exposed = {variant: [part.get("exposed_us") for part in list(found[variant].values())] for variant in fabrics}
    assert exposed == {"nvlink-kv": [500.0, -250.0], "nvlink-auto-graph": [None, None], "p2p-kv": [None]}
    assert found["nvlink-auto-graph"]["both"]["hops"] > 0  # there is no local-graph to compare with
    assert found["local"] == row(1.0, 4.0) and found["p2p-kv"] == {"errors": {"out": 1.0}}


@pytest.mark.parametrize("schedule", ("kv", "state"))
@pytest.mark.parametrize("kind, ranks", (("causal", 4), ("documents", 3)), ids=str)
def test_a_ring_without_communication(kind: str, ranks: int, schedule: str) -> None:
    """Every rank computes by itself, with visitors of as many rows as would come."""
    case = RingCase(kind, 4096, heads=2, key_heads=2)
    layout = case.layout(ranks)
    for rank in range(ranks):
        q, k, v, dout = (torch.randn(1, layout.rows(rank), 2, 128) for _ in range(4))
        line = Standstill(SimpleNamespace(rank=rank, size=ranks, interconnect=NVLINK))
        ring = Ring(rank_plan.get_plan(case.mask, layout, rank, q.device), line, 128**-0.5)
        out, lse = ring.forward(q, k, v, schedule=schedule)
        grads = ring.backward(q, k, v, out, lse, dout, schedule=schedule)
        assert all(x.shape == y.shape and x.isfinite().all() for x, y in zip((out, *grads), (q, q, k, v), strict=True))


@pytest.mark.parametrize("variant, ulysses", (("ulysses-4", 4), ("ulysses-2-local", 2), ("nvlink-auto", 1), ("local", 1)))
def test_how_many_ranks_exchange_heads(variant: str, ulysses: int) -> None:
    assert bench_ring.ulysses_of(variant) == ulysses


def test_ranks_take_what_they_can() -> None:
    assert {bench_ring.ulysses_of(variant) for variant in bench_ring.pick_variants(None, 6)} == {1, 2}
    assert bench_ring.pick_variants(["ulysses-4"], 8) == ["ulysses-4"]
    with pytest.raises(SystemExit, match="--variants ulysses-4: 6 ranks cannot be cut"):
        bench_ring.pick_variants(["local", "ulysses-4"], 6)
    with pytest.raises(SystemExit):
        bench_ring.parse(["--rounds", "0"])
