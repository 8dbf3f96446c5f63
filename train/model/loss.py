"""Compute the cross-entropy from hidden states in chunks of tokens, because all logits would need too much memory."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

# The label of tokens that do not contribute to the loss
IGNORE = -100

# The default number of tokens in a chunk
CHUNK = 2048
CHUNK_LOGITS = 2**26


def chunk_size(padded_vocab: int) -> int:
    return max(CHUNK, CHUNK_LOGITS // padded_vocab)


def cross_entropy(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_valid: int,
    chunk: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """Return this rank's part of the cross-entropy: the sum of -log softmax(head hidden)[label] / num_valid over its labels.

    The sum of the returned losses over all ranks and micro-steps is the mean loss of all valid tokens. The loss and its
    gradients are computed together, before the logits of a chunk are freed.

    Args:
        hidden: (B, N, dim).
        head: (V, dim), in hidden's dtype. Rows from `vocab_size` on are padding and receive no probability.
        labels: int64 (B, N), the next tokens, or IGNORE for tokens without a loss.
        vocab_size: the number of tokens of the tokenizer.
        num_valid: the number of labels other than IGNORE, over all ranks and micro-steps of the optimizer step.
        chunk: the tokens per chunk, by default `chunk_size(V)`. A chunk needs about 12 to 16 * chunk * V bytes, or 4 to 8 *
            chunk * V with torch.compile.
        compiled: whether `torch.compile` fuses the operations between the matrix products.

    Returns:
        The loss, an fp32 scalar.
    """
    chunk = chunk or chunk_size(len(head))
    arguments = hidden.flatten(0, 1), head, labels.flatten(), vocab_size, chunk, compiled
    return _CrossEntropy.apply(*arguments, torch.is_grad_enabled()) / num_valid


def token_losses(
    hidden: Tensor, head: Tensor, labels: Tensor, vocab_size: int, chunk: int | None = None, compiled: bool = False
) -> Tensor:
    """Return -log softmax(head hidden)[label] for every token as fp32 (B, N), without gradients. Tokens with the label IGNORE
    have a loss of 0.

    Arguments as in `cross_entropy`.
    """
    chunk = chunk or chunk_size(len(head))
    return _compute(hidden.flatten(0, 1), head, labels.flatten(), vocab_size, chunk, compiled)[0].view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """Computes the sum of lse_t - logit_t[label_t] over valid tokens t. The gradient of the logits is softmax - onehot."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  # torch does not declare the parameters
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        vocab_size: int,
        chunk: int,
        compiled: bool,
        with_gradients: bool,
    ) -> Any:
        losses, dhidden, dhead = _compute(hidden, head, labels, vocab_size, chunk, compiled, with_gradients)
        ctx.save_for_backward(dhidden, dhead)
        ctx.dtype = head.dtype
        # One fp32 sum over all tokens of a long sequence would be less accurate.
        return sum(part.sum() for part in losses.split(min(chunk, CHUNK)))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (dloss,), (dhidden, dhead) = grad_outputs, ctx.saved_tensors
        # `out` has the dtype of the head, so that no second fp32 matrix is needed.
        dhead = torch.mul(dhead, dloss, out=dhead.new_empty(dhead.shape, dtype=ctx.dtype))
        return dhidden * dloss, dhead, None, None, None, None, None


def _compute(
    hidden: Tensor, head: Tensor, labels: Tensor, vocab_size: int, chunk: int, compiled: bool, with_gradients: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the fp32 loss of every token (N,), and the gradients for `hidden` and `head`, or None."""
    compute = _compiled(_losses) if compiled else _losses
    losses = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
    dhidden = torch.empty_like(hidden) if with_gradients else None
    # Summing many chunks in bf16 would lose small contributions.
    dhead = torch.zeros_like(head, dtype=torch.float32) if with_gradients else None
    for start in range(0, len(labels), chunk):
        rows = slice(start, start + chunk)
        losses[rows], dlogits = compute(hidden[rows] @ head.T, labels[rows], vocab_size, with_gradients)
        if dhidden is not None and dhead is not None and dlogits is not None:
            dhidden[rows] = dlogits @ head
            dhead += dlogits.T @ hidden[rows]
    return losses, dhidden, dhead


def _losses(logits: Tensor, labels: Tensor, vocab_size: int, with_gradients: bool) -> tuple[Tensor, Tensor | None]:
    """Return the fp32 loss of every token, and the gradient of the logits. Ignored tokens have the loss 0."""
    label, is_valid = labels.clamp(min=0)[:, None], (labels != IGNORE)[:, None]
    padded = _without_padding(logits, vocab_size)
    lse = padded.logsumexp(-1, keepdim=True)
    picked = padded.gather(1, label) - lse
    losses = torch.where(is_valid, -picked, 0.0)[:, 0]
    if not with_gradients:
        return losses, None
    # Without torch.compile, subtracting in place saves memory. `logits` must not change, because compiled code would copy it.
    gradients = torch.sub(padded, lse, out=None if padded is logits else padded).exp_().mul_(is_valid).to(logits.dtype)
    # Without torch.compile, subtracting a whole one-hot matrix would almost double the time.
    return losses, gradients.scatter_(1, label, ((picked.exp() - 1) * is_valid).to(logits.dtype))


def _without_padding(logits: Tensor, vocab_size: int) -> Tensor:
    logits = logits.float()
    if vocab_size == logits.shape[1]:
        return logits
    return logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= vocab_size, float("-inf"))


@lru_cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
