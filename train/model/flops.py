"""Model FLOPs of a training step, and what a device could do: their quotient is the model FLOPs utilisation (MFU).

A multiply-add is 2 FLOPs, and the backward costs twice the forward. A token meets every weight of a matrix once, and a
(query, key) pair every feature of a head twice, in Q K^T and in P V:

    6 * weights * tokens  +  12 * head_dim * heads * layers * pairs

Only pairs that the mask allows count, whatever a kernel computes besides; recomputation in the backward does not count.
"""

import re

import torch

from ringattn.train.model.gpt import GPT

# Dense bf16 FLOP/s from the vendor's data sheets, by name as the driver gives it; the first that matches.
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
    """The weights that tokens are multiplied with, on all ranks together: every matrix but an embedding only looked up."""
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    return matrices - (0 if model.head is None else model.embedding.numel())


def step_flops(model: GPT, tokens: int, pairs: int) -> int:
    """Model FLOPs of an optimizer step on all ranks together.

    tokens: of the step.
    pairs: (query, key) pairs that the mask allows in these tokens, in one head of one layer; for causal attention over
        a sequence of S tokens, S (S + 1) / 2.
    """
    config = model.config
    return 6 * matmul_parameters(model) * tokens + 12 * config.resolved_head_dim * config.heads * config.layers * pairs


def utilisation(flops_per_s: float, peak: float | None) -> dict[str, float | None]:
    """Rates of one device by name: `tflops_per_rank`, and `mfu` of its `peak` FLOP/s, None where that is unknown."""
    return {"tflops_per_rank": flops_per_s / 1e12, "mfu": flops_per_s / peak if peak else None}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of one device; None for a CPU and for a GPU not listed."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for pattern, peak in PEAK_FLOPS if re.search(pattern, name)), None)
