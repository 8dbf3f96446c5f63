"""AdamW and the learning rate as a function of the step."""

import math

import torch
from torch import nn

from ringattn.train.config import OptimConfig


def build(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the model's parameters; matrices decay, norm weights do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = matrices[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas), eps=config.eps, fused=fused)


def warmup(steps: int, config: OptimConfig) -> int:
    """Steps until `lr` is reached: a tenth of all, unless they are given."""
    return steps // 10 if config.warmup_steps is None else config.warmup_steps


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """The learning rate of `step`, counted from 1, in a run of `steps`.

    A straight line from 0 to `lr` over the warmup; then
        cosine: half a cosine from lr to min_lr_ratio * lr at the last step;
        wsd: lr held, then a straight line to min_lr_ratio * lr over the last `decay_fraction` of all steps.
    """
    warmup_steps = warmup(steps, config)
    if step <= warmup_steps:
        return config.lr * step / warmup_steps
    if config.schedule == "cosine":
        share = (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps))) / 2
    else:
        decay = min(round(config.decay_fraction * steps), steps - warmup_steps)
        share = min((steps - step) / max(decay, 1), 1.0)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
