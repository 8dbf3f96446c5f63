"""The loss on held-out text, whole and by how many tokens a token sees: what long sequences are trained for."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Mask
from ringattn.train.data.packing import Batch
from ringattn.train.model.loss import IGNORE, token_losses
from ringattn.train.setup import Run, compiles
from ringattn.train.step import forward, layout_of, mask_of

FEWEST = 128  # tokens before a token: fewer are one group, and further groups begin at twice, four times, ... as many


@torch.no_grad()
def evaluate(run: Run) -> dict[str, float]:
    """The loss on the first tokens of `run.held_out`, at least `trainer.eval_tokens`, in whole sequences, always the same.

    All ranks take part, as in training, and return the same.

    Returns:
        eval_loss: nats a token. And eval_loss/c, for c of 0, FEWEST, 2 FEWEST, ...: of the tokens that see at least c tokens
        before them, and fewer than the next c.
    """
    starts = context_groups(run.config.data.seq_len)
    sums = torch.zeros(len(starts), 2, dtype=torch.float64, device=run.device)  # of losses, and of tokens
    for batch in held_out_batches(run):
        mask = mask_of(run.config, batch)
        layout, rank = layout_of(run.config, run.mesh, mask), run.mesh.sequence.get_local_rank()
        options = dict(vocab_size=run.tokenizer.vocab_size, compiled=compiles(run.config, run.device))
        losses = forward(run, batch, mask, layout, partial(token_losses, **options)).double()
        groups = group_of(batch, mask, starts).masked_fill(batch.labels == IGNORE, -1)
        own = layout.shard(groups, rank).to(run.device)
        for group in range(len(starts)):
            chosen = own == group
            sums[group] += torch.stack([losses.masked_fill(~chosen, 0).sum(), chosen.sum()])
    dist.all_reduce(sums)
    total, tokens = sums.sum(0).tolist()
    by_context = {f"eval_loss/{c}": loss / count for c, (loss, count) in zip(starts, sums.tolist(), strict=True) if count}
    return {"eval_loss": total / tokens} | by_context


def context_groups(seq_len: int) -> list[int]:
    """How many tokens before it the first token of each group sees."""
    starts, start = [0], FEWEST
    while start < seq_len:
        starts.append(start)
        start *= 2
    return starts


def group_of(batch: Batch, mask: Mask, starts: list[int]) -> Tensor:
    """Which of the groups that begin at `starts` each token is in; int64 (B, S)."""
    seq_len = batch.tokens.shape[1]
    before = torch.arange(seq_len) - mask.intervals(seq_len)[0]
    return torch.bucketize(before, torch.tensor(starts[1:]), right=True).expand_as(batch.tokens)


def held_out_batches(run: Run) -> list[Batch]:
    """This rank's share of the sequences, in as many batches on every rank; labels of those beyond the last are IGNORE."""
    dp, size = run.mesh.dp, run.config.trainer.batch_size
    count = min(-(-run.config.trainer.eval_tokens // run.config.data.seq_len), run.held_out.sequences_per_epoch)
    batches = []
    for first in range(dp.get_local_rank() * size, count + dp.get_local_rank() * size, dp.size() * size):
        batch = run.held_out.batch(range(first, first + size))
        batch.labels[max(count - first, 0) :] = IGNORE
        batches.append(batch)
    return batches
