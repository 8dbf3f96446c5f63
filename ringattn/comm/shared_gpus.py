"""Let several ranks share a GPU if the environment variable RINGATTN_SHARE_GPUS is 1, for tests and learning.

A ring on one GPU uses the same copies, flags and streams as a ring over NVLink. Measured speeds are meaningless. NCCL rejects
two ranks on one GPU, so the process group must use gloo:

    dist.init_process_group("cpu:gloo,cuda:gloo")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
"""

import os

SHARE_GPUS = "RINGATTN_SHARE_GPUS"  # name of the environment variable that allows ranks to share GPUs
# torch reads this variable for symmetric memory.
_OVERLAPPING_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def sharing_is_allowed() -> bool:
    value = os.environ.get(SHARE_GPUS, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{SHARE_GPUS}={value}: it must be 1 to let several ranks use the same GPU, or 0")
    return value == "1"


def allow_shared_memory() -> None:
    os.environ[_OVERLAPPING_DEVICES] = "1"
