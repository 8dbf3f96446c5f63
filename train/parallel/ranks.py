"""Set up the ranks of a job: create the process group, pick the device of each rank, and synchronise values and errors."""

import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringattn.comm.shared_gpus import SHARE_GPUS
from ringattn.train.parallel.launcher import begin_attempt, launch_time
from ringattn.train.parallel.mesh import build_mesh
from ringattn.train.settings.config import ConfigError

log = logging.getLogger(__name__)

# The timeout of collectives before `mesh.set_timeout` sets a different timeout. This timeout is long, because tokenising a
# corpus may take many minutes.
START_TIMEOUT = timedelta(minutes=30)

# A rank tries for at most this long to connect to the key-value store that torchrun hosts.
TORCHRUN_TIMEOUT = timedelta(seconds=15)

# This environment variable makes cuBLAS select workspaces that give the same bits in every run.
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Launch(NamedTuple):
    """The circumstances under which the ranks were launched.

    Attributes:
        store: the key-value store of all ranks of this attempt.
        attempt: the number of times that torchrun has started the ranks of this launch, including this time.
        time: the local time of the first attempt on rank 0; "" on all other ranks.
    """

    store: dist.Store
    attempt: int
    time: str


def connect_ranks(share_gpus: bool = False) -> Launch:
    """Initialise the default process group.

    The group contains all ranks that torchrun has started. Without torchrun, this process is the only rank.

    The group uses NCCL for tensors on GPUs and gloo for tensors on CPUs. The group can therefore be created before the settings
    are read, when the device of the run is not yet known.

    Args:
        share_gpus: let several ranks use the same GPU if any host has fewer GPUs than ranks. The group then uses gloo for
            tensors on GPUs, because NCCL rejects two ranks on one GPU. All ranks must pass the same value.
    """
    if "RANK" in os.environ:
        # torchrun starts its store before it starts the ranks. If the store does not respond, torchrun has died, so the timeout
        # can be short.
        timeout = TORCHRUN_TIMEOUT if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else START_TIMEOUT
        job_store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        job_store.set_timeout(START_TIMEOUT)
    else:
        job_store, rank, world_size = dist.HashStore(), 0, 1
    job_store = dist.PrefixStore("ringattn", job_store)
    store, attempt = begin_attempt(job_store, rank, world_size)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if share_gpus and _any_gpu_is_shared(store, rank, world_size):
        os.environ[SHARE_GPUS] = "1"
        backend = "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=START_TIMEOUT)
    return Launch(store, attempt, launch_time(job_store) if rank == 0 else "")


def _any_gpu_is_shared(store: dist.Store, rank: int, world_size: int) -> bool:
    """Return whether a host has GPUs, but fewer GPUs than ranks. The ranks exchange their answers over the store."""
    keys = [f"shares_gpu/{each}" for each in range(world_size)]
    store.set(keys[rank], str(int(0 < torch.cuda.device_count() < ranks_per_host())))
    return any(store.get(key) == b"1" for key in keys)  # `get` waits until a rank has set the key


def disconnect_ranks() -> None:
    """Destroy the default process group, and remove its meshes from the cache of `build_mesh`."""
    build_mesh.cache_clear()
    dist.destroy_process_group()


def broadcast_object(value: Any) -> Any:
    """Return rank 0's `value` on every rank. The values of the other ranks are ignored."""
    objects = [value]
    dist.broadcast_object_list(objects, src=0, device=torch.device("cpu"))
    return objects[0]


@contextmanager
def sync_errors() -> Generator[None]:
    """Raise a ConfigError of one rank on all ranks.

    All ranks run the body of the `with` statement. If the body raises a ConfigError on some ranks, every rank raises the error
    of the lowest of these ranks. For example, if only one rank cannot read a file, all ranks end with the same message, and no
    rank waits forever for another rank. Without a process group, an error is raised as usual.
    """
    own = None
    try:
        yield
    except ConfigError as error:
        own = error
    errors = [own]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, own)
    for error in filter(None, errors):
        raise error from own


def set_deterministic(deterministic: bool) -> None:
    """Switch PyTorch's deterministic algorithms on or off.

    If an operation has no deterministic variant, PyTorch prints a warning and runs the operation as usual.
    """
    if deterministic:
        # cuBLAS reads the environment variable when CUDA is initialised. Later changes of the variable have no effect.
        if not torch.cuda.is_initialized():
            os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        elif CUBLAS_WORKSPACE not in os.environ and dist.get_rank() == 0:
            log.warning(
                "trainer.deterministic=true has no effect on cuBLAS, because an earlier job of this process has initialised "
                f"CUDA: set {CUBLAS_WORKSPACE}=:4096:8 before the launch"
            )
        # By default, deterministic mode fills new tensors with a value. Filling takes time, and it is not needed here, because
        # every kernel writes all elements of its outputs.
        deterministic_mode: Any = torch.utils.deterministic
        deterministic_mode.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def ranks_per_host() -> int:
    """Return the number of ranks on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def pick_device(name: str, share_gpus: bool = False) -> torch.device:
    """Return the device of this rank, and make this device the current device.

    On CPUs, the ranks of a host divide the cores of the host among themselves. With a GPU, PyTorch's operations on the CPU use
    one thread, because they are short, and because idle threads of a pool would delay the thread that launches kernels.

    Args:
        name: the value of `trainer.device`: "auto", "cuda" or "cpu".
        share_gpus: let several ranks use the same GPU if the host has fewer GPUs than ranks.

    Raises:
        ConfigError: the host has fewer GPUs than ranks and `share_gpus` is False, or `name` is "cuda" and the host has no GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_per_host()))
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus < (1 if share_gpus else ranks_per_host()):
        raise ConfigError(
            f"trainer.device={name}: this machine has {gpus} usable GPUs for {ranks_per_host()} ranks, but each rank requires "
            "its own GPU, because NCCL rejects two ranks on one GPU and ranks that share a GPU are slower than one rank: "
            "launch fewer ranks, or set trainer.device=cpu"
        )
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
    torch.cuda.set_device(device)
    return device
