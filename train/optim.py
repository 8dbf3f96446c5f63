"""Build the AdamW optimizer, and compute the learning rate of each step."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ringattn.train.settings.config import OptimConfig


class AdamW(torch.optim.AdamW):
    """AdamW that updates the shards of DTensors as plain tensors.

    Operations on DTensors give the same results, but with them a step takes several times as long on the host.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002  # AdamW declares it
        """Update all parameters. Every parameter must have a gradient."""
        if not self.state:
            super().step()  # The first step creates the state.
            return
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"]]
            averages = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq"))
            tensors = (group["params"], [parameter.grad for parameter in group["params"]], *averages)
            parameters, gradients, exp_avgs, exp_avg_sqs = ([local_shard(x) for x in each] for each in tensors)
            beta1, beta2 = group["betas"]
            adamw(
                parameters,
                gradients,
                exp_avgs,
                exp_avg_sqs,
                [],
                [state["step"] for state in states],
                fused=group["fused"],
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def local_shard(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor unchanged. Call this function under `torch.no_grad()`."""
    return x.to_local() if isinstance(x, DTensor) else x


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Return this rank's shard of each gradient. Call this function under `torch.no_grad()`."""
    return [local_shard(p.grad) for p in model.parameters() if p.grad is not None]


@torch.no_grad()
def squared_norms(model: nn.Module) -> Tensor:
    """Return the squared norm of this rank's shard of each gradient, fp32 (number of parameters,)."""
    norms = torch._foreach_norm(local_gradients(model))
    return torch.stack(norms) ** 2


@torch.no_grad()
def clip_gradients(model: nn.Module, norm: Tensor, limit: float) -> None:
    """Scale all gradients with the norm `norm` so that their norm is at most `limit`. The host does not wait for the GPU."""
    scale = (limit / (norm + 1e-6)).clamp(max=1)
    torch._foreach_mul_(local_gradients(model), scale)


def build(model: nn.Module, config: OptimConfig) -> AdamW:
    """Build AdamW. Weight decay applies only to matrices, not to biases or norms."""
    # The biases of all experts together have two dimensions.
    decayed = {name: p.ndim >= 2 and not name.endswith("bias") for name, p in model.named_parameters()}
    matrices, vectors = ([p for name, p in model.named_parameters() if decayed[name] == kind] for kind in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = matrices[0].device.type == "cuda"
    # The learning rate is 0 here, because every step sets the rate that `learning_rate` returns.
    return AdamW(groups, lr=0.0, betas=(config.betas[0], config.betas[1]), eps=config.eps, fused=fused)


def default_lr(num_parameters: int, qk_norm: bool, continued: bool) -> float:
    """Return the peak learning rate: 6e-4 for 124 million parameters, and at most 2e-3.

    The rate is proportional to the number of parameters to the power -0.4, close to GPT-3 (Brown et al. 2020,
    https://arxiv.org/abs/2005.14165, table 2.1). With `model.qk_norm`, training is stable at 1.75 times this rate, at most
    3e-3. A run that is `continued` from trained weights uses a tenth of this rate, because a large rate would destroy them.
    """
    factor, highest = (1.75, 3e-3) if qk_norm else (1.0, 2e-3)
    rate = min(highest, factor * 6e-4 * (124e6 / num_parameters) ** 0.4)
    return rate / 10 if continued else rate


def resolve_warmup_steps(steps: int, config: OptimConfig) -> int:
    """Return the number of warmup steps: `config.warmup_steps`, or by default `steps` / 10."""
    return steps // 10 if config.warmup_steps is None else config.warmup_steps


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Return the learning rate of a step, which is counted from 1 to `steps`.

    The rate rises linearly to `config.lr` in the warmup. Then it follows `config.schedule`:

        cosine: the rate falls along half a cosine to min_lr_ratio * lr at the last step.
        wsd: the rate stays at lr, and falls linearly to min_lr_ratio * lr during the last `decay_fraction` of all steps.
    """
    assert config.lr is not None
    warmup_steps = resolve_warmup_steps(steps, config)
    if step <= warmup_steps:
        return config.lr * step / warmup_steps
    # `scale` falls from 1 at the start of the decay to 0 at the last step.
    if config.schedule == "cosine":
        scale = (1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps))) / 2
    else:
        decay_steps = min(round(config.decay_fraction * steps), steps - warmup_steps)
        scale = min((steps - step) / max(decay_steps, 1), 1.0)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * scale)
