"""Let several ranks use the same GPU, for tests and for learning.

By default, every rank requires its own GPU. If the environment variable RINGATTN_SHARE_GPUS is 1 on all ranks, several ranks
may use the same GPU. Their rings then use the same copies, flags and streams as rings over NVLink, but every copy stays inside
the GPU. The results are the same as on several GPUs. The measured speeds are meaningless, because the ranks compete for the
GPU.

NCCL rejects two ranks on one GPU. The process group must therefore use gloo for tensors on GPUs:

    dist.init_process_group("cpu:gloo,cuda:gloo")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
"""

import os

SHARE_GPUS = "RINGATTN_SHARE_GPUS"  # name of the environment variable that allows ranks to share GPUs
# If this variable of torch is 1, several processes may share symmetric memory of one GPU. Torch reads the variable whenever
# processes exchange the addresses of symmetric memory.
_OVERLAPPING_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def sharing_is_allowed() -> bool:
    """Return whether the user allows several ranks to use the same GPU.

    Raises:
        ValueError: the value of the environment variable is neither 0 nor 1.
    """
    value = os.environ.get(SHARE_GPUS, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{SHARE_GPUS}={value}: it must be 1 to let several ranks use the same GPU, or 0")
    return value == "1"


def allow_shared_memory() -> None:
    """Make torch accept symmetric memory of several processes on one GPU."""
    os.environ[_OVERLAPPING_DEVICES] = "1"
