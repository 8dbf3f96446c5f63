"""Tests of the passes that exchange messages, and of the errors that a missing rank causes."""

import threading

import pytest
import torch

from ringattn import simulate
from ringattn.comm import connect
from ringattn.comm.simulated import SimulatedRank
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
    """Rows are in dimension 1. A block with that many rows is returned unchanged."""
    x = torch.arange(12.0).view(2, 6)
    (rows,) = take_rows((x,), range(2, 4))
    assert rows.tolist() == [[2.0, 3.0], [8.0, 9.0]]
    assert rows.data_ptr() == x[:, 2:].data_ptr()
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


@pytest.mark.parametrize("build", [direct, relay])
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


@pytest.mark.parametrize("build", [direct, relay])
def test_a_block_is_one_message_and_is_packed_once(build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hop sends one message per block, and a pass copies this rank's own block once, however often it is sent."""
    ranks, packed, sent = 4, [], []
    schedule = build(((range(4),) * ranks,) * ranks, False)
    exchange, copy = SimulatedRank.exchange, torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *arguments: packed.append(1) or copy(*arguments))
    monkeypatch.setattr(SimulatedRank, "exchange", lambda rank, *messages: sent.append(messages) or exchange(rank, *messages))

    def run(rank: int, group: SimulatedRank) -> None:
        block = torch.full((1, 4, 2), float(rank)), torch.full((1, 4, 1), 10.0 + rank)
        ring_pass, held = group.begin(schedule, {"block": block, "result": ()}), {rank: block}
        for t, step in enumerate(schedule.by_rank[rank]):
            arrived = ring_pass.exchange(t, [held[m.owner] for m in step.outgoing])()
            held = {rank: block} | {m.owner: received for m, received in zip(step.incoming, arrived, strict=True)}
            assert all((x == owner).all() and (y == 10 + owner).all() for owner, (x, y) in held.items())

    simulate(ranks, run)
    assert len(packed) == ranks
    messages = [len(x) for exchanged in sent for x in exchanged]
    assert sum(messages) == 2 * sum(len(step.messages) for step in schedule.steps)
    assert max(messages) == 1


def test_passes_use_the_same_memory_in_turn() -> None:
    """A pass holds the blocks of two steps. The next pass uses the same memory, unless its shapes differ."""
    ranks = 5
    schedule = relay(((range(4),) * ranks,) * ranks, False)

    def run(rank: int, group: SimulatedRank, width: int) -> list[int]:
        block = torch.full((1, 4, width), float(rank)), torch.full((1, 4, 1), 10.0 + rank)
        ring_pass, held, addresses = group.begin(schedule, {"block": block, "result": ()}), {rank: block}, []
        for t, step in enumerate(schedule.by_rank[rank]):
            wait = ring_pass.exchange(t, [held[m.owner] for m in step.outgoing])
            assert all((x == owner).all() and (y == 10 + owner).all() for owner, (x, y) in held.items())
            held = {m.owner: received for m, received in zip(step.incoming, wait(), strict=True)}
            addresses += [x.data_ptr() for x, _ in held.values()]
        ring_pass.end()
        return addresses

    for first, again, other in simulate(ranks, lambda rank, group: [run(rank, group, width) for width in (2, 2, 99)]):
        assert len(first) == ranks - 1
        assert first[0] != first[1]
        assert first[:2] == first[2:]
        # Both passes use three messages: one for the rank's own block, and two for received blocks.
        assert len(set(again)) == 2
        assert len({*first, *again}) <= 3
        assert not set(other) & {*first, *again}


def test_the_memory_of_messages_can_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of a sweep would otherwise keep the messages of the job before it."""
    schedule = relay(((range(4),) * 2,) * 2, False)

    def run(rank: int, group: SimulatedRank) -> None:
        block = torch.zeros(1, 4, 2), torch.zeros(1, 4, 1)
        ring_pass, held = group.begin(schedule, {"block": block, "result": ()}), {rank: block}
        for t, step in enumerate(schedule.by_rank[rank]):
            arrived = ring_pass.exchange(t, [held[m.owner] for m in step.outgoing])()
            held |= {m.owner: received for m, received in zip(step.incoming, arrived, strict=True)}
        ring_pass.end()
        assert group._spare[2]
        with lock:
            monkeypatch.setattr(connect, "_connections", {"key": (None, group)})
            connect.free_messages()
        assert not group._spare[2]

    lock = threading.Lock()
    simulate(2, run)


@pytest.mark.parametrize(("ranks", "keeps"), [(MAX_KEPT_RESULTS + 1, True), (MAX_KEPT_RESULTS + 2, False)])
def test_few_results_are_kept_until_the_end(ranks: int, keeps: bool) -> None:
    """A rank of a direct pass receives one result from every other rank."""
    schedule = direct(((range(4),) * ranks,) * ranks, True)
    x = torch.zeros(1, 4, 1)
    found = simulate(ranks, lambda rank, group: group.begin(schedule, {"block": (x,), "result": (x,)}).keeps_results)
    assert found == [keeps] * ranks
