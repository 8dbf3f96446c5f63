from pathlib import Path

import pytest

from scripts.tools import draw_schedule


def test_plot_is_drawn(tmp_path: Path) -> None:
    draw_schedule.main([str(tmp_path / "x.png"), "--ranks", "2"])
    assert (tmp_path / "x.png").stat().st_size > 5_000


@pytest.mark.parametrize(
    ("name", "error"),
    [("nope/x.png", "error: cannot write {}: [Errno 2] No such file"), ("x.nope", "'{}' must end with .png")],
)
def test_path_that_cannot_be_written_is_named_in_the_error(
    capsys: pytest.CaptureFixture, tmp_path: Path, name: str, error: str
) -> None:
    with pytest.raises(SystemExit) as exited:
        draw_schedule.main([str(tmp_path / name), "--ranks", "2"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert exited.value.code == 2
    assert error.format(tmp_path / name) in last
