"""Tests of the predicted cost of a pass, computed by hand for small schedules."""

import pytest
import torch

from ringattn.planning.cost_model import Interconnect, attention_flops, hop_costs, interconnect
from ringattn.planning.schedule import direct, relay

LINK = Interconnect("test", all_pairs=True, bytes_per_second=1e6, latency=1e-3, flops=1e9)
NEED = ((range(4), range(2)), (range(4), range(4)))  # rank 1 needs two rows of rank 0, and rank 0 all four rows of rank 1


def test_a_hop_costs_latency_and_bytes() -> None:
    """Rank 0 receives 4 rows of 1,000 bytes, which takes 4 ms at 1 MB/s, plus 1 ms of latency."""
    hops = hop_costs(direct(NEED, results=False), (1000, 0), lambda local_step: 2e6, LINK)
    assert [hop.bytes for hop in hops] == [4000, 0]
    assert [hop.communication for hop in hops] == pytest.approx([5e-3, 0])
    assert [hop.compute for hop in hops] == pytest.approx([2e-3, 2e-3])
    assert [hop.seconds for hop in hops] == pytest.approx([5e-3, 2e-3])


def test_the_cost_of_one_rank() -> None:
    """Rank 0 sends two rows and receives four. The times of simultaneous messages are not added."""
    (first, _) = hop_costs(direct(NEED, results=False), (1000, 0), lambda local_step: 1e6 * (1 + local_step.rank), LINK, rank=0)
    assert (first.bytes, first.compute) == (4000, pytest.approx(1e-3))
    assert first.communication == pytest.approx(5e-3)


def test_the_busiest_rank_counts_separately_for_computation_and_messages() -> None:
    """Rank 1 computes longest and rank 0 receives most."""
    (first, _) = hop_costs(direct(NEED, results=False), (1000, 0), lambda local_step: 1e6 * (1 + 8 * local_step.rank), LINK)
    assert (first.bytes, first.compute) == (4000, pytest.approx(9e-3))


def test_results_have_their_own_size() -> None:
    """A relay of two sends a block of 4 rows of 10 bytes, computes with it, and returns 4 rows of 100 bytes."""
    need = ((range(4), range(4)), (range(4), range(4)))
    hops = hop_costs(relay(need, results=True), (10, 100), lambda local_step: 0.0, LINK)
    assert [hop.bytes for hop in hops] == [40, 0, 400]


def test_interconnects() -> None:
    """Only NCCL occupies SMs, ranks of several hosts relay, and a slower network has fewer bytes per second."""
    assert interconnect("nccl").uses_sms
    assert not interconnect("nvlink").uses_sms
    assert not interconnect("gloo").uses_sms
    assert interconnect("nccl").all_pairs
    assert not interconnect("nccl", one_host=False).all_pairs
    assert interconnect("nccl", one_host=False).bytes_per_second < interconnect("nccl").bytes_per_second
    assert interconnect("nvlink", flops=3.0).flops == 3.0
    with pytest.raises(ValueError, match=r"unknown interconnect 'carrier'.*nvlink, nccl, gloo"):
        interconnect("carrier")


@pytest.mark.parametrize(("capability", "flops"), [(8, 1.8e14), (9, 5.8e14), (10, 1.2e15), (7, 6e13), (12, 6e13)])
def test_speed_of_attention_on_gpus(capability: int, flops: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table contains one speed per compute capability, and a low speed for unknown GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    assert attention_flops(torch.device("cuda")) == flops


def test_speed_of_attention_on_cpus() -> None:
    """A CPU computes 50 GFLOP/s."""
    assert attention_flops(torch.device("cpu")) == 5e10
