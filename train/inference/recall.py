"""Measure the accuracy on the task of `ringattn.train.data.recall`, by sequence length and position of the answer."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.train.checkpoint.progress import progress_bar
from ringattn.train.data.batch import Batch
from ringattn.train.data.loader import masks_of
from ringattn.train.data.recall import NUM_POSITIONS, grid_batch
from ringattn.train.model.loss import CHUNK, IGNORE
from ringattn.train.parallel.mesh import choose_layout
from ringattn.train.reports.recall_results import Accuracies
from ringattn.train.settings.config import Config
from ringattn.train.setup import InferenceRun
from ringattn.train.step import check_finite, forward, until_stopped

Create = Callable[[int, Iterable[int]], tuple[Batch, Tensor]]

# Each accuracy is measured on at least MIN_DOCUMENTS documents.
MIN_DOCUMENTS = 4


# torch.compile would compile the model again for every length.
@torch.compiler.set_stance("force_eager")
@torch.no_grad()
def evaluate_recall(run: InferenceRun, lengths: Iterable[int], show_progress: bool = False) -> Accuracies:
    """Compute the accuracy of the answers. All ranks call this function together and return the same accuracies.

    An answer is correct if its value has the largest logit. Each sequence is one document. All runs are evaluated on the same
    documents, with at least `trainer.eval_tokens` tokens per length.

    Raises:
        StoppedEarly: on every rank, if any rank was asked to stop.
    """
    lengths = list(lengths)
    accuracies: Accuracies = {}
    shown = progress_bar(lengths, "lengths") if show_progress else lengths
    for length in until_stopped(run, shown):  # Some lengths need only one batch.
        # Batches of short sequences have about as many tokens as batches of the longest sequences.
        batch_size = run.config.trainer.batch_size * max(lengths) // length
        accuracies |= accuracies_at(run, length, grid_batch, NUM_POSITIONS, batch_size)
    return accuracies


def number_of_documents(config: Config, length: int, num_positions: int) -> int:
    return num_positions * max(MIN_DOCUMENTS, -(-config.trainer.eval_tokens // (num_positions * length)))


def accuracies_at(
    run: InferenceRun, length: int, create: Create, num_positions: int, batch_size: int, whole_answers: bool = False
) -> Accuracies:
    """Compute the accuracy at every position in documents of `length` tokens. All ranks call this function together.

    Args:
        create: create(length, numbers) returns the documents with these numbers, and the index of each document's position.
        whole_answers: whether all labels of a document form one answer, which is correct only if all tokens are correct.
    """
    config = replace(run.config, data=replace(run.config.data, seq_len=length))
    dp, count = run.mesh.dp, number_of_documents(config, length, num_positions)
    sums = torch.zeros(num_positions, 2, dtype=torch.int64, device=run.device)  # [correct answers, all answers]
    count_fn = partial(count_correct, vocab_size=run.tokenizer.vocab_size)
    offset = dp.get_local_rank() * batch_size
    # Every batch communicates, so all ranks process the same number of batches.
    for start in until_stopped(run, range(offset, offset + count, dp.size() * batch_size)):
        batch, positions = create(length, range(start, start + batch_size))
        batch.labels[max(count - start, 0) :] = IGNORE
        masks = masks_of(config, batch)
        counts = forward(run, batch, masks, choose_layout(config, run.mesh.shape, masks), count_fn)
        if whole_answers:
            # An answer may be spread over several ranks of a sequence.
            dist.all_reduce(counts, group=run.mesh.sequence.get_group())
            counts = torch.stack([(counts[:, 0] == counts[:, 1]) & (counts[:, 1] > 0), counts[:, 1] > 0], 1).long()
        sums.index_add_(0, positions.to(run.device), counts)
    dist.all_reduce(sums, group=dp.get_group() if whole_answers else None)
    found = enumerate(sums.tolist())
    return {(length, round(100 * position / (num_positions - 1))): correct / total for position, (correct, total) in found}


def count_correct(hidden: Tensor, head: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """Count the correct answers and all answers of each sequence, int64 (B, 2).

    Args:
        hidden: (B, N, dim).
        head: (V, dim). Rows from `vocab_size` on are padding.
        labels: int64 (B, N), the next tokens, or IGNORE for tokens that are not answers.
    """
    check_finite(hidden)
    is_answer = labels != IGNORE
    head = head[:vocab_size].float()
    # Only the logits of one chunk exist at a time, because the vocabulary may be large.
    best = [(chunk.float() @ head.T).argmax(-1) for chunk in hidden[is_answer].split(CHUNK)]
    correct = torch.zeros_like(is_answer)
    correct[is_answer] = torch.cat(best) == labels[is_answer]
    return torch.stack([correct.sum(1), is_answer.sum(1)], 1)
