"""Separate the attempts of a job in the key-value store of torchrun.

If a rank dies, `torchrun --max-restarts` starts all ranks again. Each start of all ranks is one attempt. torchrun hosts one
key-value store for all attempts of a job. The store therefore still contains the keys of earlier attempts.
"""

import time
import uuid

import torch.distributed as dist

POLL_INTERVAL = 0.05  # seconds


def begin_attempt(store: dist.Store, rank: int, world_size: int) -> tuple[dist.Store, int]:
    """Agree on the number of this attempt with the other ranks. All ranks call this function once per attempt.

    A rank must not read keys of an earlier attempt, because these keys contain addresses and heartbeats of dead processes. The
    environment variable TORCHELASTIC_RESTART_COUNT does not identify an attempt, because every torchrun counts only the
    failures of its own ranks. Instead, rank 0 counts the attempts. Every other rank writes a random name to the store, and rank
    0 writes the number of the attempt under this name. A rank can therefore never read a reply for a rank of an earlier
    attempt.

    Args:
        store: the key-value store of the job. The ranks of all attempts use this store.
        rank: the index of this rank.
        world_size: the number of ranks.

    Returns:
        A part of the store that only this attempt uses, and the number of the attempt, counted from 1.
    """
    if rank == 0:
        attempt = store.add("attempts", 1)
        waiting = set(range(1, world_size))
        while waiting:
            for other in waiting:
                # The store may still contain the name of a process of an earlier attempt. Therefore rank 0 repeats its replies
                # until the rank has joined.
                if store.check([f"name/{other}"]):
                    store.set(f"attempt/{store.get(f'name/{other}').decode()}", str(attempt))
            waiting = {other for other in waiting if not store.check([f"joined/{attempt}/{other}"])}
            time.sleep(POLL_INTERVAL if waiting else 0)
    else:
        name = uuid.uuid4().hex
        store.set(f"name/{rank}", name)
        attempt = int(store.get(f"attempt/{name}"))  # waits until rank 0 has replied
        store.set(f"joined/{attempt}/{rank}", "")
    return dist.PrefixStore(f"attempt_{attempt}", store), attempt


def launch_time(store: dist.Store) -> str:
    """Return the local time of the first attempt, such as "2026-01-31_23-59-59". Only rank 0 calls this function.

    This time is the default name of a run. All attempts therefore use the directory of the first attempt.
    """
    return store.compare_set("launch_time", "", time.strftime("%Y-%m-%d_%H-%M-%S")).decode()
