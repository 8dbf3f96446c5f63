"""Measure how often a model finds a fact in a long text.

The results depend on the length of the text and the depth of the fact.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from ringattn.train.checkpoint.progress import progress_bar
from ringattn.train.data.loader import masks_of
from ringattn.train.data.needle import NUM_DEPTHS, NeedleDocuments
from ringattn.train.inference.recall import MIN_DOCUMENTS, count_correct
from ringattn.train.model.loss import IGNORE
from ringattn.train.parallel.mesh import choose_layout
from ringattn.train.reports.recall_results import Accuracies
from ringattn.train.settings.config import Config
from ringattn.train.setup import InferenceRun
from ringattn.train.step import forward, until_stopped


def number_of_documents(config: Config) -> int:
    return NUM_DEPTHS * max(MIN_DOCUMENTS, -(-config.trainer.eval_tokens // (NUM_DEPTHS * config.data.seq_len)))


# torch.compile would compile the model again for every length.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def evaluate_needle(run: InferenceRun, documents: NeedleDocuments, lengths: Iterable[int]) -> Accuracies:
    """Return the fraction of documents whose whole answer is correct. All ranks call this function and return the same
    accuracies.

    Evaluate at least MIN_DOCUMENTS documents per length and depth, and at least `trainer.eval_tokens` tokens per length.
    """
    accuracies: Accuracies = {}
    count_fn = partial(count_correct, vocab_size=run.tokenizer.vocab_size)
    dp, size = run.mesh.dp, run.config.trainer.batch_size
    for length in progress_bar(lengths, "lengths"):
        config = replace(run.config, data=replace(run.config.data, seq_len=length))
        count = number_of_documents(config)
        sums = torch.zeros(NUM_DEPTHS, 2, dtype=torch.int64, device=run.device)
        # Every batch communicates, so all ranks process the same number of batches.
        for start in until_stopped(
            run, range(dp.get_local_rank() * size, dp.get_local_rank() * size + count, dp.size() * size)
        ):
            batch, depths = documents.batch(length, range(start, start + size))
            batch.labels[max(count - start, 0) :] = IGNORE
            masks = masks_of(config, batch)
            counts = forward(run, batch, masks, choose_layout(config, run.mesh.shape, masks), count_fn)
            # An answer may be spread over several ranks of a sequence.
            dist.all_reduce(counts, group=run.mesh.sequence.get_group())
            found = torch.stack([(counts[:, 0] == counts[:, 1]) & (counts[:, 1] > 0), counts[:, 1] > 0], 1).long()
            sums.index_add_(0, depths.to(run.device), found)
        dist.all_reduce(sums, group=dp.get_group())
        for depth, (correct, total) in enumerate(sums.tolist()):
            accuracies[length, round(100 * depth / (NUM_DEPTHS - 1))] = correct / total
    return accuracies
