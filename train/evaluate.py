"""Evaluation: the loss on held-out text, overall and by context length.

The context length of a token is the number of earlier tokens that the token attends to. A model that benefits from long
sequences has a lower loss on tokens with a longer context.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Mask
from ringattn.train.data.packing import Batch
from ringattn.train.model.loss import IGNORE, token_losses
from ringattn.train.setup import InferenceRun
from ringattn.train.step import forward, layout_of, mask_of

# The first group contains the tokens whose context is shorter than this number of tokens. The second group starts at this
# context length, and each further group starts at twice the context length of the previous group.
SHORTEST_CONTEXT = 128


@torch.no_grad()
def evaluate(run: InferenceRun) -> dict[str, float]:
    """Compute the loss on the held-out text. All ranks call this function together and return the same losses.

    Evaluation always uses the same sequences of `run.held_out`, with at least `trainer.eval_tokens` tokens in total.

    Returns:
        A dict of losses in nats per token. `eval_loss` is the mean loss of all tokens. `eval_loss/c` is the mean loss of the
        tokens whose context has at least c tokens but fewer than the next larger c. The values of c are 0, SHORTEST_CONTEXT,
        2 SHORTEST_CONTEXT, and so on. Groups without tokens are left out.
    """
    starts = context_groups(run.config.data.seq_len)
    # Each row contains the sum of the losses of a group and the number of tokens in the group.
    sums = torch.zeros(len(starts), 2, dtype=torch.float64, device=run.device)
    loss_fn = partial(token_losses, vocab_size=run.tokenizer.vocab_size, compiled=run.compiled)
    for batch in held_out_batches(run):
        mask = mask_of(run.config, batch)
        layout = layout_of(run.config, run.mesh, mask)
        losses = forward(run, batch, mask, layout, loss_fn).double()
        groups = group_by_context(batch, mask, starts).masked_fill(batch.labels == IGNORE, -1)
        groups = layout.shard(groups, run.mesh.sequence.get_local_rank()).to(run.device)
        for group in range(len(starts)):
            is_member = groups == group
            sums[group] += torch.stack([losses.masked_fill(~is_member, 0).sum(), is_member.sum()])
    dist.all_reduce(sums)
    total, tokens = sums.sum(0).tolist()
    by_context = {f"eval_loss/{c}": loss / count for c, (loss, count) in zip(starts, sums.tolist(), strict=True) if count}
    return {"eval_loss": total / tokens} | by_context


def context_groups(seq_len: int) -> list[int]:
    """Return the shortest context length of each group, for sequences of `seq_len` tokens.

    The lengths are 0 and powers of two.
    """
    return [0, *(2**i for i in range(SHORTEST_CONTEXT.bit_length() - 1, (seq_len - 1).bit_length()))]


def group_by_context(batch: Batch, mask: Mask, starts: list[int]) -> Tensor:
    """Return the index of each token's group as int64 (B, S). `starts` contains the shortest context length of each group."""
    seq_len = batch.tokens.shape[1]
    context = torch.arange(seq_len) - mask.intervals(seq_len)[0]
    return torch.bucketize(context, torch.tensor(starts[1:]), right=True).expand_as(batch.tokens)


def held_out_batches(run: InferenceRun) -> Iterator[Batch]:
    """Yield this rank's batches of held-out sequences.

    The evaluated sequences are spread evenly over the held-out text, so that they represent the whole text. All ranks receive
    the same number of batches, because every batch requires communication between all ranks. The last batches may therefore
    contain sequences that must not be evaluated. The labels of these sequences are IGNORE.
    """
    dp, size = run.mesh.dp, run.config.trainer.batch_size
    count = min(-(-run.config.trainer.eval_tokens // run.config.data.seq_len), run.held_out.sequences_per_epoch)
    offset = dp.get_local_rank() * size
    for start in range(offset, offset + count, dp.size() * size):
        numbers = range(start, start + size)
        batch = run.held_out.batch(number * run.held_out.sequences_per_epoch // count for number in numbers)
        batch.labels[max(count - start, 0) :] = IGNORE
        yield batch
