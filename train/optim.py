"""The AdamW optimizer and the learning-rate schedule."""

import math

import torch
from torch import nn

from ringattn.train.config import OptimConfig


def build(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Build AdamW for the parameters of the model. Weight decay applies only to matrices, not to biases or norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = matrices[0].device.type == "cuda"
    # The learning rate is 0 here, because every step sets the rate that `learning_rate` returns.
    return torch.optim.AdamW(groups, lr=0.0, betas=tuple(config.betas), eps=config.eps, fused=fused)


def default_lr(num_parameters: int, continued: bool) -> float:
    """Return the peak learning rate for a model: 6e-4 for 124 million parameters, and at most 2e-3.

    The rate is inversely proportional to the power 0.4 of the number of parameters. The resulting rates are close to those of
    GPT-3 (Brown et al. 2020, https://arxiv.org/abs/2005.14165, table 2.1). For example, the rate is 2.3e-4 for 1.3 billion
    parameters.

    Args:
        num_parameters: the number of parameters.
        continued: whether the run starts from trained weights. If it does, the rate is a tenth of the usual rate, because a
            large learning rate would destroy the trained weights.
    """
    return min(2e-3, 6e-4 * (124e6 / num_parameters) ** 0.4) / (10 if continued else 1)


def resolve_warmup_steps(steps: int, config: OptimConfig) -> int:
    """Return the number of warmup steps in a run of `steps` steps: `config.warmup_steps`, or by default `steps` / 10."""
    return steps // 10 if config.warmup_steps is None else config.warmup_steps


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Return the learning rate of one step.

    During the warmup, the learning rate rises linearly from 0 to `config.lr`. After the warmup, the learning rate depends on
    `config.schedule`:

        cosine: the learning rate falls along half a cosine, and reaches min_lr_ratio * lr at the last step.
        wsd: the learning rate stays at lr, and then falls linearly to min_lr_ratio * lr during the last `decay_fraction` of all
            steps. The decay never begins before the warmup has ended.

    Args:
        step: the number of the step, from 1 to `steps`.
        steps: the number of steps of the run.
        config: the settings of the schedule.
    """
    warmup_steps = resolve_warmup_steps(steps, config)
    if step <= warmup_steps:
        return config.lr * step / warmup_steps
    # `scale` is 1 at the start of the decay, and falls to 0 at the last step. The decay starts after the warmup ("cosine") or
    # after the stable phase ("wsd").
    if config.schedule == "cosine":
        scale = (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps))) / 2
    else:
        decay_steps = min(round(config.decay_fraction * steps), steps - warmup_steps)
        scale = min((steps - step) / max(decay_steps, 1), 1.0)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * scale)
