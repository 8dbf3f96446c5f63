"""Two launchers on one machine, whose ranks behave as if they were on two hosts.

Run the same test by hand on a machine with several GPUs, with two or four ranks:

    python -m tests.ringattn.comm.test_two_hosts 4
"""

import os
import subprocess
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn.comm.connect import HOST_VARIABLE, connect
from ringattn.comm.p2p import SingleRankTransport
from ringattn.train.parallel.mesh import build_mesh
from ringattn.train.parallel.ranks import connect_ranks, disconnect_ranks, pick_device
from scripts.check import ring as check_ring
from scripts.command import rank_variables, serve_store
from tests.distributed import run_ranks

ROOT = Path(__file__).parents[3]
HOSTS = ("first", "second")
MESSAGE = "every error is within its limit"
# NCCL_HOSTID makes NCCL treat the two hosts as different machines. It then sends over the network, which is the loopback
# interface of this machine.
NETWORK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def start_host(index: int, ranks: int, port: int, gpus: bool, sizes: tuple[str, ...]) -> subprocess.Popen:
    """Start the launcher of one host. With `gpus`, the host has one GPU for each of its ranks, and otherwise no GPU."""
    local_ranks = ranks // len(HOSTS)
    visible = ",".join(str(index * local_ranks + i) for i in range(local_ranks)) if gpus else ""
    identity = {HOST_VARIABLE: HOSTS[index], "NCCL_HOSTID": HOSTS[index], "CUDA_VISIBLE_DEVICES": visible}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(HOSTS)}", f"--nproc_per_node={local_ranks}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=hosts", "--local-addr=127.0.0.1"]
    command += ["--rdzv-conf=is_host=false"]
    command += ["-m", "tests.ringattn.comm.test_two_hosts", "--rank", *sizes]
    environment, pipes = os.environ | NETWORK | identity, dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=partial(take_cores, index), **pipes)


def take_cores(index: int) -> None:
    """Run this process on the cores of one host, because the ranks of a host use one thread per core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[index :: len(HOSTS)] or cores)


def run_on_two_hosts(ranks: int, gpus: bool, *sizes: str) -> str:
    """Run the checks of `check_rank` on two hosts, and return the output of both launchers."""
    store = serve_store()
    hosts = [start_host(index, ranks, store.port, gpus, sizes) for index in range(len(HOSTS))]
    try:
        outputs = [host.communicate(timeout=240)[0] for host in hosts]
    finally:
        for host in hosts:
            host.terminate()  # the launcher then ends its ranks
    output = "\n".join(outputs)
    assert [host.returncode for host in hosts] == [0, 0], output
    assert MESSAGE in output, output
    return output


def check_rank(arguments: list[str]) -> int:
    """On every rank, check the chosen transports, and compare attention with float64 results. Return the exit status."""
    connect_ranks(share_gpus=True)
    device = pick_device("auto", share_gpus=True)
    ranks, local_ranks = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpus = device.type == "cuda"
    # A Ulysses group contains the ranks of one host, and a ring connects the hosts.
    mesh = build_mesh(device.type, ranks, ulysses=local_ranks)
    ring, inside = (connect(axis.get_group().group_name, device) for axis in (mesh.ring, mesh.ulysses))
    assert ring.size == 2, ring.interconnect
    assert ring.interconnect.name == ("nccl" if on_gpus else "gloo"), ring.interconnect
    assert not ring.interconnect.all_pairs, "neighbours relay blocks between hosts"
    if local_ranks == 1:
        assert isinstance(inside, SingleRankTransport)
    else:
        assert inside.interconnect.name == ("nvlink" if on_gpus else "gloo")
        assert inside.interconnect.all_pairs
    disconnect_ranks()
    return check_ring.main(arguments)


def run_as_host(variables: list[dict[str, str]], directory: Path, sizes: tuple[str, ...]) -> None:
    """On every rank of a job: run `check_rank` as the only rank of a host, with the environment variables of torchrun."""
    rank = dist.get_rank()
    take_cores(rank)
    dist.destroy_process_group()
    os.environ |= NETWORK | variables[rank] | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", HOST_VARIABLE: HOSTS[rank]}
    with open(directory / f"{rank}.out", "w") as output, redirect_stdout(output):
        status = check_rank([*sizes])
    os._exit(status)


def test_two_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring between two hosts with one rank each. Slow tests start a launcher per host."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    store, sizes = serve_store(), ("--seq-len", "67", "--head-dim", "8")
    run_ranks(run_as_host, 2, tmp_path / "ranks", [rank_variables(store, rank, 2) for rank in range(2)], tmp_path, sizes)
    output = (tmp_path / "0.out").read_text()
    assert MESSAGE in output
    assert "transport='nvlink' is unavailable: the tensors are on cpu" in output


@pytest.mark.slow
def test_two_launchers() -> None:
    """Rings between two hosts without GPUs. A Ulysses group of two ranks is inside each host."""
    output = run_on_two_hosts(4, False, "--seq-len", "67", "--head-dim", "8")
    assert "transport='nvlink' is unavailable: the tensors are on cpu" in output


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4], ids=lambda n: f"P{n}")
def test_two_launchers_with_gpus(ranks: int) -> None:
    """Each rank has one GPU. NCCL connects the hosts, and NVLink connects the GPUs of a host."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    output = run_on_two_hosts(ranks, True)
    assert "transport='nvlink' is unavailable: the ranks are on 2 hosts" in output
    assert ("| auto, kv, all-to-all among 2 | causal |" in output) == (ranks == 4)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        status = check_rank(sys.argv[2:])
        sys.stdout.flush()
        os._exit(status)  # threads of gloo sometimes abort a process during Python's usual cleanup
    print(run_on_two_hosts(int(sys.argv[1]), torch.cuda.is_available(), *sys.argv[2:]))
