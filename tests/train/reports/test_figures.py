import resource
import struct

import pytest

from ringattn.train.reports.figures import clean_axes, new_figure, save_figure


def test_a_figure_has_its_size_and_replaces_a_link(tmp_path):
    (tmp_path / "other").write_text("keep")
    (tmp_path / "x.png").symlink_to(tmp_path / "other")
    figure = new_figure(2, 1)
    axes = figure.subplots()
    clean_axes(axes)
    assert [side for side, spine in axes.spines.items() if spine.get_visible()] == ["left", "bottom"]
    save_figure(figure, tmp_path / "x.png", "a title")
    assert struct.unpack(">II", (tmp_path / "x.png").read_bytes()[16:24]) == (300, 150)
    assert (tmp_path / "other").read_text() == "keep"
    assert figure.get_suptitle() == "a title"


def test_a_full_disk_leaves_the_earlier_picture(tmp_path):
    save_figure(new_figure(2, 1), tmp_path / "x.png")
    before = (tmp_path / "x.png").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save_figure(new_figure(3, 1), tmp_path / "x.png")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "x.png").read_bytes() == before
