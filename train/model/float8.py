"""Compute the linear layers of the blocks in FP8 during training steps, with one scale per tensor (torchao).

The weights stay in fp32 and keep their names. In a forward pass without gradients, the layers compute in bf16. Evaluations
therefore agree with the exported model. The router and the experts stay in bf16.
"""

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import ConfigError, ModelConfig

# torch._scaled_mm requires that both dimensions of a weight are multiples of 16.
MULTIPLE = 16

# GPUs of this compute capability (Ada) or newer have FP8 matrix products.
CAPABILITY = 8, 9


def check(model: ModelConfig, device: torch.device, bf16: bool) -> None:
    """Raise ConfigError unless the device and the shapes of the model support FP8. No GPU memory is allocated."""
    advice = "or leave trainer.float8 out"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        raise ConfigError(
            f"trainer.float8=true requires a GPU of compute capability 8.9 or newer, but this rank has {name}: use another "
            f"GPU, {advice}"
        )
    if not bf16:
        raise ConfigError(f"trainer.float8=true requires bf16: set trainer.precision=bf16, {advice}")
    sizes = {
        "model.dim": model.dim,
        "model.heads x head_dim": model.heads * model.resolved_head_dim,
        "model.kv_heads x head_dim": model.kv_heads * model.resolved_head_dim,
        **({"model.ffn_dim": model.resolved_ffn_dim} if model.experts is None else {}),
    }
    for name, size in sizes.items():
        if size % MULTIPLE:
            raise ConfigError(
                f"trainer.float8=true requires multiples of {MULTIPLE}, but {name} is {size}: change it, {advice}"
            )
    _import_torchao()


def convert(model: GPT, emulate: bool = False) -> None:
    """Convert the linear layers of all blocks to FP8. The parameters stay the same objects.

    Call this function before torch.compile and FSDP. For tests, `emulate` multiplies the FP8 numbers in fp32, which is slow.
    """
    torchao = _import_torchao()
    # Weight gradients sum over the tokens. Padding allows any number of tokens.
    config = torchao.Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    for block in model.blocks:
        torchao.convert_to_float8_training(block, config=config, module_filter_fn=_is_outside_experts)
        for layer in block.children():
            if isinstance(layer, nn.Linear):
                layer.__class__ = _training_linear(type(layer))


@cache
def _training_linear(float8_linear: Any) -> Any:
    """Return a subclass of torchao's layer that computes without FP8 if there are no gradients.

    All layers have the same class and the same attributes. Therefore torch.compile compiles one block for all layers.
    """

    class TrainingLinear(float8_linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if torch.is_grad_enabled() else F.linear(x, self.weight, self.bias)

    return TrainingLinear


def _is_outside_experts(_: nn.Module, name: str) -> bool:
    return not name.startswith("experts.")


def _import_torchao() -> Any:
    """Import torchao, which is optional, without its warnings about kernels for other formats.

    Raises:
        ConfigError: torchao is not installed, or does not suit this version of torch.
    """
    logging.disable(logging.WARNING)
    try:
        import torchao.float8
    except ImportError as error:
        raise ConfigError(
            f"trainer.float8=true requires torchao ({error}): install it with pip install 'ringattn[torchao]', or leave "
            "trainer.float8 out"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
    return torchao.float8
