"""Read and write the weights of experts in Hugging Face's format.

Our models store the weights of all experts of a layer in one parameter (experts, out, in). The name of a parameter
(`families.weight_name`) shows how the files store its weights:

    mlp.experts.{}.up_proj         one tensor per expert, as in Mixtral and Qwen3-MoE
    mlp.experts.gate_up_proj:1     column 1, 3, 5, ... of (experts, in, 2 * out), as in gpt-oss
    mlp.experts.down_proj:         all columns of (experts, in, out)

OpenAI's gpt-oss models store these weights in MXFP4 (OCP Microscaling Formats 1.0), as `<name>_blocks` and `<name>_scales`.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor

from ringattn.train.settings.config import ConfigError

# MXFP4 has 16 numbers, namely the numbers in FP4 and their negatives. Each group of 32 MXFP4 numbers shares one scale.
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS = 127


def tensor_names(name: str, count: int, files: Container[str]) -> list[str]:
    """Return the names of the tensors in `files` that store the parameter `name` of `count` experts."""
    base, colon, _ = name.partition(":")
    if not colon:
        return [name.format(expert) for expert in range(count)] if "{}" in name else [name]
    return [f"{base}_blocks", f"{base}_scales"] if f"{base}_blocks" in files else [base]


def open_tensor(files: Mapping[str, Any], name: str, count: int) -> Any:
    """Return the parameter `name` as an object like a safetensors slice. `files` maps tensor names to open files."""
    slices = [files[each].get_slice(each) for each in tensor_names(name, count, files)]
    if "{}" in name:
        return OneTensorPerExpert(name, slices)
    return JoinedExperts(slices, name.partition(":")[2]) if ":" in name else slices[0]


class OneTensorPerExpert:
    """Presents the tensors of all experts as a single tensor (experts, ...)."""

    def __init__(self, name: str, slices: list[Any]) -> None:
        self._slices = slices
        kinds = {f"{x.get_dtype()} {x.get_shape()}" for x in slices}
        if len(kinds) > 1:
            raise ConfigError(
                f"{name.format(0)} and the same tensors of other experts have different shapes: {', '.join(kinds)}"
            )

    def get_shape(self) -> list[int]:
        return [len(self._slices), *self._slices[0].get_shape()]

    def get_dtype(self) -> str:
        return self._slices[0].get_dtype()

    def __getitem__(self, experts: slice) -> Tensor:
        return torch.stack([x[:] for x in self._slices[experts]])


class JoinedExperts:
    """Reads a weight (experts, out, in) or a bias (experts, out) of gpt-oss, for all or some experts.

    Args:
        slices: one tensor, or its blocks and its scales in MXFP4.
        part: "0" reads the even columns, "1" the odd columns, and "" all columns.
    """

    def __init__(self, slices: list[Any], part: str) -> None:
        self._slices, self._outputs = slices, slice(int(part), None, 2) if part else slice(None)

    def get_shape(self) -> list[int]:
        shape = self._slices[0].get_shape()
        if len(self._slices) == 2:
            if shape[3:] != [16] or self._slices[1].get_shape() != shape[:3]:
                return shape
            shape = [*shape[:2], 32 * shape[2]]
        elif len(shape) == 3:
            shape = [shape[0], shape[2], shape[1]]
        return [shape[0], *(len(range(size)[self._outputs]) for size in shape[1:2]), *shape[2:]]

    def get_dtype(self) -> str:
        kinds = " and ".join(x.get_dtype() for x in self._slices)
        return "BF16" if kinds == "U8 and U8" else kinds

    def __getitem__(self, experts: slice) -> Tensor:
        parts = [x[experts] for x in self._slices]
        weights = dequantize(*parts) if len(parts) == 2 else parts[0].mT if parts[0].ndim == 3 else parts[0]
        return weights[:, self._outputs] if weights.ndim > 1 else weights


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Convert MXFP4 numbers to bf16 (..., 32 * groups). The conversion is exact, except for numbers too small for bf16.

    Args:
        blocks: uint8 (..., groups, 16). Each byte contains two numbers, the first one in its lower four bits.
        scales: uint8 (..., groups). A scale s multiplies its group by 2 ** (s - 127).
    """
    numbers = torch.tensor([*FP4, *(-x for x in FP4)], dtype=torch.float32, device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.ldexp(numbers[halves.int()], scales[..., None].int() - SCALE_BIAS).flatten(-2).bfloat16()


def exported_tensors(parameters: Mapping[str, list[Tensor]]) -> dict[str, Tensor]:
    """Combine parameters into exported tensors. The argument `parameters` maps Hugging Face's names to our parameters."""
    tensors: dict[str, Tensor] = {}
    for name, parts in parameters.items():
        base, colon, part = name.partition(":")
        if "{}" in name:
            # safetensors rejects tensors that share memory.
            tensors |= {name.format(expert): weight.clone() for expert, weight in enumerate(parts[0])}
        elif not colon:
            tensors[name] = torch.cat(parts)
        elif part != "1":
            pair = [parts[0], *(parameters[f"{base}:1"] if part else [])]
            weights = torch.stack(pair, 2).flatten(1, 2) if part else pair[0]
            tensors[base] = weights.mT.contiguous() if weights.ndim == 3 else weights
    return tensors
