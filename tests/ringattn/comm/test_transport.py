"""Tests of messages and of the passes that exchange messages, and of the errors that a missing rank causes."""

import numpy as np
import pytest
import torch

from ringattn import simulate
from ringattn.comm.simulated import SimulatedRank
from ringattn.comm.transport import ALIGNMENT, MAX_KEPT_RESULTS, Packing, complete_hop, report_faults, take_rows
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


def block_of(*dtypes: torch.dtype, batch: int = 1, rows: int = 5) -> tuple[torch.Tensor, ...]:
    """A block of tensors of different shapes with small whole numbers."""
    shapes = ((batch, rows, 3, 5), (batch, rows, 3), (batch, rows, 2, 3), (batch, rows, 1))
    return tuple(torch.randint(100, shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False))


def packing_of(block: tuple[torch.Tensor, ...], rows: int) -> Packing:
    """The positions of some rows of a block in a message."""
    return Packing.of(tuple((x.shape[0], x.shape[2:], x.dtype) for x in block), rows)


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize(
    "dtypes",
    (
        (torch.bfloat16, torch.bfloat16),  # k, v
        (torch.float16, torch.bfloat16, torch.float32, torch.float32),  # like q, dout, lse, delta
        (torch.float32, torch.uint8, torch.float64),
        (torch.uint8, torch.uint8, torch.uint8),  # FP8 blocks
        (torch.bfloat16,),
    ),
    ids=str,
)
def test_a_message_holds_all_tensors_of_a_block(dtypes: tuple[torch.dtype, ...], batch: int) -> None:
    """Every tensor starts at a multiple of the alignment, and slices of rows are packed like whole tensors."""
    block = take_rows(block_of(*dtypes, batch=batch), range(1, 4))
    packing = packing_of(block, 3)
    (message, views), (copy, received) = (packing.new_message(torch.device("cpu")) for _ in range(2))
    torch._foreach_copy_(views, block)
    assert message.is_contiguous() and message.nbytes == (packing.size if len(block) > 1 else block[0].nbytes)
    copy.copy_(message)
    for x, y in zip(block, received, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) and y.is_contiguous()
        assert (y.data_ptr() - copy.data_ptr()) % ALIGNMENT == 0


def test_a_received_block_is_sent_on_without_a_copy() -> None:
    """Also if its tensors have been changed in place, as the merge of a result does."""
    block = block_of(torch.float32, torch.float32)
    packing = packing_of(block, 5)
    message, received = packing.new_message(torch.device("cpu"))
    for x, y in zip(received, block, strict=True):
        x.copy_(y).add_(1)
    again = packing.packed(received)
    assert again.data_ptr() == message.data_ptr() and again.nbytes == message.nbytes
    assert packing.packed(block) is None


def test_tensors_that_only_seem_to_be_packed() -> None:
    """The addresses fit, but the tensors have separate storages, or one of them is transposed."""
    memory = np.arange(2 * ALIGNMENT, dtype=np.float32)
    halves = memory[:ALIGNMENT], memory[ALIGNMENT:]
    packed = tuple(x.view(1, 8, -1) for x in torch.from_numpy(memory).split(ALIGNMENT))
    separate = tuple(torch.from_numpy(x).view(1, 8, -1) for x in halves)
    transposed = torch.from_numpy(memory)[:ALIGNMENT].view(1, -1, 8).mT, packed[1]
    for block, is_packed in ((packed, True), (separate, False), (transposed, False)):
        message = packing_of(block, 8).packed(block)
        assert (message is not None) == is_packed
    assert torch.equal(packing_of(packed, 8).packed(packed).view(torch.float32), torch.from_numpy(memory))


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


@pytest.mark.parametrize("build", (direct, relay))
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
    assert sum(messages) == 2 * sum(len(step.messages) for step in schedule.steps) and max(messages) == 1


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
        assert len(first) == ranks - 1 and first[0] != first[1] and first[:2] == first[2:]
        # Both passes use three messages: one for the rank's own block, and two for received blocks.
        assert len(set(again)) == 2 and len({*first, *again}) <= 3 and not set(other) & {*first, *again}


@pytest.mark.parametrize("ranks, keeps", ((MAX_KEPT_RESULTS + 1, True), (MAX_KEPT_RESULTS + 2, False)))
def test_few_results_are_kept_until_the_end(ranks: int, keeps: bool) -> None:
    """A rank of a direct pass receives one result from every other rank."""
    schedule = direct(((range(4),) * ranks,) * ranks, True)
    x = torch.zeros(1, 4, 1)
    found = simulate(ranks, lambda rank, group: group.begin(schedule, {"block": (x,), "result": (x,)}).keeps_results)
    assert found == [keeps] * ranks
