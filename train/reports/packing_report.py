"""Report the lengths of documents, and the fraction of documents that are cut by packing."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ringattn.train.data.best_fit import BestFitDataset
from ringattn.train.data.mixture import MixtureDataset
from ringattn.train.data.packing import PackedDataset
from ringattn.train.reports.figures import clean_axes, new_figure, save_figure

Text = PackedDataset | BestFitDataset


def texts_of(data: object) -> dict[str, Text]:
    """Chats and generated data are left out."""
    sources = data.sources if isinstance(data, MixtureDataset) else {"": data}
    return {name: each for name, each in sources.items() if isinstance(each, Text)}


def packing_facts(data: Text, mask_documents: bool) -> dict[str, float]:
    """Return numbers about an epoch.

    Returns:
        The entries `documents`, `median_length` and `longest` (tokens) describe whole documents. The entry `cut_documents` is
        the fraction of documents that are divided among sequences. The entry `tokens_after_cut` is the fraction of tokens whose
        sequence does not contain the beginning of their document. The entry `context` is the mean number of earlier tokens to
        which a token can attend without a window.
    """
    sizes, begins = data.parts
    context = float((sizes * (sizes - 1)).sum()) / 2 / int(sizes.sum()) if mask_documents else (data.seq_len - 1) / 2
    return {
        "documents": len(data.lengths),
        "median_length": float(np.median(data.lengths)),
        "longest": int(data.lengths.max()),
        "cut_documents": int((begins[:-1] & ~begins[1:]).sum()) / len(data.lengths),
        "tokens_after_cut": int(sizes[~begins].sum()) / int(sizes.sum()),
        "context": context,
    }


def describe_packing(facts: Mapping[str, float]) -> str:
    return (
        f"{facts['documents']:,}, with a median of {facts['median_length']:,.0f} tokens and a maximum of {facts['longest']:,}; "
        f"{facts['cut_documents']:.1%} are cut; {facts['tokens_after_cut']:.1%} of the tokens are in a sequence without the "
        f"beginning of their document; on average, a token can attend to {facts['context']:,.0f} earlier tokens"
    )


def plot_documents(texts: Mapping[str, Text], output: Path) -> None:
    """Plot histograms of the lengths of whole documents, and of their parts in sequences, as a PNG file."""
    figure = new_figure(8, 4)
    axes = figure.subplots()
    longest = max(int(text.lengths.max()) for text in texts.values())
    # The upper edges of the bins are powers of the square root of 2.
    bins = 2 ** np.arange(0, np.log2(longest) + 1, 0.5)
    for index, (name, text) in enumerate(texts.items()):
        for lengths, style, kind in ((text.lengths, "-", "documents"), (text.parts[0], "--", "parts in sequences")):
            # Weight each document by its tokens, because a histogram of counts would hide the few long documents.
            shares = np.histogram(lengths, bins, weights=lengths / lengths.sum())[0]
            axes.stairs(shares, bins, color=f"C{index}", linestyle=style, label=f"{name} {kind}".strip())
    axes.axvline(next(iter(texts.values())).seq_len, color="0.5", linewidth=0.8, label="data.seq_len")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="length in tokens", ylabel="share of the tokens")
    clean_axes(axes)
    axes.legend(frameon=False)
    save_figure(figure, output)
