"""Compute log-probabilities in chunks of tokens, because the logits of all tokens would need too much memory."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringattn.kernels.validation import as_integer
from ringattn.transformers.batch import IGNORE, LABELS, RingBatch, document_starts, next_labels, shard_batch

CHUNK_LOGITS = 2**26  # logits of a chunk


def token_logprobs(model: nn.Module, batch: Mapping[str, Any], chunk: int | None = None) -> Tensor:
    """For each token, return the log-probability of the next token, on every rank and with gradients.

    DDP and FSDP average gradients, so all ranks must compute the same loss from the log-probabilities.

    Args:
        model: a model after `put_on_ring`, which may be wrapped by PEFT, DDP or FSDP.
        batch: as for `shard_batch`. Without labels, the labels are all tokens except the first token of each document.
        chunk: the number of tokens whose logits exist at the same time. By default, a chunk has about 2**26 logits.

    Returns:
        (B, S) in fp32, or in fp64 for fp64 models: log p(token t + 1 | tokens up to t), and 0 for tokens without a label.

    Raises:
        ValueError: an argument is invalid, the model is not on a ring, or it changes the logits after its output layer.
    """
    base: Any = next((module for module in model.modules() if hasattr(module, "ring_mesh")), None)
    if base is None:
        raise ValueError(f"{type(model).__name__} is not on a ring: call put_on_ring(model, mesh) first")
    if chunk is not None:
        chunk = as_integer("chunk", chunk, 1)
    if next_labels(batch) is None:
        if batch.get("input_ids") is None:
            raise ValueError("the batch contains neither labels nor input_ids: add the labels of inputs_embeds")
        starts = torch.from_numpy(document_starts(batch)).to(batch["input_ids"].device)
        if batch.get("attention_mask") is not None:
            starts |= batch["attention_mask"] == 0
        batch = {**batch, "labels": batch["input_ids"].masked_fill(starts, IGNORE)}
    arguments = shard_batch(batch, base.ring_mesh)
    labels, *_ = (arguments.pop(name) for name in LABELS)
    chunk = chunk or max(1, CHUNK_LOGITS // base.config.get_text_config().vocab_size)
    with _replaced_head(base.get_output_embeddings(), labels, chunk) as results:
        found = model(**arguments).logits
    if len(results) != 1 or not torch.equal(found, results[0].to(found.dtype)):
        raise ValueError(
            f"{type(base).__name__} changes the logits after its output layer, which token_logprobs does not support"
        )
    return _Gather.apply(found[..., 0], arguments["ring_batch"])


@contextmanager
def _replaced_head(head: nn.Module, labels: Tensor, chunk: int) -> Generator[list[Tensor]]:
    """Let the output layer return log-probabilities (B, N, 1) instead of logits (B, N, V).

    The yielded list collects the results. The output layer is called inside the model, because FSDP gathers its parameters only
    there.
    """
    results: list[Tensor] = []
    forward = head.forward
    is_patched = "forward" in vars(head)

    def replaced(hidden: Tensor) -> Tensor:
        pairs = zip(hidden.flatten(0, 1).split(chunk), labels.flatten().split(chunk), strict=True)
        parts = [checkpoint(partial(_logprobs, forward), *pair, use_reentrant=False) for pair in pairs]
        results.append(torch.cat(parts).view(*labels.shape, 1))
        return results[-1]

    head.forward = replaced
    try:
        yield results
    finally:
        if is_patched:
            head.forward = forward
        else:
            del head.forward


def _logprobs(head: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor) -> Tensor:
    """Return log-probabilities (N,) for labels (N,) and hidden states (N, dim)."""
    logits = head(hidden)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    picked = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0] - logits.logsumexp(-1)
    return picked.masked_fill(labels == IGNORE, 0.0)


class _Gather(torch.autograd.Function):
    """Gather x (B, N) of all ranks into (B, S). DDP and FSDP average gradients, so the backward pass multiplies gradients by
    the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, batch: RingBatch) -> Tensor:  # pyrefly: ignore[bad-override]  # torch declares none
        ctx.batch = batch
        group: Any = batch.group
        return batch.layout.unshard(own.detach(), group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        layout, group = ctx.batch.layout, ctx.batch.group
        rank = 0 if group is None else group.rank()
        return layout.shard(grad_outputs[0], rank) * layout.ranks, None
