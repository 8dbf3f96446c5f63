"""Read and write the weights of experts in Hugging Face's format.

Our parameters stack the weights of all experts of a layer: (experts, out, in). In Mixtral and Qwen3-MoE, every expert has a
tensor of its own. The names of these tensors follow from a name with {}.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ringattn.train.settings.config import ConfigError


def tensor_names(name: str, count: int) -> list[str]:
    """Return the names of the tensors in the files that contain a parameter with this name, for `count` experts."""
    return [name.format(expert) for expert in range(count)] if "{}" in name else [name]


class OneTensorPerExpert:
    """The tensors of all experts as one tensor, of which some experts can be read, like a slice of safetensors."""

    def __init__(self, files: Mapping[str, Any], names: list[str]) -> None:
        self._slices = [files[name].get_slice(name) for name in names]
        kinds = {f"{x.get_dtype()} {x.get_shape()}" for x in self._slices}
        if len(kinds) > 1:
            raise ConfigError(f"{names[0]} and the same tensors of other experts have different shapes: {', '.join(kinds)}")

    def get_shape(self) -> list[int]:
        return [len(self._slices), *self._slices[0].get_shape()]

    def get_dtype(self) -> str:
        return self._slices[0].get_dtype()

    def __getitem__(self, experts: slice) -> Tensor:
        return torch.stack([x[:] for x in self._slices[experts]])


def open_tensor(files: Mapping[str, Any], name: str, count: int) -> Any:
    """Return the tensor of a parameter, like a slice of safetensors. `files` maps the name of each tensor to its open file."""
    if "{}" in name:
        return OneTensorPerExpert(files, tensor_names(name, count))
    return files[name].get_slice(name)


def exported_tensors(name: str, parts: list[Tensor]) -> dict[str, Tensor]:
    """Return the tensors that an export contains for the parameters with this name."""
    if "{}" in name:
        (weights,) = parts
        # Tensors in a file must not share memory.
        return {each: weight.clone() for each, weight in zip(tensor_names(name, len(weights)), weights, strict=True)}
    return {name: torch.cat(parts)}
