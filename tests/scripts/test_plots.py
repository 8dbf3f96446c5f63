import pytest

from ringattn.train.reports.figures import clean_axes
from scripts.plots import plot_points, plt, save_plot, set_length_axis, short_length


@pytest.mark.parametrize(
    ("length", "text"), [(128, "128"), (1500, "1500"), (16384, "16k"), (2**20, "1m"), (3 * 2**19, "1536k")]
)
def test_lengths_are_written_with_suffixes(length, text):
    assert short_length(length) == text


def test_plot_is_a_small_png_file(tmp_path):
    figure, axes = plt.subplots()
    clean_axes(axes)
    plot_points(axes, [(4096, 2.0), (1024, 1.0)], 0, "a line")
    plot_points(axes, [], 1, "no points")
    set_length_axis(axes, (4096, 1024, 4096), "length")
    (curve,) = axes.lines
    assert list(curve.get_xdata()) == [1024, 4096]
    assert curve.get_label() == "a line"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1k", "4k"]
    save_plot(figure, tmp_path / "x.png")
    assert not plt.get_fignums()
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    assert 1_000 < (tmp_path / "x.png").stat().st_size < 20_000
