"""Collect the tensors of a checkpoint by name: parameters, optimizer state and the state of the random generators."""

from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ringattn.train.checkpoint import storage


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model as "model.<name>". The tensors are not copied."""
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def train_state(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return the tensors of `model_state`, and the optimizer state as "optim.<parameter>.<exp_avg | exp_avg_sq | step>".

    Before the optimizer's first step, its state consists of zeros, so that a checkpoint can be loaded.
    """
    # `model_state` comes first, because it makes FSDP shard the parameters that an evaluation has gathered. The optimizer knows
    # only sharded parameters.
    tensors, is_new = model_state(model), not optimizer.state
    states = cast("dict[str, dict[str, Tensor]]", get_optimizer_state_dict(model, optimizer)["state"])
    for name, state in states.items():
        if is_new:
            # PyTorch has created the state with a dummy step, so set the step count to 0.
            state["step"].zero_()
        tensors |= {f"optim.{name}.{key}": tensor for key, tensor in state.items()}
    return tensors


def rng_state() -> dict[str, Tensor]:
    """Return the states of this rank's generators, uint8: "rng.rank<r>.cpu" and, if CUDA is in use, "rng.rank<r>.cuda"."""
    prefix = f"rng.rank{dist.get_rank() if dist.is_initialized() else 0}"
    state = {f"{prefix}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state[f"{prefix}.cuda"] = torch.cuda.get_rng_state()
    return state


def load_rng_state(path: Path) -> bool:
    """Restore this rank's random generators from a checkpoint. All ranks call this function.

    Returns:
        False if another number of ranks saved the checkpoint. The generators are then unchanged.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be read.
    """
    state, saved = rng_state(), storage.read_tensor_names(path)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if f"rng.rank{ranks - 1}.cpu" not in saved or f"rng.rank{ranks}.cpu" in saved:
        return False
    state = {name: generator for name, generator in state.items() if name in saved}
    storage.load(path, state)
    for name, generator in state.items():
        (torch.cuda if name.endswith("cuda") else torch).set_rng_state(generator)
    return True
