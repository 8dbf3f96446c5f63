"""Tests of the losses of the target tokens: their errors, their metrics, the table and the plot."""

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ringattn.train.reports.loss_results import Losses, from_metrics, loss_table, plot_losses, to_metrics


def losses(documents: int = 200, noise: float = 0.01) -> Losses:
    """Documents whose losses differ from each other much more than from length to length."""
    random = np.random.default_rng(1)
    tokens = random.integers(1, 100, documents)
    means = 3 + random.normal(size=documents)
    shorter, longer = means, means - 0.1 + noise * random.normal(size=documents)
    return Losses([64, 256], tokens, np.stack([shorter * tokens, longer * tokens]), checksum=7)


def test_errors_are_those_of_means_over_documents():
    """The bootstrap agrees with the error of a ratio of sums in closed form, to the accuracy of 1,000 draws."""
    result = losses()
    own, differences = result.errors()
    for sums, error in ((result.sums[1], own[1]), (result.sums[1] - result.sums[0], differences[1])):
        residuals = sums - sums.sum() / result.tokens.sum() * result.tokens
        assert error == pytest.approx(1.96 * np.sqrt((residuals**2).sum()) / result.tokens.sum(), rel=0.1)
    assert differences[0] == 0
    assert differences[1] < 0.05 * own[1]


def test_losses_are_means_over_tokens():
    result = Losses([8, 16], np.array([1, 3]), np.array([[4.0, 4.0], [2.0, 4.0]]), checksum=1)
    assert result.means.tolist() == [2.0, 1.5]


def test_metrics():
    metrics = to_metrics(losses())
    assert from_metrics(metrics) == {64: metrics["eval_loss_at/64"], 256: metrics["eval_loss"]}
    assert list(from_metrics(metrics, "eval_difference_error")) == [256]
    assert metrics["eval_target_tokens"] == losses().tokens.sum()
    assert metrics["eval_targets"] == 7
    assert metrics == to_metrics(losses()), "the draws are always the same"
    assert from_metrics({"eval_loss": 1.0, "eval_loss/128": 2.0}) == {}, "a record of an earlier version"


def test_table_and_plot(tmp_path, monkeypatch):
    bars, titles = [], []
    errorbar, suptitle = Axes.errorbar, Figure.suptitle
    monkeypatch.setattr(Figure, "suptitle", lambda self, text, **style: titles.append(text) or suptitle(self, text, **style))
    monkeypatch.setattr(Axes, "errorbar", lambda self, *args, **style: bars.append(args) or errorbar(self, *args, **style))
    result = Losses([64, 1024], np.array([1000, 3000]), np.array([[4000.0, 6000.0], [2000.0, 5000.0]]), checksum=7)
    own, differences = result.errors()
    lines = loss_table(result).splitlines()
    assert lines[0] == "| sequence length | target tokens | loss | difference to 64 tokens |"
    assert lines[2] == f"| 64 | 4,000 | 2.5000 ± {own[0]:.4f} | - |"
    assert lines[3] == f"| 1,024 | 4,000 | 1.7500 ± {own[1]:.4f} | -0.7500 ± {differences[1]:.4f} |"
    assert "bootstrap over the 2 documents" in lines[-1]
    plot_losses(result, tmp_path / "evaluation.png", "a title")
    assert (tmp_path / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert titles == ["a title"]
    assert [[list(each) for each in args[1:]] for args in bars] == [[[2.5, 1.75], list(own)], [[0, -0.75], list(differences)]]


def test_one_document_has_no_errors(tmp_path):
    result = losses(documents=1)
    assert result.errors() is None
    assert not [name for name in to_metrics(result) if "error" in name]
    assert "±" not in loss_table(result)
    assert "one document" in loss_table(result)
    plot_losses(result, tmp_path / "evaluation.png")
