"""Comparisons of the memory that a run needs with the memory of a GPU, of a host and of a container."""

import os
from types import SimpleNamespace

import pytest
import torch

from ringattn.train.parallel.memory import capacity
from ringattn.train.parallel.memory.capacity import COMFORTABLE_FRACTION, COPIES, GIB, Capacity, InsufficientMemory, Needs

GPU = Capacity(80 * GIB, 125 * GIB)


@pytest.mark.parametrize(
    ("device", "host", "error"),
    [
        ({"activations": 75 * GIB}, {"activations": 100 * GIB}, None),
        (
            {"parameters": GIB, "activations": 100 * GIB},
            {},
            r"about 101.0 GiB \(parameters 1.0, activations 100.0\), but its GPU has 76.0 usable: use more",
        ),
        # 5 GiB of the host are for the process.
        ({}, {"activations": 114 * GIB}, r"114.0 GiB \(activations 114.0\), but its share of this host has 113.8 usable"),
        ({}, {"activations": 25 * GIB, COPIES: 50 * GIB}, None),
        (
            {},
            {"activations": 25 * GIB, COPIES: 51 * GIB},
            r"saves=true: .* 51.0 GiB .* more than half of the 100.0",
        ),
    ],
)
def test_an_error_lists_the_memory_by_purpose_if_it_does_not_fit(device, host, error):
    if error is None:
        return GPU.check(Needs(device, host))
    with pytest.raises(InsufficientMemory, match=error):
        GPU.check(Needs(device, host))


def test_a_comfortable_plan_leaves_memory_free():
    needs = [Needs({"activations": gib * GIB}, {}) for gib in (60, 70)]
    assert [GPU._replace(fraction=COMFORTABLE_FRACTION).fits(each) for each in needs] == [True, False]
    assert all(map(GPU.fits, needs))


def test_memory_of_a_host_is_shared_by_its_ranks_and_contains_everything_on_cpus(monkeypatch):
    total = capacity.host_memory()
    half = Needs({"activations": 0.45 * total}, {"activations": 0.45 * total})
    Capacity.of(torch.device("cpu")).check(half)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InsufficientMemory, match=r"\(activations [\d.]+\), but its share of this host"):
        Capacity.of(torch.device("cpu")).check(half)


def test_the_limit_of_a_container_is_its_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(capacity, "LIMITS", [tmp_path / "limit"])
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for text, expected in (("max", machine), ("1073741824", GIB), (str(2**62), machine)):
        (tmp_path / "limit").write_text(text)
        assert capacity.host_memory() == expected


def test_the_memory_of_a_gpu_is_read_from_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    assert Capacity.of(torch.device("cuda", 0)).gpu == 80 * GIB
