"""The tensors that a checkpoint contains, by name: parameters, optimizer state and random generators."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ringattn.train.checkpoint import storage


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model as "model.<name>". The tensors are not copied."""
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def train_state(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return the state of the model and of its optimizer. The tensors are not copied.

    An optimizer that has not made a step yet receives the zeros that its first step would create. A checkpoint can then be
    loaded into it.

    Returns:
        `model_state(model)`, and "optim.<parameter>.<exp_avg | exp_avg_sq | step>" for every parameter.
    """
    # The state dict of the model must be made first, because it makes FSDP reshard the parameters that an evaluation has left
    # gathered. The optimizer knows only the sharded parameters.
    tensors, is_new = model_state(model), not optimizer.state
    for name, state in get_optimizer_state_dict(model, optimizer)["state"].items():
        if is_new:
            # PyTorch creates the state by a step with gradients of zero, which has incremented this number.
            state["step"].zero_()
        tensors |= {f"optim.{name}.{key}": tensor for key, tensor in state.items()}
    return tensors


def rng_state() -> dict[str, Tensor]:
    """Return the state of this rank's random generators.

    Returns:
        "rng.rank<r>.cpu", and "rng.rank<r>.cuda" if CUDA is in use, as uint8 tensors.
    """
    prefix = f"rng.rank{dist.get_rank() if dist.is_initialized() else 0}"
    state = {f"{prefix}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state[f"{prefix}.cuda"] = torch.cuda.get_rng_state()
    return state


def load_rng_state(path: Path) -> bool:
    """Restore this rank's random generators from the checkpoint at `path`, as far as they were in use then and are now.

    All ranks call this function.

    Returns:
        Whether the generators were restored. If the checkpoint was saved by another number of ranks, nothing is restored.

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
