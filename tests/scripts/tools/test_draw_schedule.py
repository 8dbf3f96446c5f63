import sys
from pathlib import Path

import pytest

from scripts.tools import draw_schedule


def test_a_picture_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["draw_schedule.py", str(tmp_path / "x.png"), "--ranks", "2"])
    draw_schedule.main()
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize("name, reason", (("nope/x.png", "No such file"), ("x.nope", "'nope' is not supported")))
def test_where_none_can_be_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, name: str, reason: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["draw_schedule.py", str(tmp_path / name)])
    with pytest.raises(SystemExit) as ended:
        draw_schedule.main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"error: no picture at {tmp_path / name}: " in last and reason in last
