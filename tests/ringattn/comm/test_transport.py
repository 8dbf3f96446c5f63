"""Tests of the passes of transports that exchange single tensors, and of the errors that a missing rank causes."""

import pytest
import torch

from ringattn import simulate
from ringattn.comm.transport import MAX_KEPT_RESULTS, complete_hop, report_faults, take_rows
from ringattn.comm.watchdog import NoWatchdog, RingFault
from ringattn.planning.schedule import direct, relay


class Watchdog(NoWatchdog):
    """Records finished hops and turns every error into a fault."""

    def __init__(self) -> None:
        self.log: list[object] = []

    def finished(self, hop: object) -> None:
        self.log.append(hop)

    def fault(self, hop: object) -> RingFault:
        return RingFault(f"rank 1 does not respond in {hop}")


class Transport:
    """A transport with a watchdog."""

    def __init__(self) -> None:
        self.watchdog = Watchdog()


def test_take_rows_returns_views() -> None:
    """Rows are dimension 1. A block with that many rows is returned as it is."""
    x = torch.arange(12.0).view(2, 6)
    (rows,) = take_rows((x,), range(2, 4))
    assert rows.tolist() == [[2.0, 3.0], [8.0, 9.0]] and rows.data_ptr() == x[:, 2:].data_ptr()
    assert take_rows((x,), range(10, 16))[0] is x


def test_an_error_of_the_network_names_the_missing_rank() -> None:
    """The original error is the cause of the RingFault."""

    def lose_connection() -> None:
        raise RuntimeError("connection reset")

    with pytest.raises(RingFault, match="rank 1 does not respond in hop 3") as fault:
        report_faults(lose_connection, Transport(), "hop 3")
    assert "connection reset" in str(fault.value.__cause__)


def test_running_out_of_memory_is_not_a_fault_of_a_rank() -> None:
    """torch.OutOfMemoryError is a RuntimeError, but it has nothing to do with other ranks."""

    def allocate() -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        report_faults(allocate, Transport(), "hop 3")


def test_a_completed_hop_is_reported_to_the_watchdog() -> None:
    """Only a hop whose messages have arrived is finished."""
    transport = Transport()
    assert complete_hop(lambda: "blocks", transport, "hop 3") == "blocks"
    assert transport.watchdog.log == ["hop 3"]


@pytest.mark.parametrize("build", (direct, relay))
def test_a_pass_moves_the_scheduled_rows(build) -> None:
    """Every rank receives the rows that its schedule names, for every kind of message."""
    ranks = 3
    schedule = build(((range(4),) * ranks,) * ranks, True)

    def run(rank: int, group) -> None:
        block = torch.full((1, 4, 2), float(rank))
        ring_pass = group.begin(schedule, {"block": (block,), "result": (block[..., :1],)})
        held: dict[int, torch.Tensor] = {rank: block}
        for t, step in enumerate(schedule.by_rank[rank]):
            blocks = [held[m.owner] if m.kind == "block" else torch.full((1, 4, 1), 10.0 + m.owner) for m in step.outgoing]
            wait = ring_pass.exchange(t, [(x,) for x in blocks])
            for message, (received,) in zip(step.incoming, wait(), strict=True):
                assert received.shape == (1, len(message.rows), 2 if message.kind == "block" else 1)
                assert (received == message.owner + (0 if message.kind == "block" else 10)).all()
                if message.kind == "block":
                    held[message.owner] = received
        ring_pass.end()

    simulate(ranks, run)


@pytest.mark.parametrize("ranks, keeps", ((MAX_KEPT_RESULTS + 1, True), (MAX_KEPT_RESULTS + 2, False)))
def test_few_results_are_kept_until_the_end(ranks: int, keeps: bool) -> None:
    """A rank of a direct pass receives one result from every other rank."""
    schedule = direct(((range(4),) * ranks,) * ranks, True)
    x = torch.zeros(1, 4, 1)
    found = simulate(ranks, lambda rank, group: group.begin(schedule, {"block": (x,), "result": (x,)}).keeps_results)
    assert found == [keeps] * ranks
