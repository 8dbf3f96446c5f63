"""Two nodes on one machine: network namespaces with names of their own, joined by one virtual cable."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn.comm import connect
from tests.ringattn.comm.test_p2p import check_rings
from tests.ringattn.test_ulysses import check_mesh

ROOT = Path(__file__).parents[3]
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29517
RANKS = 4  # two on each node


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Names of two network namespaces that reach each other, and nothing else."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("needs root, ip and unshare to make network namespaces")
    names = [f"ring-{os.getpid()}-{i}" for i in range(2)]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    ip("-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


def test_two_nodes_compute_the_same(nodes: list[str]) -> None:
    """The ring across both nodes; and Ulysses inside them with the ring across."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "cable", "PYTHONPATH": str(ROOT)}
    ranks = []
    for rank in range(RANKS):
        name = nodes[rank * 2 // RANKS]
        program = f"hostname {name} && exec {sys.executable} -m tests.ringattn.comm.test_connect {rank}"
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", program]
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        outputs = [rank.communicate(timeout=240)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(outputs)


def main(rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=RANKS)
    interconnect = connect.connect(dist.group.WORLD.group_name, torch.device("cpu")).interconnect
    assert not interconnect.all_pairs, "ranks of two hosts relay"
    check_rings(33, 8, torch.float64, "reference", 1e-10)
    check_mesh(ulysses=2)
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads sometimes abort a process that ends in the usual way


if __name__ == "__main__":
    main(int(sys.argv[1]))
