"""Compute the model FLOPs of a training step and the model FLOPs utilisation (MFU).

A multiply-add counts as 2 FLOPs, and the backward pass needs twice the FLOPs of the forward pass. The FLOPs of a step are

    6 * weights * tokens  +  12 * head_dim * heads * pairs of all layers

In a mixture of experts, the FLOPs include only the experts that a token uses. Recomputation, and (query, key) pairs that the
mask forbids, do not count.
"""

import re

import torch

from ringattn.train.model.gpt import GPT

# The dense bf16 FLOP/s of GPUs, from NVIDIA's data sheets. The first pattern that matches applies.
PEAK_FLOPS = (
    (r"GB200", 2500e12),
    (r"B200", 2250e12),
    (r"H[12]00 NVL", 835.5e12),
    (r"H100 PCIe", 756e12),
    (r"GH200|H[12]00", 989.4e12),
    (r"\bA100\b", 312e12),
    (r"L40S", 362e12),
    (r"\bL4\b", 121e12),
    (r"\bA10\b", 125e12),
)


def matmul_parameters(model: GPT) -> int:
    """Count the weights that are multiplied with each token, on all ranks."""
    weights = {name: x for name, x in model.named_parameters() if x.ndim >= 2 and not name.endswith("bias")}
    matrices = sum(x.numel() for x in weights.values() if x.ndim == 2)
    experts = sum(x.numel() // len(x) for x in weights.values() if x.ndim == 3)  # one expert of every layer
    matrices += model.config.experts_per_token * experts
    return matrices - (0 if model.head is None else model.embedding.numel())


def step_flops(model: GPT, tokens: int, pairs: int) -> int:
    """Return the model FLOPs of an optimizer step on all ranks together.

    `pairs` counts the (query, key) pairs per head that the masks of all layers allow.
    """
    config = model.config
    return 6 * matmul_parameters(model) * tokens + 12 * config.resolved_head_dim * config.heads * pairs


def utilisation(flops_per_s: float, peak: float | None) -> dict[str, float | None]:
    """Return `tflops_per_rank` and `mfu` of one device. `mfu` is None if `peak` (FLOP/s) is None."""
    return {"tflops_per_rank": flops_per_s / 1e12, "mfu": flops_per_s / peak if peak else None}


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 FLOP/s, or None if unknown."""
    return peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops_of(name: str) -> float | None:
    """Return the dense bf16 FLOP/s, or None if unknown."""
    return next((peak for pattern, peak in PEAK_FLOPS if re.search(pattern, name)), None)
