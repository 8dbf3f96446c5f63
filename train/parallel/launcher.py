"""Keep the attempts of a job apart that torchrun starts one after another.

If a rank dies, `torchrun --max-restarts` starts all ranks again. All attempts of a job use the same key-value store, which
torchrun hosts, and which still contains the keys of the earlier attempts.
"""

import time
import uuid

import torch.distributed as dist

POLL_INTERVAL = 0.05  # seconds


def begin_attempt(store: dist.Store, rank: int, world_size: int) -> tuple[dist.Store, int]:
    """Agree on the number of this attempt with the other ranks. All ranks call this function once per attempt.

    Keys of an earlier attempt must not be read, because they contain addresses and heartbeats of dead processes. The variable
    TORCHELASTIC_RESTART_COUNT does not identify an attempt, because every torchrun counts only the failures of its own ranks.
    Instead, rank 0 counts the attempts. Every other rank publishes a random name, and rank 0 replies under this name. A rank
    can therefore never receive a reply that was meant for its predecessor.

    Args:
        store: the store of the job, which the ranks of all attempts use.
        rank: the index of this rank.
        world_size: the number of ranks.

    Returns:
        A part of the store that only this attempt uses, and the number of the attempt, from 1.
    """
    if rank == 0:
        attempt = store.add("attempts", 1)
        waiting = set(range(1, world_size))
        while waiting:
            for other in waiting:
                # The name may still be that of a process of an earlier attempt, so rank 0 replies until the rank has joined.
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

    It is the default name of a run, so a restarted attempt finds the directory of the first one.
    """
    return store.compare_set("launch_time", "", time.strftime("%Y-%m-%d_%H-%M-%S")).decode()
