"""Pinned memory stays pinned as long as any tensor uses it."""

import gc
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from ringattn.train.parallel.memory.capacity import InsufficientMemory
from ringattn.train.parallel.memory.pinned import OTHER_CORES, empty_pinned, host_thread, resident_bytes, run_with_cores

GPU = torch.device("cuda", 0)


def fake_cudart(monkeypatch: pytest.MonkeyPatch, error: int = 0) -> dict[int, int]:
    """Replace the CUDA runtime. Return the sizes of the pinned parts of memory, by address."""
    pinned: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        pinned[address] = size
        return error

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "set_device", int)  # As in PyTorch, a device without an index is an error.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return pinned


@pytest.mark.parametrize(("device", "expected"), [(torch.device("cuda"), 3), (GPU, 0), (torch.device("cpu"), None)])
def test_a_host_thread_uses_the_current_device_of_its_creator(device, expected, monkeypatch):
    indices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: indices.append(int(device)))
    creator = threading.get_ident()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3 if threading.get_ident() == creator else 0)
    with host_thread("test", device) as thread:
        thread.submit(int).result()
    assert indices == ([] if expected is None else [expected])


def test_memory_is_pinned_until_its_last_view_is_gone(monkeypatch):
    pinned = fake_cudart(monkeypatch)
    memory = empty_pinned(5, GPU)
    assert pinned == {memory.data_ptr(): 20}
    assert memory.data_ptr() % 4096 == 0
    assert memory.eq(0).all()
    view = torch.nn.Parameter(memory[3:].view(2, 1))
    del memory
    gc.collect()
    assert len(pinned) == 1
    view.data.fill_(1.0)
    del view
    gc.collect()
    assert not pinned


def test_pages_are_allocated_by_several_cores_before_they_are_pinned(monkeypatch):
    fake_cudart(monkeypatch)
    before, resident = resident_bytes(), []
    register = torch.cuda.cudart().cudaHostRegister
    torch.cuda.cudart().cudaHostRegister = lambda *args: resident.append(resident_bytes()) or register(*args)
    empty_pinned(2**24, GPU)
    assert resident[0] - before > 60 * 2**20
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(OTHER_CORES + 3))
    monkeypatch.setattr(torch, "set_num_threads", torch._C.set_num_threads)
    threads = torch.get_num_threads()
    for device in (GPU, torch.device("cuda")):
        assert run_with_cores(torch.get_num_threads, device) == 3
    assert torch.get_num_threads() == threads


def test_memory_that_cannot_be_pinned_is_an_error(monkeypatch):
    fake_cudart(monkeypatch, error=2)
    with pytest.raises(InsufficientMemory, match=r"0\.0 GiB of host memory cannot be pinned \(CUDA error 2\)"):
        empty_pinned(5, GPU)
