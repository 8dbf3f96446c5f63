"""Compute the cross-entropy from hidden states in chunks of tokens.

Only the logits of one chunk exist at a time, because the logits of a long sequence would need too much memory.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

# The label of tokens that do not contribute to the loss.
IGNORE = -100

# The number of tokens in a chunk, whose logits exist at the same time. With a small vocabulary, a chunk has more tokens and
# about CHUNK_LOGITS logits, because many small kernels would take more time on the host than on the GPU.
CHUNK = 2048
CHUNK_LOGITS = 2**26


def chunk_size(padded_vocab: int) -> int:
    """Return the number of tokens per chunk for a vocabulary of `padded_vocab` rows."""
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

    The sum of the parts over all ranks and micro-steps of an optimizer step is the mean loss of all valid tokens. The sum is
    correct even if ranks have different numbers of tokens. The backward pass recomputes the logits. Recomputing the logits
    costs a fourth matrix product in addition to the usual three matrix products.

    Args:
        hidden: (B, N, dim).
        head: (V, dim), in hidden's dtype. Rows from `vocab_size` on are padding and receive no probability.
        labels: int64 (B, N), the correct next tokens. A token with the label IGNORE does not contribute.
        vocab_size: the number of tokens of the tokenizer.
        num_valid: the number of labels other than IGNORE, over all ranks and micro-steps of the optimizer step.
        chunk: the number of tokens per chunk, by default `chunk_size(V)`. The logits of a chunk need about 14 * chunk * V bytes
            without torch.compile, and 4 to 8 * chunk * V bytes with torch.compile.
        compiled: whether `torch.compile` fuses the operations between the matrix products.

    Returns:
        The loss, an fp32 scalar.
    """
    chunk = chunk or chunk_size(len(head))
    loss = _CrossEntropy.apply(hidden.flatten(0, 1), head, labels.flatten(), vocab_size, chunk, compiled)
    return loss / num_valid


def token_losses(
    hidden: Tensor, head: Tensor, labels: Tensor, vocab_size: int, chunk: int | None = None, compiled: bool = False
) -> Tensor:
    """Return -log softmax(head hidden)[label] for every token as fp32 (B, N), without gradients.

    The loss of a token with the label IGNORE is 0. The arguments have the same meaning as those of `cross_entropy`.
    """
    chunk = chunk or chunk_size(len(head))
    return _chunked_losses(hidden.flatten(0, 1), head, labels.flatten(), vocab_size, chunk, compiled)[1].view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """Computes the sum of lse_t - logit_t[label_t] over valid tokens t. The gradient of the logits is softmax - onehot."""

    @staticmethod
    def forward(ctx, hidden, head, labels, vocab_size, chunk, compiled):
        lse, losses = _chunked_losses(hidden, head, labels, vocab_size, chunk, compiled)
        ctx.save_for_backward(hidden, head, labels, lse)
        ctx.vocab_size, ctx.chunk, ctx.compiled = vocab_size, chunk, compiled
        # Groups of tokens are summed separately, because one fp32 sum over all tokens of a long sequence would be less
        # accurate.
        return sum(part.sum() for part in losses.split(min(chunk, CHUNK)))

    @staticmethod
    def backward(ctx, dloss):
        hidden, head, labels, lse = ctx.saved_tensors
        gradients = _compiled(_gradients) if ctx.compiled else _gradients
        dhidden = torch.empty_like(hidden)
        # The gradient of the head is summed in fp32, because a bf16 sum over many chunks would lose small contributions.
        dhead = torch.zeros_like(head, dtype=torch.float32)
        for rows in _chunks(len(labels), ctx.chunk):
            dlogits = gradients(hidden[rows] @ head.T, labels[rows], lse[rows], dloss, ctx.vocab_size)
            dhidden[rows] = dlogits @ head
            dhead += dlogits.T @ hidden[rows]
        return dhidden, dhead.to(head.dtype), None, None, None, None


def _chunked_losses(
    hidden: Tensor, head: Tensor, labels: Tensor, vocab_size: int, chunk: int, compiled: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the loss of every token, both fp32 (N,). Only the logits of one chunk exist at a time."""
    compute = _compiled(_losses) if compiled else _losses
    lse = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
    losses = torch.empty_like(lse)
    for rows in _chunks(len(labels), chunk):
        lse[rows], losses[rows] = compute(hidden[rows] @ head.T, labels[rows], vocab_size)
    return lse, losses


def _losses(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the loss of every token, in fp32. The loss of an ignored token is 0."""
    logits = _without_padding(logits, vocab_size)
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return lse, torch.where(labels == IGNORE, 0.0, lse - picked)


def _gradients(logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, vocab_size: int) -> Tensor:
    """Return the gradient of the logits, in their dtype."""
    scale = (labels != IGNORE)[:, None] * dloss
    label = labels.clamp(min=0)[:, None]
    lse = lse[:, None]
    gradients = _without_padding(logits - lse, vocab_size).exp_().mul_(scale).to(logits.dtype)
    # Without torch.compile, subtracting a whole one-hot matrix would almost double the time.
    return gradients.scatter_(1, label, ((torch.exp(logits.gather(1, label) - lse) - 1) * scale).to(logits.dtype))


def _without_padding(logits: Tensor, vocab_size: int) -> Tensor:
    logits = logits.float()
    if vocab_size == logits.shape[1]:
        return logits
    return logits.masked_fill(torch.arange(logits.shape[1], device=logits.device) >= vocab_size, float("-inf"))


@lru_cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function)


def _chunks(num_rows: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, num_rows, chunk)]
