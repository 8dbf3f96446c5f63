"""Build the AdamW optimizer, and compute the learning rate of each step."""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ringattn.train.parallel.shard import local_shard
from ringattn.train.settings.config import MOMENT_BLOCK, ConfigError, OptimConfig

AVERAGES = ("exp_avg", "exp_avg_sq")  # the state of AdamW that has the shape of the parameter


class AdamW(torch.optim.AdamW):
    """AdamW that updates the shards of DTensors as plain tensors.

    Updating the DTensors themselves gives the same results, but takes the host several times as long.

    A parameter group with an entry "host" contains parameters in host memory. The entry "host" contains the index of the FSDP
    group.
    """

    @torch.no_grad()
    def create_state(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = self._zero_state(parameter, group)

    def _zero_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        device = local_shard(parameter).device if group["fused"] else "cpu"
        step = torch.zeros((), dtype=torch.float32, device=device)
        return {"step": step} | {key: torch.zeros_like(parameter) for key in AVERAGES}

    def step(self, closure: None = None) -> None:  # noqa: ARG002  # AdamW declares it
        """Update all parameters that are not in host memory. Every updated parameter needs a gradient."""
        if not self.state:
            self.create_state()
        for group in self.param_groups:
            if group.get("host") is None:
                self._update(group, [parameter.grad for parameter in group["params"]])

    def update_host_group(self, index: int, gradients: Mapping[Tensor, Tensor]) -> None:
        """Update the parameters of FSDP group `index` on the CPU, with the group's local gradients."""
        for group in self.param_groups:
            if group.get("host") == index:
                self._update(group, [gradients[parameter] for parameter in group["params"]])

    @torch.no_grad()
    def _update(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        states = [self.state[parameter] for parameter in group["params"]]
        averages = ([state[key] for state in states] for key in AVERAGES)
        tensors = ([local_shard(x) for x in each] for each in (group["params"], gradients, *averages))
        parameters, gradients, exp_avgs, exp_avg_sqs = tensors
        steps = [state["step"] for state in states]
        beta1, beta2 = group["betas"]
        options = {name: group[name] for name in ("fused", "amsgrad", "lr", "weight_decay", "eps", "maximize")}
        adamw(parameters, gradients, exp_avgs, exp_avg_sqs, [], steps, beta1=beta1, beta2=beta2, **options)


class AdamW8bit(AdamW):
    """AdamW that stores moments of matrices in 8 bits, with torchao. All other moments are fp32.

    A parameter group with the entry "quantised" contains matrices whose rows have a multiple of MOMENT_BLOCK elements. Each
    8-bit moment consists of codes and scales. The codes are uint8 with the shape of the parameter. The scales are fp32 (rows,
    blocks per row). Codes and scales are sharded like the parameter.

    Args:
        compiled: whether torch.compile fuses the update of a matrix. Without torch.compile, the update needs several fp32
            copies of the matrix.
    """

    def __init__(self, groups: list[dict[str, Any]], compiled: bool, **options: Any) -> None:
        super().__init__(groups, **options)
        adam, moment_type, quantised_map = import_torchao()
        self._compute: Any = torch.compile(adam, fullgraph=True, dynamic=False) if compiled else adam
        device = local_shard(groups[0]["params"][0]).device
        self._moment: Any = partial(moment_type, dtype=torch.float32)
        self._maps = [torch.tensor(quantised_map(signed=signed), device=device) for signed in (True, False)]

    def _zero_state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if not group["quantised"]:
            return super()._zero_state(parameter, group)
        state = {"step": torch.zeros((), dtype=torch.float32, device="cpu")}
        for key in AVERAGES:
            state[f"{key}.codes"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state[f"{key}.scale"] = torch.zeros_like(parameter.flatten(1)[:, ::MOMENT_BLOCK])
        return state

    @torch.no_grad()
    def _update(self, group: dict[str, Any], gradients: list[Tensor]) -> None:
        if not group["quantised"]:
            super()._update(group, gradients)
            return
        beta1, beta2 = group["betas"]
        options = torch.tensor(group["lr"], device="cpu"), beta1, beta2, group["weight_decay"], group["eps"], True, False
        # The number of recompilations needs no limit, because the number of different shapes is fixed.
        with torch._dynamo.utils.disable_cache_limit():
            for parameter, gradient in zip(group["params"], gradients, strict=True):
                state = self.state[parameter]
                state["step"] += 1
                if not len(local_shard(parameter)):  # The other ranks have all rows.
                    continue
                moments = [
                    self._moment(local_shard(state[f"{key}.codes"]), local_shard(state[f"{key}.scale"]).view(-1), *kind)
                    for key, *kind in zip(AVERAGES, self._maps, (True, False), strict=True)
                ]
                self._compute(local_shard(parameter), local_shard(gradient), state["step"], *moments, None, *options)


def import_torchao() -> tuple[Any, Any, Any]:
    """Return torchao's `single_param_adam`, `OptimState8bit` and `create_dynamic_map`.

    Raises:
        ConfigError: torchao is not installed, or does not suit the version of torch.
    """
    logging.disable(logging.WARNING)  # torchao warns about kernels for other formats.
    try:
        from torchao.optim.adam import single_param_adam
        from torchao.optim.quant_utils import create_dynamic_map
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError as error:
        raise ConfigError(
            f"memory.moments=8bit requires torchao ({error}): install it with pip install 'ringattn[torchao]', or use fp32"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return single_param_adam, OptimState8bit, create_dynamic_map


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Call this function under `torch.no_grad()`."""
    return [local_shard(p.grad) for p in model.parameters() if p.grad is not None]


@torch.no_grad()
def squared_norms(model: nn.Module, host_norms: Mapping[Tensor, Tensor] | None = None) -> Tensor:
    """Return the squared norms of this rank's gradient shards, fp32 (number of parameters,).

    `host_norms` contains the norms of the parameters whose gradients are in host memory.
    """
    norms, host_norms = iter(torch._foreach_norm(gradients) if (gradients := local_gradients(model)) else ()), host_norms or {}
    # Sum in a fixed order, so that the rounding errors are always the same.
    ordered = [next(norms) if p.grad is not None else host_norms[p] for p in model.parameters()]
    return torch.stack(ordered) ** 2


def clip_scale(norm: Tensor, limit: float | None) -> Tensor:
    """Return the factor that reduces a gradient norm to at most `limit`, or 1 if `limit` is None."""
    return torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1)


@torch.no_grad()
def scale_gradients(model: nn.Module, scale: Tensor) -> None:
    """Multiply all gradients that are not in host memory by `scale`. The host does not wait for the GPU."""
    if gradients := local_gradients(model):
        torch._foreach_mul_(gradients, scale)


def build(
    model: nn.Module,
    config: OptimConfig,
    host_groups: Sequence[Sequence[Tensor]] = (),
    moments: str = "fp32",
    compiled: bool = False,
) -> AdamW:
    """Build AdamW. Weight decay applies only to matrices, not to biases or norms.

    Args:
        host_groups: the parameters of each FSDP group in host memory.
        moments: "fp32" or "8bit".
        compiled: whether torch.compile fuses updates with 8-bit moments.
    """
    # The biases of all experts together have two dimensions.
    decayed = {p: p.ndim >= 2 and not name.endswith("bias") for name, p in model.named_parameters()}
    host = {p: index for index, parameters in enumerate(host_groups) for p in parameters}
    groups = list[dict[str, Any]]()
    for index in (None, *range(len(host_groups))):
        for kind, decay in ((True, config.weight_decay), (False, 0.0)):
            parameters = [p for p in decayed if decayed[p] == kind and host.get(p) == index]
            groups.append({"params": parameters, "weight_decay": decay, "host": index, "quantised": kind and moments == "8bit"})
    # The learning rate is 0 here, because every step sets it.
    options: dict[str, Any] = {"lr": 0.0, "betas": (config.betas[0], config.betas[1]), "eps": config.eps, "fused": True}
    optimizer = AdamW8bit(groups, compiled, **options) if moments == "8bit" else AdamW(groups, **options)
    optimizer.create_state()
    return optimizer


def default_lr(num_parameters: int, qk_norm: bool, continued: bool) -> float:
    """Return the peak learning rate: 6e-4 for 124 million parameters, and at most 2e-3.

    Similar to GPT-3 (Brown et al. 2020, https://arxiv.org/abs/2005.14165, table 2.1), larger models have lower rates. With
    `model.qk_norm`, the rate is 1.75 times as high, at most 3e-3. Runs that start from trained weights use a tenth of the rate.
    A larger learning rate would destroy trained weights.
    """
    factor, highest = (1.75, 3e-3) if qk_norm else (1.0, 2e-3)
    rate = min(highest, factor * 6e-4 * (124e6 / num_parameters) ** 0.4)
    return rate / 10 if continued else rate


def resolve_warmup_steps(steps: int, config: OptimConfig) -> int:
    """Return the number of warmup steps: `config.warmup_steps`, or by default `steps` / 10."""
    return steps // 10 if config.warmup_steps is None else config.warmup_steps


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Return the learning rate of a step. Steps are counted from 1 to `steps`.

    The learning rate rises linearly to `config.lr` in the warmup, and then follows `config.schedule`:

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
