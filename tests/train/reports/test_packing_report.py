"""Tests of the report on packing: it counts the parts of documents in all sequences."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ringattn.train.data.best_fit import BestFitDataset
from ringattn.train.data.packing import PackedDataset
from ringattn.train.reports.packing_report import describe_packing, packing_facts, plot_documents
from tests.train.data.test_best_fit import BEGIN, corpus, lengths_of_documents, parts_of


@settings(max_examples=25, deadline=None)
@given(lengths_of_documents, st.integers(1, 30), st.booleans())
def test_the_report_counts_the_parts_in_all_sequences(lengths: list[int], seq_len: int, best_fit: bool) -> None:
    assume(best_fit or sum(lengths) > seq_len)
    dataset = BestFitDataset(corpus(lengths), seq_len, 0) if best_fit else PackedDataset(corpus(lengths), seq_len, 0)
    parts = parts_of(dataset)
    sizes, total = [len(tokens) for tokens, _ in parts], sum(len(tokens) for tokens, _ in parts)
    facts = packing_facts(dataset, mask_documents=True)
    assert facts["tokens_after_cut"] == pytest.approx(sum(len(x) for x, _ in parts if x[0] != BEGIN) / total)
    assert facts["context"] == pytest.approx(sum(size * (size - 1) / 2 for size in sizes) / total)
    # The numbers of the documents with more than one token.
    documents = [max(tokens + labels) // 1000 for tokens, labels in parts if max(tokens + labels) > BEGIN]
    cut = {number for number in documents if documents.count(number) > 1}
    assert facts["cut_documents"] * len(lengths) == pytest.approx(len(cut))
    assert facts["longest"] == max(lengths)
    assert packing_facts(dataset, mask_documents=False)["context"] == (seq_len - 1) / 2


def test_best_fit_cuts_fewer_documents(tmp_path) -> None:
    """With documents of 1 to 40 tokens and sequences of 50 tokens, no document is cut."""
    documents = corpus([1 + i % 40 for i in range(400)])
    stream, best = PackedDataset(documents, 50, 0), BestFitDataset(documents, 50, 0)
    facts = {name: packing_facts(each, mask_documents=True) for name, each in (("stream", stream), ("best", best))}
    assert facts["best"]["cut_documents"] == facts["best"]["tokens_after_cut"] == 0
    assert facts["stream"]["cut_documents"] > 0.3
    assert facts["best"]["context"] > facts["stream"]["context"]
    assert best.padding < 0.01
    assert describe_packing(facts["best"]).startswith("400, with a median of 20 tokens and a maximum of 40; 0.0% are cut")
    plot_documents({"": stream, "other": best}, tmp_path / "documents.png")
    assert (tmp_path / "documents.png").stat().st_size > 10_000
