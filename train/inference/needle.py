"""Measure how often a model finds a fact in a long text.

The results depend on the length of the text and the depth of the fact.
"""

from collections.abc import Iterable

import torch

from ringattn.train.checkpoint.progress import progress_bar
from ringattn.train.data.needle import NUM_DEPTHS, NeedleDocuments
from ringattn.train.inference.recall import accuracies_at
from ringattn.train.reports.recall_results import Accuracies
from ringattn.train.setup import InferenceRun


# torch.compile would compile the model again for every length.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def evaluate_needle(run: InferenceRun, documents: NeedleDocuments, lengths: Iterable[int]) -> Accuracies:
    """Return the fraction of documents whose whole answer is correct. All ranks call this function and return the same
    accuracies.

    Evaluate at least MIN_DOCUMENTS documents per length and depth, and at least `trainer.eval_tokens` tokens per length.
    """
    accuracies: Accuracies = {}
    batch_size = run.config.trainer.batch_size
    for length in progress_bar(lengths, "lengths"):
        accuracies |= accuracies_at(run, length, documents.batch, NUM_DEPTHS, batch_size, whole_answers=True)
    return accuracies
