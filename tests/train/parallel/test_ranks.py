"""The ranks of a job: they agree on values and errors, and each has a device."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ringattn.comm.p2p import backend_name
from ringattn.comm.shared_gpus import SHARE_GPUS
from ringattn.train.checkpoint.storage import CheckpointError
from ringattn.train.parallel.mesh import build_mesh
from ringattn.train.parallel.ranks import (
    CUBLAS_WORKSPACE,
    _any_gpu_is_shared,
    broadcast_object,
    connect_ranks,
    disconnect_ranks,
    pick_device,
    set_deterministic,
    sync_errors,
)
from ringattn.train.settings.config import ConfigError
from scripts.command import child_environment, rank_variables, serve_store
from tests.distributed import run_ranks
from tests.train.jobs import one_rank


def test_a_process_without_torchrun_is_the_only_rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    launch = connect_ranks()
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        assert launch.store.add("count", 2) == 2
        assert launch.attempt == 1
        build_mesh("cpu", 1)
    finally:
        disconnect_ranks()
    assert not dist.is_initialized()
    # A mesh must not outlive the process group on which it was built.
    assert build_mesh.cache_info().currsize == 0


def test_ctrl_c_ends_a_rank_that_waits_for_another_rank():
    store = serve_store()
    program = "from ringattn.train.parallel.ranks import connect_ranks; connect_ranks()"
    environment = child_environment(**rank_variables(store, 1, 2))
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as process:
        while store.num_keys() < 2:  # The rank writes its name, and then waits for the reply of rank 0.
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(20) == -signal.SIGINT
        finally:
            process.kill()


@pytest.mark.parametrize("fails", [False, True], ids=["connected", "failed"])
def test_ctrl_c_has_its_earlier_handler_after_the_connection(fails, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    if fails:
        monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=dist.DistNetworkError("no network")))
    previous = signal.signal(signal.SIGINT, handler := Mock())
    try:
        with pytest.raises(dist.DistNetworkError) if fails else nullcontext():
            connect_ranks()
            disconnect_ranks()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_ranks_connect_in_any_thread(monkeypatch):
    """Only the main thread can set a handler of signals."""
    monkeypatch.delenv("RANK", raising=False)
    previous = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(connect_ranks).result().attempt == 1
    disconnect_ranks()
    assert signal.getsignal(signal.SIGINT) is previous


def test_values_and_errors_of_one_rank_reach_all_ranks(tmp_path):
    run_ranks(_check_values_and_errors, 3, tmp_path / "ranks")


def _check_values_and_errors() -> None:
    rank = dist.get_rank()
    assert broadcast_object({"rank": rank}) == {"rank": 0}
    with sync_errors():
        pass
    # The error of the lowest rank that raised one is raised everywhere, with its type.
    with pytest.raises(CheckpointError, match="rank 1 cannot read its file"), sync_errors():
        if rank > 0:
            raise CheckpointError(f"rank {rank} cannot read its file")


def test_an_error_keeps_its_cause_on_its_own_rank():
    with one_rank(), pytest.raises(ConfigError) as error, sync_errors():
        raise ConfigError("outer") from ValueError("inner")
    assert isinstance(error.value.__cause__.__cause__, ValueError)


def test_errors_are_raised_as_usual_without_a_process_group():
    with pytest.raises(ConfigError, match="one file is missing"), sync_errors():
        raise ConfigError("one file is missing")


def test_other_errors_end_only_their_own_rank():
    with one_rank(), pytest.raises(ZeroDivisionError), sync_errors():
        raise ZeroDivisionError


@pytest.mark.parametrize("cuda_in_use", [False, True])
def test_deterministic_cublas_must_be_set_before_cuda_is_in_use(cuda_in_use, monkeypatch, caplog):
    monkeypatch.setenv(CUBLAS_WORKSPACE, "")
    monkeypatch.delenv(CUBLAS_WORKSPACE)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda_in_use)
    with one_rank():
        try:
            set_deterministic(True)
            assert torch.are_deterministic_algorithms_enabled()
        finally:
            set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert (CUBLAS_WORKSPACE in os.environ) != cuda_in_use
    assert ("CUBLAS_WORKSPACE_CONFIG=:4096:8 before" in caplog.text) == cuda_in_use


@pytest.fixture
def gpus(monkeypatch) -> SimpleNamespace:
    """A fake host with two GPUs, which records the current device and the number of threads."""
    host = SimpleNamespace(current=None, threads=None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(host, "threads", count))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(host, "current", device))
    return host


def test_every_rank_has_its_own_gpu(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert pick_device("auto") == gpus.current == torch.device("cuda", 1)
    assert gpus.threads == 1


def test_fewer_gpus_than_ranks_are_an_error(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    reason = "NCCL rejects two ranks on one GPU.*slower than one rank"
    remedy = "launch fewer ranks, or set trainer.device=cpu"
    with pytest.raises(ConfigError, match=f"has 2 usable GPUs for 3 ranks.*{reason}.*{remedy}"):
        pick_device("cuda")


def test_ranks_share_gpus_only_on_request(gpus, monkeypatch):
    """Three ranks on two GPUs. Ranks on one GPU need gloo, so the choice does not depend on the host of a rank."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(SHARE_GPUS, "0")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)  # NCCL needs real GPUs
    for local_ranks, shares in (("2", False), ("3", True)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
        connect_ranks(share_gpus=True)
        try:
            assert os.environ[SHARE_GPUS] == str(int(shares))
            assert not shares or backend_name(dist.group.WORLD, "cuda") == "gloo"
        finally:
            disconnect_ranks()
    assert pick_device("auto", share_gpus=True) == gpus.current == torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="0 usable GPUs"):
        pick_device("cuda", share_gpus=True)


@pytest.mark.parametrize("others", [b"00", b"01"])
def test_all_ranks_know_whether_any_gpu_is_shared(others, gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    store = dist.HashStore()
    for rank, answer in enumerate(others.decode(), start=1):
        store.set(f"shares_gpu/{rank}", answer)
    assert _any_gpu_is_shared(store, 0, 3) == (others == b"01")


def test_ranks_on_cpus_divide_the_cores(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert pick_device("cpu") == torch.device("cpu")
    assert gpus.threads == 2
    assert gpus.current is None
