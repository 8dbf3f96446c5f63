"""The mesh of data-parallel x ring x Ulysses ranks."""

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringattn.comm import watchdog
from ringattn.train.parallel import mesh as mesh_module
from ringattn.train.parallel.mesh import build_mesh, set_timeout
from ringattn.train.parallel.ranks import disconnect_ranks
from tests.train.jobs import one_rank

AXES = ("dp", "sequence", "ring", "ulysses", "all")


def groups_of(rank: int, ranks: int, sequence: int, ulysses: int) -> dict[str, list[int]]:
    """Return the ranks that are connected with one rank along each axis. The backend "fake" needs no other processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = build_mesh("cpu", sequence, ulysses)
        assert build_mesh("cpu", sequence, ulysses) is mesh
        return {axis: dist.get_process_group_ranks(getattr(mesh, axis).get_group()) for axis in AXES}
    finally:
        disconnect_ranks()


@pytest.mark.parametrize(
    ("rank", "dp", "sequence", "ring", "ulysses"),
    [
        (0, [0, 8], [0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6], [0, 1]),
        (15, [7, 15], [8, 9, 10, 11, 12, 13, 14, 15], [9, 11, 13, 15], [14, 15]),
    ],
)
def test_ranks_that_exchange_heads_are_consecutive(rank, dp, sequence, ring, ulysses):
    """Of 16 ranks, eight share a sequence. They form rings of four ranks, and pairs of ranks that exchange heads."""
    expected = {"dp": dp, "sequence": sequence, "ring": ring, "ulysses": ulysses, "all": list(range(16))}
    assert groups_of(rank, ranks=16, sequence=8, ulysses=2) == expected


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, [50, 70]), ("600", [600, 600])])
def test_each_job_sets_the_timeout_of_a_hop_unless_the_user_does(set_by_user, expected, monkeypatch):
    monkeypatch.setenv(watchdog.TIMEOUT, "600")
    monkeypatch.setattr(mesh_module, "USER_HOP_TIMEOUT", set_by_user)
    timeouts = []
    with one_rank():
        mesh = build_mesh("cpu", 1)
        for seconds in (50, 70):
            set_timeout(mesh, seconds)
            timeouts.append(watchdog.timeout_seconds())
    assert timeouts == expected


def test_collectives_of_all_axes_have_the_timeout(monkeypatch):
    timeouts = {}
    monkeypatch.setenv(watchdog.TIMEOUT, "600")
    monkeypatch.setattr(mesh_module, "_set_pg_timeout", lambda timeout, group: timeouts.update({group: timeout.seconds}))
    with one_rank():
        mesh = build_mesh("cpu", 1)
        set_timeout(mesh, 50)
        assert timeouts == dict.fromkeys([None, *(getattr(mesh, axis).get_group() for axis in AXES)], 50)
