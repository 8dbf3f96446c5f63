"""Batches of collators: which documents they contain, which labels their tokens have, and what is an error."""

from contextlib import nullcontext

import pytest
import torch

from ringattn.transformers.batch import IGNORE, document_starts, documents_of, next_labels, ring_of, shard_batch, shard_for

TOKENS = torch.arange(2, 14).view(2, 6)


def batch(**entries: object) -> dict:
    return {"input_ids": TOKENS} | {
        name: torch.tensor(value) if isinstance(value, list) else value for name, value in entries.items()
    }


ONE = dict(input_ids=TOKENS[:1])
DOCUMENTS = {
    "whole rows": ({}, None),
    "no padding": (dict(attention_mask=[[1] * 6] * 2), None),
    "right padding": (dict(attention_mask=[[1, 1, 1, 1, 0, 0], [1] * 6]), [[4, 2], [6]]),
    "right padding in bool": (dict(attention_mask=[[True] * 4 + [False] * 2, [True] * 6]), [[4, 2], [6]]),
    "left padding": (dict(attention_mask=[[0, 0, 0, 1, 1, 1], [0] + [1] * 5]), [[3, 3], [1, 5]]),
    "both": (dict(attention_mask=[[0, 1, 1, 1, 0, 0], [0] * 6]), [[1, 3, 2], [6]]),
    "positions": (dict(position_ids=[[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]), [[3, 2, 1], [6]]),
    "positions of all rows": (dict(position_ids=[[4, 5, 0, 1, 2, 3]]), [[2, 4]] * 2),
    # TRL numbers the tokens of a row with padding on the left like this.
    "positions and padding": (
        dict(position_ids=[[1, 1, 1, 0, 1, 2], [0, 1, 0, 1, 0, 0]], attention_mask=[[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
        [[3, 3], [2, 2, 2]],
    ),
    "cu_seq_lens": (ONE | dict(cu_seq_lens_q=[0, 2, 5, 6, 6], max_length_q=3), [[2, 3, 1]]),
    "cu_seq_lens and positions": (ONE | dict(cu_seq_lens_q=[0, 2, 6], position_ids=[[0, 1, 0, 1, 2, 3]]), [[2, 4]]),
    "only cu_seq_lens of keys": (ONE | dict(cu_seq_lens_k=[0, 2, 6], max_length_k=4), [[2, 4]]),
    "only seq_idx": (dict(seq_idx=[[0, 0, 1, 1, 1, 1], [5] * 6]), [[2, 4], [6]]),
    "seq_idx and cu_seq_lens": (
        ONE | dict(seq_idx=[[0, 0, 1, 1, 1, 1]], cu_seq_lens_q=[0, 2, 6], cu_seq_lens_k=[0, 2, 6]),
        [[2, 4]],
    ),
    "seq_idx and positions that go on": (dict(seq_idx=[[0, 0, 1, 1, 1, 1]], position_ids=[[0, 1, 2, 3, 4, 5]]), [[2, 4]] * 2),
    # FlashAttention separates these documents as well, although the positions go on.
    "positions that go on": (ONE | dict(cu_seq_lens_q=[0, 2, 6], position_ids=[[0, 1, 2, 3, 4, 5]]), [[2, 4]]),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str) -> None:
    entries, expected = DOCUMENTS[name]
    assert documents_of(batch(**entries)) == expected
    assert shard_batch(batch(**entries), None)["ring_batch"].documents == expected
    assert document_starts(batch(**entries))[:, 0].all()


def test_labels_are_shifted_before_they_are_sharded() -> None:
    labels = next_labels(batch(labels=TOKENS))
    assert labels is not None
    assert labels.tolist() == [[3, 4, 5, 6, 7, IGNORE], [9, 10, 11, 12, 13, IGNORE]]
    assert TOKENS[0, 0] == 2  # the batch is unchanged
    shifted = torch.full((2, 6), 5)
    assert next_labels(batch(labels=TOKENS, shift_labels=shifted)) is shifted
    assert next_labels(batch()) is None


def test_padding_has_no_labels() -> None:
    """As in transformers, the last token of the padding on the left predicts the first token."""
    mask, labels = [[0, 0, 1, 1, 1, 0]] * 2, [[IGNORE, IGNORE, 4, 5, 6, IGNORE]] * 2
    expected = [[IGNORE, 4, 5, 6, IGNORE, IGNORE]] * 2
    for given in (dict(labels=labels), dict(shift_labels=expected)):
        found = next_labels(batch(attention_mask=mask, **given))
        assert found is not None
        assert found.tolist() == expected
    for name in ("labels", "shift_labels"):
        with pytest.raises(ValueError, match=f"{name} of padding must be -100"):
            next_labels(batch(attention_mask=mask) | {name: TOKENS})
    for i in (0, 5):  # padding does not predict padding
        with pytest.raises(ValueError, match="shift_labels of padding must be -100"):
            next_labels(batch(attention_mask=mask, shift_labels=[[IGNORE] * i + [4] + [IGNORE] * (5 - i)] * 2))


def test_arguments_in_one_process() -> None:
    found = shard_batch(batch(labels=TOKENS, return_dict=True), None)
    assert found["input_ids"].equal(TOKENS)
    assert found["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert found["attention_mask"].tolist() == [[1] * 6] * 2
    assert found["num_items_in_batch"] == 10
    assert found["return_dict"] is True
    assert found["use_cache"] is False
    # With gradient accumulation, the user counts the labels of several batches.
    assert shard_batch(batch(labels=TOKENS, num_items_in_batch=40), None)["num_items_in_batch"] == 40
    # A batch without labels has the loss 0, and not NaN.
    assert shard_batch(batch(labels=[[IGNORE] * 6] * 2), None)["num_items_in_batch"] == 1


ERRORS = {
    "contains token_type_ids, which a ring does not support": dict(token_type_ids=TOKENS),
    "either input_ids or inputs_embeds": dict(inputs_embeds=torch.zeros(2, 6, 4)),
    r"input_ids has the shape \(6,\): it must be a tensor \(batch, tokens\)": dict(input_ids=TOKENS[0]),
    r"labels is a tuple: it must be a tensor \(batch, tokens\)": dict(labels=(TOKENS,)),
    r"labels has the shape \(2, 5\): it must be \(2, 6\)": dict(labels=TOKENS[:, 1:]),
    r"position_ids has the shape \(3, 2, 6\)": dict(position_ids=torch.zeros(3, 2, 6)),
    r"attention_mask has the shape \(2, 1, 6, 6\)": dict(attention_mask=torch.ones(2, 1, 6, 6)),
    "other values than 0 and 1": dict(attention_mask=[[1, 1, 2, 2, 3, 3]] * 2),
    "padding between tokens": dict(attention_mask=[[1, 1, 0, 0, 1, 1]] * 2),
    "but the batch has 2 rows": dict(cu_seq_lens_q=[0, 6]),
    "cu_seq_lens_q must rise from 0 to 6": ONE | dict(cu_seq_lens_q=[0, 3, 5]),
    "cu_seq_lens_k must rise from 0 to 6": ONE | dict(cu_seq_lens_k=[0, 5]),
    r"seq_idx has the shape \(2, 5\)": dict(seq_idx=TOKENS[:, 1:]),
    "inside a document of cu_seq_lens_q, or another entry ends it": ONE
    | dict(cu_seq_lens_q=[0, 6], seq_idx=[[0, 0, 1, 1, 1, 1]]),
    "inside a document of cu_seq_lens_k, or another entry ends it": ONE | dict(cu_seq_lens_q=[0, 2, 6], cu_seq_lens_k=[0, 6]),
    "position_ids restart inside a document": ONE | dict(cu_seq_lens_q=[0, 4, 6], position_ids=[[0, 1, 0, 1, 0, 1]]),
}


@pytest.mark.parametrize("message", ERRORS)
def test_unsupported_batches_are_errors(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_batch(batch(**ERRORS[message]), None)


def test_a_rank_without_tokens_is_an_error_on_all_ranks() -> None:
    """Hugging Face layers do not accept a rank without tokens, and the other ranks would wait for it."""
    row = {"input_ids": torch.arange(16)[None]}
    for tokens, ranks, is_enough in ((1, 2, False), (2, 2, True), (13, 8, False), (16, 8, True)):
        for rank in range(ranks):
            with nullcontext() if is_enough else pytest.raises(ValueError, match=f"{tokens} tokens .* too few for {ranks}"):
                shard_for({name: x[:, :tokens] for name, x in row.items()}, None, rank, ranks)


def test_a_ring_is_a_mesh_with_one_dimension() -> None:
    assert ring_of(None) == (None, 0, 1)
    with pytest.raises(ValueError, match="it must be a DeviceMesh with one dimension"):
        ring_of("cpu")
