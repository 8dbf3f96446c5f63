"""Token-weighted cross-entropy from hidden states, by chunks: the logits of a long sequence never exist at once."""

import torch
from torch import Tensor

from train.data import IGNORE

CHUNK = 2048  # tokens whose logits are held at a time


def cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor, vocab_size: int, num_valid: int, chunk: int = CHUNK) -> Tensor:
    """sum over this rank's valid labels of -log softmax(head hidden)[label] / num_valid.

    Summed over the ranks and micro-steps that share `num_valid`, this is the mean over their valid tokens, however
    unevenly they are spread. Logits are recomputed in the backward, a fourth matrix product beside the usual three.

    Args:
        hidden: (B, N, dim).
        head: (V, dim), of hidden's dtype; rows from `vocab_size` on are padding and get no probability.
        labels: int64 (B, N), IGNORE where there is nothing to learn.
        num_valid: labels other than IGNORE, over all ranks and micro-steps of the optimizer step.
        chunk: tokens at a time; memory is about 8 bytes * chunk * V.

    Returns:
        fp32 scalar.
    """
    return _CrossEntropy.apply(hidden.flatten(0, 1), head, labels.flatten(), vocab_size, chunk) / num_valid


def _logits(hidden: Tensor, head: Tensor, vocab_size: int) -> Tensor:
    logits = (hidden @ head.T).float()
    logits[:, vocab_size:] = float("-inf")
    return logits


class _CrossEntropy(torch.autograd.Function):
    """Loss = sum_t lse_t - logit_t[label_t]; d logits = softmax - onehot, at valid tokens."""

    @staticmethod
    def forward(ctx, hidden, head, labels, vocab_size, chunk):
        lse = torch.zeros(len(labels), dtype=torch.float32, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for rows in _chunks(len(labels), chunk):
            logits, valid = _logits(hidden[rows], head, vocab_size), labels[rows] != IGNORE
            lse[rows] = logits.logsumexp(-1)
            picked = logits.gather(-1, labels[rows].clamp(min=0)[:, None])[:, 0]
            loss += ((lse[rows] - picked) * valid).sum()
        ctx.save_for_backward(hidden, head, labels, lse)
        ctx.vocab_size, ctx.chunk = vocab_size, chunk
        return loss

    @staticmethod
    def backward(ctx, dloss):
        hidden, head, labels, lse = ctx.saved_tensors
        dhidden = torch.empty_like(hidden)
        dhead = torch.zeros_like(head, dtype=torch.float32)  # over many chunks bf16 would lose the small ones
        for rows in _chunks(len(labels), ctx.chunk):
            target, valid = labels[rows].clamp(min=0)[:, None], (labels[rows] != IGNORE)[:, None]
            dlogits = torch.exp(_logits(hidden[rows], head, ctx.vocab_size) - lse[rows, None])
            dlogits.scatter_add_(-1, target, torch.full_like(lse[rows, None], -1.0))
            dlogits = (dlogits * (valid * dloss)).to(hidden.dtype)
            dhidden[rows] = dlogits @ head
            dhead += dlogits.T @ hidden[rows]
        return dhidden, dhead.to(head.dtype), None, None, None


def _chunks(num_rows: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, num_rows, chunk)]
