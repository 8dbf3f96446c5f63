"""Compute the linear layers of the blocks in FP8 during training steps, with one scale per tensor.

Inputs and weights are rounded to e4m3, and gradients to e5m2 (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433). The
largest element of a tensor becomes the largest number of its format. On CPUs, which have no FP8 products, the layers multiply
the rounded numbers in fp32.

The weights stay in fp32 and keep their names. In a forward pass without gradients, the layers compute in bf16. Evaluations
therefore agree with the exported model. The router and the experts stay in bf16.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import ConfigError, ModelConfig, round_up

# torch._scaled_mm requires that both dimensions of a weight are multiples of 16.
MULTIPLE = 16

# The lowest compute capability (Ada) of GPUs with FP8 matrix products
CAPABILITY = 8, 9

# The smallest magnitude from which a scale is computed, so that a tensor of zeros has a finite scale.
SMALLEST = 1e-12

INPUTS, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


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


def convert(model: GPT) -> None:
    """Convert the linear layers of all blocks to FP8. The parameters stay the same objects.

    Call this function before torch.compile and FSDP.
    """
    for block in model.blocks:
        for layer in block.children():
            if isinstance(layer, nn.Linear):
                # All layers have the same class and attributes, so torch.compile compiles one block for all layers.
                layer.__class__ = Float8Linear


class Float8Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        y: Tensor = _Product.apply(input.flatten(0, -2), self.weight)
        y = y if self.bias is None else y + self.bias
        return y.unflatten(0, input.shape[:-1])


class _Product(torch.autograd.Function):
    """x @ weight.T and its gradients, for x (M, K) and weight (N, K)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]  # torch declares none
        scales = _scale(x, INPUTS), _scale(weight, INPUTS)
        rounded, transposed = _round_both(x, scales[0], INPUTS)
        # The backward pass rounds the weight again, so that FSDP can free the gathered weight.
        ctx.save_for_backward(transposed, weight, *scales)
        return _multiply(rounded, _round(weight, scales[1], INPUTS).t(), scales, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        x, weight, x_scale, weight_scale = ctx.saved_tensors
        scale = _scale(gradient, GRADIENTS)
        rounded, transposed = _round_both(gradient, scale, GRADIENTS)
        columns = _round(weight, weight_scale, INPUTS).t().contiguous().t()
        dx = _multiply(rounded, columns, (scale, weight_scale), gradient.dtype, fast=False)
        return dx, _multiply(transposed, x.t(), (scale, x_scale), weight.dtype, fast=False)


def _scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    # torch.compile can compute the maxima of rows in the kernel that writes x.
    largest = x.abs().amax(-1).amax()
    return torch.finfo(dtype).max / largest.float().clamp(min=SMALLEST)


def _round(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() * scale).to(dtype)


def _multiply(a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool) -> Tensor:
    """Return a @ b, divided by both scales. On GPUs, `a` must be contiguous by rows, and `b` by columns.

    With `fast`, the tensor cores add all terms of a sum with about 14 bits. Weight gradients need more bits, because they are
    sums over all tokens.
    """
    if a.device.type == "cpu":
        # If forward returned x.to(x.dtype), compiled code of torch 2.11 would compute zeros as gradients.
        return ((a.float() / scales[0]) @ (b.float() / scales[1])).to(dtype, copy=True)
    inverse = [scale.reciprocal() for scale in scales]
    return torch._scaled_mm(a, b, inverse[0], inverse[1], out_dtype=dtype, use_fast_accum=fast)


def _empty(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, round_up(rows, MULTIPLE), dtype=dtype)


# Register an operator, because torch.compile's own kernels write transposed matrices slowly.
@torch.library.custom_op("ringattn::round_both", mutates_args=())
def _round_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round scale * x (M, K) to `dtype`, and return the result (M, K) and its transpose (K, M), padded with zeros."""
    rounded, transposed = _empty(x, dtype)
    if x.device.type == "cpu":
        rounded.copy_(_round(x, scale, dtype))
        transposed.zero_()[:, : len(x)] = rounded.t()
    else:
        from ringattn.kernels.triton.round_both import round_both

        round_both(x.contiguous(), scale, rounded, transposed)
    return rounded, transposed


@_round_both.register_fake
def _(x: Tensor, _: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty(x, dtype)
