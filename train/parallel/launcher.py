"""Separate the attempts of a job in the key-value store of torchrun.

If a rank dies, `torchrun --max-restarts` starts all ranks again. Each start is an attempt. The store of torchrun still contains
the keys of earlier attempts.
"""

import time
import uuid

import torch.distributed as dist

POLL_INTERVAL = 0.05  # seconds


def begin_attempt(store: dist.Store, rank: int, world_size: int) -> tuple[dist.Store, int]:
    """Determine the number of this attempt together with the other ranks. Call this function once per attempt on all ranks.

    The keys of an earlier attempt contain addresses of dead processes, so a rank must not read them. Every rank except rank 0
    writes a random name to the store. Rank 0 answers with the number of the attempt.

    Returns:
        A part of the store that only this attempt uses, and the number of the attempt, counted from 1.
    """
    if rank == 0:
        attempt = store.add("attempts", 1)
        waiting = set(range(1, world_size))
        while waiting:
            for other in waiting:
                # A stored name may belong to a process that has ended. Answer every new name until its rank has joined this
                # attempt. TORCHELASTIC_RESTART_COUNT is not enough, because it counts only the failures of one torchrun
                # process.
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
    """Return the local time of the first attempt, such as "2026-01-31_23-59-59". Only rank 0 calls this function."""
    return store.compare_set("launch_time", "", time.strftime("%Y-%m-%d_%H-%M-%S")).decode()
