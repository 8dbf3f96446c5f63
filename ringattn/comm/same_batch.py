import hashlib
from collections import Counter
from collections.abc import Mapping
from numbers import Number
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.comm.connect import Group, rank_and_size
from ringattn.comm.p2p import backend_name
from ringattn.comm.simulated import SimulatedRank


def check_same(batch: object, group: Group | None) -> None:
    """Check that a batch is the same on all ranks of a group. All ranks must call this function.

    If the ranks of a ring have different tokens or documents, training is wrong. The loss still looks plausible. Call this
    function in the first steps of a training loop. The host waits for the GPU, hashes the batch on the CPU, and makes one small
    all-reduce.

    Args:
        batch: tensors, numbers, strings and None, in nested dicts, lists and tuples. Devices may differ.
        group: the process group of the ranks that share a sequence, for example `mesh.get_group()`.

    Raises:
        ValueError: the batches differ, `batch` contains another type, or `group` is None although there are several ranks. If
            batches differ, all ranks raise an error that names the ranks.
    """
    rank, size = rank_and_size(group)
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError("group=None would compare nothing: pass the process group of the ranks that share a sequence")
    digest = hashlib.sha256()
    _add_to_hash(digest, batch)
    if size == 1 or isinstance(group, SimulatedRank):  # simulated ranks share one process, and therefore one batch
        return
    hashes = torch.zeros(
        size, dtype=torch.int64, device="cpu" if backend_name(cast(dist.ProcessGroup, group), "cpu") else "cuda"
    )
    hashes[rank] = int.from_bytes(digest.digest()[:8], signed=True)
    dist.all_reduce(hashes, group=group)
    found = hashes.tolist()
    common = found.index(Counter(found).most_common(1)[0][0])
    different = [other for other, value in enumerate(found) if value != found[common]]
    if different:
        raise ValueError(
            f"rank {', '.join(map(str, different))} of the group has another batch than rank {common}: ranks that share a "
            "sequence need the same batch; use a data loader that does not depend on the rank (accelerate and Trainer give "
            "every rank other batches), or broadcast the batch"
        )


def _add_to_hash(digest: "hashlib._Hash", value: Any) -> None:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested or hasattr(value, "to_local"):
            raise ValueError(
                "batch contains a sparse or nested tensor or a DTensor: pass the dense tensors that it consists of"
            )
        digest.update(f"{value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().resolve_conj().resolve_neg().flatten().contiguous().view(torch.uint8).numpy().data)
    elif isinstance(value, Mapping):
        digest.update(f"dict {len(value)};".encode())
        for name in sorted(value, key=repr):
            digest.update(f"{name!r};".encode())
            _add_to_hash(digest, value[name])
    elif isinstance(value, (list, tuple)):
        digest.update(f"list {len(value)};".encode())
        for entry in value:
            _add_to_hash(digest, entry)
    elif value is None or isinstance(value, Number | str):
        digest.update(f"{value!r};".encode())
    else:
        raise ValueError(f"batch contains a {type(value).__name__}: it must consist of tensors, dicts, lists and tuples")
