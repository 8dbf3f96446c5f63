"""The ring benchmark's report on messages: computed by hand for a small case, and combined with measured times."""

import pytest

from ringattn.planning.cost_model import interconnect
from scripts.bench import ring as bench_ring
from scripts.bench.cases import Case
from scripts.bench.ring import add_communication, count_messages
from scripts.bench.ring_variants import is_ring

NVLINK = interconnect("nvlink")
SMALL = Case("causal", 16, heads=2, head_dim=128, key_heads=1)


@pytest.mark.parametrize(
    ("schedule", "forward", "both"),
    [
        # A row of k and v has 512 bytes, and a row of dk and dv has 1,024.
        ("kv", max(4 * 512, 8 * 512), max(4 * 512 + 4 * 512 + 8 * 1024, 8 * 512 + 8 * 512 + 4 * 1024)),
        # A row of q has 512 bytes, of (m, l, o) 1,040, of (q, dout, lse, delta) 1,040, and of dq 1,024.
        (
            "state",
            max(4 * 512 + 8 * 1040, 8 * 512 + 4 * 1040),
            max(4 * 512 + 8 * 1040 + 4 * 1040 + 8 * 1024, 8 * 512 + 4 * 1040 + 8 * 1040 + 4 * 1024),
        ),
    ],
)
def test_messages_of_two_ranks(schedule: str, forward: int, both: int) -> None:
    """Rank 0 has the positions 0-3 and 12-15, and rank 1 has those between.

    Only the first four keys and the last four queries of rank 0 interact with rank 1, but all eight of rank 1 interact with
    rank 0. If results return to their owners, the step in between has no message.
    """
    hops = {"kv": (1, 3), "state": (2, 4)}[schedule]
    assert count_messages(SMALL, schedule, 2, NVLINK) == {
        "forward": {"schedule": schedule, "hops": hops[0], "bytes_sent": forward},
        "both": {"schedule": f"{schedule} / {schedule}", "hops": hops[1], "bytes_sent": both},
    }


def test_automatic_schedule_is_the_one_that_would_run() -> None:
    """With one key head for 32 query heads, the KV ring moves far fewer bytes. A relayed result takes one more hop."""
    case = Case("causal", 2**13, heads=32, head_dim=128, key_heads=1)
    network = interconnect("nccl", one_host=False)
    direct, relayed = (count_messages(case, "auto", 4, connection) for connection in (NVLINK, network))
    assert direct == count_messages(case, "kv", 4, NVLINK)
    assert (direct["forward"]["hops"], direct["both"]["hops"]) == (3, 3 + 5)
    assert relayed["both"]["schedule"] == "kv / kv"
    assert relayed["forward"]["hops"] == 3


def test_exposed_time_is_relative_to_the_same_without_communication() -> None:
    def row(forward: float, both: float) -> dict:
        return {"forward": {"ms": forward}, "both": {"ms": both}}

    found = {
        "local": row(1.0, 4.0),
        "nvlink-kv": row(1.5, 3.75),
        "nvlink-auto-graph": row(1.0, 4.0),
        "p2p-kv": {"errors": {"out": 1.0}},
    }
    interconnects = {variant: NVLINK for variant in found if is_ring(variant)}
    add_communication(SMALL, found, 2, interconnects)
    exposed = {variant: [part.get("exposed_us") for part in found[variant].values()] for variant in interconnects}
    assert exposed == {"nvlink-kv": [500.0, -250.0], "nvlink-auto-graph": [None, None], "p2p-kv": [None]}
    assert found["nvlink-auto-graph"]["both"]["hops"] > 0  # there is no local-graph to compare with
    assert found["local"] == row(1.0, 4.0)
    assert found["p2p-kv"] == {"errors": {"out": 1.0}}


def test_number_of_rounds_must_be_positive() -> None:
    with pytest.raises(SystemExit):
        bench_ring.parse(["--rounds", "0"])
