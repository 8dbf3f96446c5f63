"""The table and the heat map of the accuracy on the recall task."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from ringattn.train.reports.recall_results import accuracy_table, from_metrics, plot_accuracies, to_metrics

# The lengths are not in order.
ACCURACIES = {(1024, 0): 0.02, (1024, 100): 0.5, (512, 0): 0.75, (512, 100): 1.0}


def test_metrics_contain_the_accuracies():
    metrics = to_metrics(ACCURACIES)
    assert metrics["recall_accuracy"] == 0.02, "the answer is the farthest away in the longest sequence, at its beginning"
    assert metrics["recall/512/100"] == 1.0
    assert from_metrics({"loss": 3.0, **metrics, "eval_loss_at/64": 1.0}) == ACCURACIES
    assert from_metrics({"loss": 3.0}) == {}


def test_table_has_one_row_per_position_and_one_column_per_length():
    names, _, *rows = accuracy_table(ACCURACIES).splitlines()
    assert names == "| position of the answer | 512 tokens | 1,024 tokens |"
    assert rows == ["| 0% | 75.0% | 2.0% |", "| 100% | 100.0% | 50.0% |"]


def test_heat_map_shows_the_accuracies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The lengths are on the x axis, and the positions on the y axis, from the beginning of the sequence at the top."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, file, **options: figures.append(figure))
    plot_accuracies(ACCURACIES, 1 / 64, tmp_path / "recall.png", "a: 2 ranks")
    (figure,) = figures
    axes = figure.axes[0]
    (colours,) = axes.images
    assert (tmp_path / "recall.png").exists()
    assert colours.get_array().tolist() == [[0.75, 0.02], [1.0, 0.5]]
    assert [text.get_text() for text in axes.texts] == ["75", "2", "100", "50"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["512", "1,024"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0%", "100%"]
    assert "1.6" in axes.get_title()
    assert figure.get_suptitle() == "a:\n2 ranks"
