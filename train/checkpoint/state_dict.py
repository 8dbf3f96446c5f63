"""The tensors that a checkpoint contains, by name: parameters, optimizer state and random generators."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringattn.train.checkpoint import storage


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model as "model.<name>". The tensors are not copied.

    A weight that two modules share is returned once, under its first name.
    """
    return {f"model.{name}": tensor.detach() for name, tensor in _model_tensors(model).items()}


def train_state(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return the state of the model and of its optimizer. The tensors are not copied.

    An optimizer that has not made a step yet receives the zeros that its first step would create. A checkpoint can then be
    loaded into it.

    `torch.distributed.checkpoint.state_dict` is not used here, because it returns shared weights under each of their names, and
    because its way to create the state of a new optimizer is a step with gradients of zero, which counts as a step.

    Returns:
        `model_state(model)`, and "optim.<parameter>.<exp_avg | exp_avg_sq | step>" for every parameter.
    """
    names = {id(tensor): name for name, tensor in _model_tensors(model).items()}
    tensors = model_state(model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state.update(_zero_state(parameter, on_device=bool(group["fused"] or group["capturable"])))
            tensors |= {f"optim.{names[id(parameter)]}.{key}": value for key, value in state.items()}
    return tensors


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer once, by its first name."""
    tensors, known = {}, set()
    # Unlike named_parameters, state_dict makes FSDP reshard the parameters that an evaluation has left gathered.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            known.add(id(tensor))
            tensors[name] = tensor
    return tensors


def _zero_state(parameter: Tensor, on_device: bool) -> dict[str, Tensor]:
    """Return the state that AdamW creates in its first step. `on_device`: whether it counts steps on the parameter's device."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu"),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


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
