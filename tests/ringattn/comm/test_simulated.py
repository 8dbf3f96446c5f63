"""Tests of simulated rings: messages, and ranks that fail."""

import pytest
import torch

from ringattn import Layout, Mask, ring_attention, simulate


def attend(rank: int, group: object) -> torch.Tensor:
    """One call of a ring of three ranks, in which every rank waits for messages of the others."""
    layout = Layout.contiguous(9, 3)
    q = torch.ones(1, layout.rows(rank), 1, 8)
    return ring_attention(q, q, q, layout=layout, mask=Mask.full(), group=group)


def test_messages_arrive_in_the_order_of_each_sender() -> None:
    """Two exchanges may be in flight, and the one that was started last may be waited for first."""

    def run(rank: int, group) -> list[list[float]]:
        other = 1 - rank
        received = [torch.empty(2) for _ in range(2)]
        waits = [group.exchange([(torch.full((2,), 10.0 * rank + i), other)], [(received[i], other)]) for i in range(2)]
        for wait in reversed(waits):
            wait()
        return [x.tolist() for x in received]

    assert simulate(2, run) == [[[10.0, 10.0], [11.0, 11.0]], [[0.0, 0.0], [1.0, 1.0]]]


def test_a_sent_tensor_may_be_modified_at_once() -> None:
    """Sending copies the tensor."""

    def run(rank: int, group) -> float:
        sent, received = torch.full((1,), float(rank)), torch.empty(1)
        wait = group.exchange([(sent, 1 - rank)], [(received, 1 - rank)])
        sent.fill_(100.0)
        wait()
        return received.item()

    assert simulate(2, run) == [1.0, 0.0]


@pytest.mark.parametrize("in_turns", [True, False])
def test_results_are_returned_by_rank(in_turns: bool) -> None:
    """The result of rank r is at index r, whichever rank ends first."""
    assert simulate(3, lambda rank, group: (rank, group.rank, group.size), in_turns=in_turns) == [(i, i, 3) for i in range(3)]


def test_a_rank_that_returns_too_early_raises_an_error() -> None:
    """The other ranks do not wait forever for its messages, and the error names it."""
    with pytest.raises(RuntimeError, match=r"rank 1 of the simulated ring .* that rank . waits for"):
        simulate(3, lambda rank, group: None if rank == 1 else attend(rank, group))


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit], ids=lambda kind: kind.__name__)
def test_the_exception_of_a_rank_is_raised(kind: type[BaseException]) -> None:
    """The caller gets the exception of the rank that failed first."""

    def run(rank: int, group: object) -> None:
        if rank == 1:
            raise kind("rank 1 failed on purpose")
        attend(rank, group)

    with pytest.raises(kind, match="rank 1 failed on purpose"):
        simulate(3, run)


def test_a_simulated_ring_has_only_one_transport() -> None:
    """Another transport cannot be requested."""

    def run(rank: int, group: object) -> None:
        q = torch.ones(1, 4, 1, 8)
        ring_attention(q, q, q, layout=Layout.contiguous(8, 2), mask=Mask.full(), group=group, transport="p2p")

    with pytest.raises(ValueError, match=r"transport='p2p': .*'auto'"):
        simulate(2, run)
