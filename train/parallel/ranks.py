"""Set up the ranks of a job: create the process group, pick devices, and synchronise values and errors."""

import logging
import os
import signal
import threading
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

# The timeout until `mesh.set_timeout` is called. Tokenising a corpus may take many minutes.
START_TIMEOUT = timedelta(minutes=30)

# torchrun starts its store before the ranks. If the store does not respond within TORCHRUN_TIMEOUT, torchrun has died.
TORCHRUN_TIMEOUT = timedelta(seconds=15)

# The environment variable that selects deterministic workspaces for cuBLAS
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Launch(NamedTuple):
    """Describes how the ranks were launched."""

    store: dist.Store  # a key-value store that all ranks of this attempt share
    attempt: int  # the number of times that torchrun has started the ranks
    time: str  # the local time of the first attempt on rank 0; "" on all other ranks


@contextmanager
def _interrupt_at_once() -> Generator[None]:
    """Let Ctrl-C end the process directly. Python would handle it only after a call that waits for other ranks.

    Only the main thread can set a handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous or signal.SIG_DFL)


@_interrupt_at_once()
def connect_ranks(share_gpus: bool = False) -> Launch:
    """Initialise the default process group. Without torchrun, this process is the only rank.

    The group has backends for GPUs (NCCL) and CPUs (gloo), because the run's device is not known yet.

    Args:
        share_gpus: let several ranks use the same GPU if any host has fewer GPUs than ranks. Ranks that share a GPU use gloo,
            because NCCL does not allow two ranks on one GPU. All ranks must pass the same value.
    """
    if "RANK" in os.environ:
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
    keys = [f"shares_gpu/{each}" for each in range(world_size)]
    store.set(keys[rank], str(int(0 < torch.cuda.device_count() < ranks_per_host())))
    return any(store.get(key) == b"1" for key in keys)  # `get` waits until a rank has set the key


def disconnect_ranks() -> None:
    build_mesh.cache_clear()
    dist.destroy_process_group()


def broadcast_object(value: Any) -> Any:
    objects = [value]
    dist.broadcast_object_list(objects, src=0, device=torch.device("cpu"))
    return objects[0]


@contextmanager
def sync_errors(group: dist.ProcessGroup | None = None) -> Generator[None]:
    """If one rank raises a ConfigError, raise the error on all ranks, so that no rank waits forever. All ranks must run the
    body.

    If several ranks have an error, every rank raises the error of the lowest rank. Without a process group, an error is raised
    as usual.
    """
    own: ConfigError | None = None
    try:
        yield
    except ConfigError as error:
        own = error
    errors: list[ConfigError | None] = [own]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, own, group)
    for error in filter(None, errors):
        raise error from own


def set_deterministic(deterministic: bool) -> None:
    """Switch PyTorch's deterministic algorithms on or off. PyTorch warns about operations that have no deterministic
    algorithm.
    """
    if deterministic:
        # cuBLAS reads the variable when CUDA is initialised.
        if not torch.cuda.is_initialized():
            os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")
        elif CUBLAS_WORKSPACE not in os.environ and dist.get_rank() == 0:
            log.warning(
                "trainer.deterministic=true has no effect on cuBLAS, because an earlier job of this process has initialised "
                f"CUDA: set {CUBLAS_WORKSPACE}=:4096:8 before the launch"
            )
        # Deterministic mode would also fill new tensors, which takes time. Our kernels write all elements of their outputs.
        deterministic_mode: Any = torch.utils.deterministic
        deterministic_mode.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(deterministic, warn_only=True)


def ranks_per_host() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def pick_device(name: str, share_gpus: bool = False) -> torch.device:
    """Return the device of this rank, and make it the current device.

    On CPUs, the ranks of a host divide its cores. With a GPU, CPU operations use one thread. More threads would delay the
    thread that launches kernels. The argument `share_gpus` allows more ranks than GPUs.

    Raises:
        ConfigError: the host has too few GPUs.
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
