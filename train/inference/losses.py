"""Compute the loss on held-out text at several sequence lengths."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist

from ringattn.train.checkpoint.progress import progress_bar, show_progress
from ringattn.train.data.targets import Targets
from ringattn.train.model.loss import token_losses
from ringattn.train.parallel.mesh import causal_masks, choose_layout
from ringattn.train.reports.loss_results import Losses, to_metrics
from ringattn.train.setup import InferenceRun
from ringattn.train.step import forward, until_stopped

# The shortest length at which a model is evaluated by default.
SHORTEST_LENGTH = 64


@torch.no_grad()
def evaluate_lengths(run: InferenceRun, lengths: list[int], show_bar: bool = False) -> Losses:
    """Compute the loss of the same target tokens at several lengths. All ranks call this function and return the same losses.

    Args:
        lengths: in tokens, in ascending order, and at most `data.seq_len`.
        show_bar: whether rank 0 shows a progress bar, or logs the progress of a long evaluation.

    Raises:
        StoppedEarly: on every rank, if any rank was asked to stop.
    """
    data, dp, size = run.config.data, run.mesh.dp, run.config.trainer.batch_size
    assert run.held_out is not None
    targets = Targets(run.held_out, data.seq_len, lengths, run.config.trainer.eval_tokens, data.mask_documents)
    # Each row contains the sum of the losses and the number of tokens of a group. The last row collects all tokens that are not
    # target tokens.
    sums = torch.zeros(targets.num_groups + 1, 2, dtype=torch.float64, device=run.device)
    loss_fn = partial(token_losses, vocab_size=run.tokenizer.vocab_size, compiled=run.compiled)
    offset = dp.get_local_rank() * size
    # Every batch communicates, so all ranks process the same number of batches.
    starts = range(offset, offset + targets.num_sequences, dp.size() * size)
    count, launched = len(starts), 0
    verbs, total = ("evaluating", "evaluated"), targets.num_sequences * data.seq_len
    # `until_stopped` launches a batch before the previous one is complete.
    shown = show_progress(verbs, "held-out text", total, lambda: max(launched - 2, 0) / count, unit="tokens")
    with nullcontext() if show_bar else shown:
        for start in until_stopped(run, progress_bar(starts, "batches") if show_bar else starts):
            launched += 1
            batch, groups = targets.batch(range(start, start + size))
            masks = causal_masks(run.config.model, batch.documents)
            layout = choose_layout(run.config, run.mesh.shape, masks)
            losses = forward(run, batch, masks, layout, loss_fn).double().flatten()
            groups = layout.shard(groups, run.mesh.sequence.get_local_rank()).to(run.device).flatten()
            sums.index_add_(0, groups, torch.stack([losses, torch.ones_like(losses)], 1))
        dist.all_reduce(sums)
        losses, tokens = sums[:-1].cpu().numpy().T.reshape(2, len(lengths), -1)
    assert (tokens == targets.tokens).all(), "the losses at all lengths must be means over the same target tokens"
    return Losses(lengths, targets.tokens, losses, targets.checksum)


def evaluate(run: InferenceRun) -> dict[str, float]:
    """Return the losses on held-out text at the default lengths, as metrics (`loss_results.to_metrics`). Errors as above."""
    data = run.config.data
    return to_metrics(evaluate_lengths(run, default_lengths(data.seq_len, data.source)))


def default_lengths(seq_len: int, source: str) -> list[int]:
    """Return the default lengths of an evaluation: SHORTEST_LENGTH times powers of 4, and `seq_len`.

    For the recall task, which has its own evaluation, return only `seq_len`.
    """
    lengths = [SHORTEST_LENGTH]
    while lengths[-1] < seq_len:
        lengths.append(4 * lengths[-1])
    return [*(lengths[:-1] if source != "recall" else []), seq_len]
