"""Cross-entropy from hidden states, in chunks of tokens, so that the logits of a long sequence never exist at once."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

IGNORE = -100  # the label of tokens that do not contribute to the loss
CHUNK = 2048  # tokens whose logits exist at the same time


def cross_entropy(
    hidden: Tensor, head: Tensor, labels: Tensor, vocab_size: int, num_valid: int, chunk: int = CHUNK, compiled: bool = False
) -> Tensor:
    """Return the sum over this rank's valid labels of -log softmax(head hidden)[label], divided by num_valid.

    The sum of this loss over all ranks and micro-steps of an optimizer step is the mean over their valid tokens, even if ranks
    have different numbers of tokens. The backward pass recomputes the logits, which costs a fourth matrix product in addition
    to the usual three.

    Args:
        hidden: (B, N, dim).
        head: (V, dim), in hidden's dtype. Rows from `vocab_size` on are padding and receive no probability.
        labels: int64 (B, N). The label IGNORE means that a token does not contribute.
        vocab_size: the number of tokens of the tokenizer.
        num_valid: the number of labels other than IGNORE, over all ranks and micro-steps of the optimizer step.
        chunk: tokens per chunk. The memory is about 14 bytes * chunk * V, or 4 to 8 bytes * chunk * V if compiled.
        compiled: whether `torch.compile` fuses the operations between the matrix products.

    Returns:
        A fp32 scalar.
    """
    loss = _CrossEntropy.apply(hidden.flatten(0, 1), head, labels.flatten(), vocab_size, chunk, compiled)
    return loss / num_valid


def token_losses(
    hidden: Tensor, head: Tensor, labels: Tensor, vocab_size: int, chunk: int = CHUNK, compiled: bool = False
) -> Tensor:
    """Return -log softmax(head hidden)[label] for every token, fp32 (B, N), without gradients. It is 0 for the label IGNORE.

    Arguments as for `cross_entropy`.
    """
    losses = _compiled(_losses) if compiled else _losses
    flat, flat_labels = hidden.flatten(0, 1), labels.flatten()
    of_chunks = [losses(flat[rows] @ head.T, flat_labels[rows], vocab_size)[1] for rows in _chunks(len(flat), chunk)]
    empty = hidden.new_zeros(0, dtype=torch.float32)  # a rank may have no tokens, and torch.cat requires a tensor
    return torch.cat([empty, *of_chunks]).view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """loss = sum_t (lse_t - logit_t[label_t]) and d logits = softmax - onehot, over valid tokens t."""

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
        # In bf16, the sum over many chunks would lose small contributions.
        dhead = torch.zeros_like(head, dtype=torch.float32)
        for rows in _chunks(len(labels), ctx.chunk):
            dlogits = gradients(hidden[rows] @ head.T, labels[rows], lse[rows], dloss, ctx.vocab_size)
            dhidden[rows] = dlogits @ head
            dhead += dlogits.T @ hidden[rows]
        return dhidden, dhead.to(head.dtype), None, None, None, None


def _losses(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the loss of every token, in fp32. The loss of an ignored token is 0."""
    logits = _without_padding(logits, vocab_size)
    lse = logits.logsumexp(-1)
    picked = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return lse, torch.where(labels == IGNORE, 0.0, lse - picked)


def _gradients(logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, vocab_size: int) -> Tensor:
    """Return the gradient of the logits, in their dtype."""
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
