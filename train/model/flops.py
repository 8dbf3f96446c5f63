"""Model FLOPs of a training step, and the peak of a device. Their quotient is the model FLOPs utilisation (MFU).

A multiply-add counts as 2 FLOPs, and the backward pass needs twice the FLOPs of the forward pass. The forward pass needs one
multiply-add per token and weight of a matrix. It needs two multiply-adds per (query, key) pair and dimension of a head, in
Q K^T and in P V. The FLOPs of a training step are therefore

    6 * weights * tokens  +  12 * head_dim * heads * layers * pairs

Only pairs that the mask allows count, even if a kernel computes more. Recomputation in the backward pass does not count.
"""

import re

import torch

from ringattn.train.model.gpt import GPT

# The dense bf16 FLOP/s of GPUs, from NVIDIA's data sheets. The first pattern that matches the name of a GPU applies to it.
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
    """Return the number of weights that tokens are multiplied with, on all ranks together.

    These are the weights of all matrices. The embedding counts only if it is also the output matrix.
    """
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    return matrices - (0 if model.head is None else model.embedding.numel())


def step_flops(model: GPT, tokens: int, pairs: int) -> int:
    """Return the model FLOPs of an optimizer step on all ranks together.

    Args:
        model: the model.
        tokens: the number of tokens of the step.
        pairs: the number of (query, key) pairs that the mask allows among these tokens, in one head of one layer. Causal
            attention over a sequence of S tokens has S (S + 1) / 2 pairs.
    """
    config = model.config
    return 6 * matmul_parameters(model) * tokens + 12 * config.resolved_head_dim * config.heads * config.layers * pairs


def utilisation(flops_per_s: float, peak: float | None) -> dict[str, float | None]:
    """Return the rates of one device: `tflops_per_rank`, and `mfu`, which is None if the `peak` FLOP/s is unknown."""
    return {"tflops_per_rank": flops_per_s / 1e12, "mfu": flops_per_s / peak if peak else None}


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 FLOP/s of one device, or None for a CPU and for a GPU that is not in PEAK_FLOPS."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for pattern, peak in PEAK_FLOPS if re.search(pattern, name)), None)
