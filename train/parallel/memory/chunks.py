"""Run the operations of a block in chunks of tokens, except for attention.

In the backward pass, chunks are recomputed one after the other. Only the inputs and outputs of `Block.before` and
`Block.after`, such as q, k and v, exist for all tokens at once. FSDP gathers the parameters once per block. Ranks may have
different numbers of chunks, because chunks do not communicate.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ringattn.checkpointing import is_recomputing
from ringattn.train.model.gpt import GPT

# The default number of tokens per chunk
CHUNK = 16_384

Outputs = Sequence[Tensor | None]
Function = Callable[..., Outputs]


def chunk_blocks(model: GPT, chunk: int) -> None:
    """Let blocks compute at most `chunk` tokens at a time, except for attention. Call this function after `compile_blocks`."""
    for block in cast("list[Any]", model.blocks):
        block.before = partial(run_in_chunks, block, block.before, chunk, False)
        block.after = partial(run_in_chunks, block, block.after, chunk, True)


def run_in_chunks(block: nn.Module, function: Function, chunk: int, is_last: bool, *inputs: Tensor) -> Outputs:
    """Compute function(*inputs) in chunks of tokens. The function may use parameters of `block`.

    The inputs have the shape (B, N, ...). Outputs with at least three dimensions have the shape (B, N, ...), too. Other outputs
    are sums over tokens. With `is_last`, a recomputation of the block computes no outputs.
    """
    if inputs[0].shape[1] <= chunk:
        return function(*inputs)
    is_used = not (is_last and is_recomputing())
    return _InChunks.apply(block, function, chunk, is_used, torch.is_grad_enabled(), len(inputs), *inputs, *block.parameters())


class _InChunks(torch.autograd.Function):
    """Applies a function to chunks of tokens. Gradients of parameters are summed over the chunks in fp32."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  # torch does not declare the parameters
        ctx: Any,
        block: nn.Module,
        function: Function,
        chunk: int,
        is_used: bool,
        is_training: bool,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor | None, ...]:
        inputs = tensors[:count]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.block, ctx.function, ctx.chunk, ctx.needed = block, function, chunk, ctx.needs_input_grad[6 : 6 + count]
        if not is_used:
            return (inputs[0].new_empty(()).expand(inputs[0].shape),)
        outputs: list[Tensor | None] = []
        for rows in _chunks(inputs[0], chunk):
            # Record an autograd graph, because without a graph, FP8 layers and compiled code compute other results. The hooks
            # prevent activation checkpointing from saving the tensors of the chunk's graph.
            with torch.set_grad_enabled(is_training), saved_tensors_hooks(_same, _same):
                parts = function(*_leaves(inputs, rows, ctx.needed))
            outputs = outputs or [_output_like(part, inputs[0]) for part in parts]
            for output, part in zip(outputs, parts, strict=True):
                if output is not None and part is not None:
                    _rows(output, rows).add_(part) if part.ndim <= 2 else _rows(output, rows).copy_(part)
            del parts, part  # The autograd graphs of two chunks must not exist at the same time.
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *douts: Tensor | None) -> tuple[Any, ...]:  # pyrefly: ignore[bad-override]  # torch declares none
        inputs, parameters = ctx.saved_tensors, list(ctx.block.parameters())
        dinputs = [torch.empty_like(x) if is_needed else None for x, is_needed in zip(inputs, ctx.needed, strict=True)]
        sums: list[Tensor | None] = [None] * len(parameters)
        for rows in _chunks(inputs[0], ctx.chunk):
            leaves = _leaves(inputs, rows, ctx.needed)
            parts, grads = _gradients(ctx.function, leaves, parameters, [x if x is None else _rows(x, rows) for x in douts])
            for dinput, part in zip(dinputs, parts, strict=True):
                if dinput is not None and part is not None:
                    dinput[:, rows] = part
            sums = [_add(total, grad) for total, grad in zip(sums, grads, strict=True)]
        dparameters = (None if x is None else x.to(parameter.dtype) for x, parameter in zip(sums, parameters, strict=True))
        return None, None, None, None, None, None, *dinputs, *dparameters


def _gradients(
    function: Function, inputs: list[Tensor], parameters: list[nn.Parameter], douts: Outputs
) -> tuple[Outputs, Outputs]:
    with torch.enable_grad():
        outputs = function(*inputs)
    used = [(out, dout) for out, dout in zip(outputs, douts, strict=True) if out is not None and dout is not None]
    wanted = [x for x in inputs if x.requires_grad]
    targets, gradients = [out for out, _ in used], [dout for _, dout in used]
    grads = iter(torch.autograd.grad(targets, [*wanted, *parameters], gradients, allow_unused=True))
    return [next(grads) if x.requires_grad else None for x in inputs], list(grads)


def _leaves(inputs: Sequence[Tensor], rows: slice, needed: Sequence[bool]) -> list[Tensor]:
    return [x[:, rows].detach().requires_grad_(is_needed) for x, is_needed in zip(inputs, needed, strict=True)]


def _same(x: Tensor) -> Tensor:
    return x


def _add(total: Tensor | None, grad: Tensor | None) -> Tensor | None:
    if total is None or grad is None:
        return total if grad is None else grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
    return total.add_(grad)


def _chunks(x: Tensor, chunk: int) -> Iterator[slice]:
    num_tokens = x.shape[1]
    length = -(-num_tokens // -(-num_tokens // chunk))
    return (slice(start, min(start + length, num_tokens)) for start in range(0, num_tokens, length))


def _rows(x: Tensor, rows: slice) -> Tensor:
    return x[:, rows] if x.ndim > 2 else x


def _output_like(part: Tensor | None, inputs: Tensor) -> Tensor | None:
    if part is None or part.ndim <= 2:
        return None if part is None else torch.zeros_like(part)
    return part.new_empty(*inputs.shape[:2], *part.shape[2:])
