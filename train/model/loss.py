"""Token-weighted cross-entropy from hidden states, by chunks: the logits of a long sequence never exist at once."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

IGNORE = -100  # a label that no loss is taken on
CHUNK = 2048  # tokens whose logits are held at a time


def cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, vocab_size: int, num_valid: int, chunk: int = CHUNK, compiled: bool = False
) -> Tensor:
    """sum over this rank's valid labels of -log softmax(head hidden)[label] / num_valid.

    Summed over the ranks and micro-steps that share `num_valid`, this is the mean over their valid tokens, however
    unevenly they are spread. Logits are recomputed in the backward, a fourth matrix product beside the usual three.

    Args:
        hidden: (B, N, dim).
        head: (V, dim), of hidden's dtype; rows from `vocab_size` on are padding and get no probability.
        labels: int64 (B, N), IGNORE where there is nothing to learn.
        num_valid: labels other than IGNORE, over all ranks and micro-steps of the optimizer step.
        chunk: tokens at a time; memory is about 14 bytes * chunk * V, compiled 4 to 8 by dtype.
        compiled: whether what happens between matrix products is fused by `torch.compile`.

    Returns:
        fp32 scalar.
    """
    loss = _CrossEntropy.apply(hidden.flatten(0, 1), head, labels.flatten(), vocab_size, chunk, compiled)
    return loss / num_valid


def token_losses(
    hidden: Tensor, head: Tensor, labels: Tensor, vocab_size: int, chunk: int = CHUNK, compiled: bool = False
) -> Tensor:
    """-log softmax(head hidden)[label] of every token, fp32 (B, N), 0 where the label is IGNORE; without gradients.

    Args: as those of `cross_entropy`.
    """
    losses = _compiled(_losses) if compiled else _losses
    flat, flat_labels = hidden.flatten(0, 1), labels.flatten()
    of_chunks = [losses(flat[rows] @ head.T, flat_labels[rows], vocab_size)[1] for rows in _chunks(len(flat), chunk)]
    empty = hidden.new_zeros(0, dtype=torch.float32)  # a rank may hold no token
    return torch.cat([empty, *of_chunks]).view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """Loss = sum_t lse_t - logit_t[label_t]; d logits = softmax - onehot, at valid tokens."""

    @staticmethod
    def forward(ctx, hidden, head, labels, vocab_size, chunk, compiled):
        losses = _compiled(_losses) if compiled else _losses
        lse = torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(len(labels), chunk):
            lse[rows], of_rows = losses(hidden[rows] @ head.T, labels[rows], vocab_size)
            loss += of_rows.sum()
        ctx.save_for_backward(hidden, head, labels, lse)
        ctx.vocab_size, ctx.chunk, ctx.compiled = vocab_size, chunk, compiled
        return loss

    @staticmethod
    def backward(ctx, dloss):
        hidden, head, labels, lse = ctx.saved_tensors
        gradients = _compiled(_gradients) if ctx.compiled else _gradients
        dhidden = torch.empty_like(hidden)
        dhead = torch.zeros_like(head, dtype=torch.float32)  # over many chunks bf16 would lose the small ones
        for rows in _chunks(len(labels), ctx.chunk):
            dlogits = gradients(hidden[rows] @ head.T, labels[rows], lse[rows], dloss, ctx.vocab_size)
            dhidden[rows] = dlogits @ head
            dhead += dlogits.T @ hidden[rows]
        return dhidden, dhead.to(head.dtype), None, None, None, None


def _losses(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """lse and loss of every row, in fp32; the loss of an ignored one is 0."""
    logits = _without_padding(logits, vocab_size)
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return lse, torch.where(labels == IGNORE, 0.0, lse - picked)


def _gradients(logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, vocab_size: int) -> Tensor:
    """The gradients of the logits, in their dtype."""
    onehot = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    valid = (labels != IGNORE)[:, None]
    probabilities = torch.exp(_without_padding(logits, vocab_size) - lse[:, None])
    return ((probabilities - onehot.float()) * (valid * dloss)).to(logits.dtype)


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
