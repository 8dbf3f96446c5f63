"""Every malformed command line is reported as one line, without a traceback and within ten seconds."""

import shlex
import time
from pathlib import Path

import pytest

from tests.train import malformed_settings

LINES = Path(__file__).with_name("malformed_settings.txt").read_text().splitlines()


def test_the_list_is_up_to_date():
    assert list(malformed_settings.generate()) == LINES and len(set(LINES)) == len(LINES) >= 250


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "lines", [pytest.param(LINES[::10], id="every tenth"), pytest.param(LINES, id="all", marks=pytest.mark.slow)]
)
def test_malformed_settings_are_reported_in_one_line(lines, run_command_line, capfd):
    Path("loop").symlink_to("loop")
    Path("file").write_text("")
    failed = []
    for line in lines:
        start = time.monotonic()
        try:
            status = run_command_line("logger=off", "trainer.device=cpu", *shlex.split(line))
        except BaseException as error:
            status = repr(error)
        seconds, output = time.monotonic() - start, capfd.readouterr().err
        errors = [text for text in output.splitlines() if text.startswith("error: ")]
        if status not in (1, 2) or len(errors) != 1 or "Traceback" in output or seconds > 10:
            failed.append((line[:80], status, seconds, output[-300:]))
    assert failed == []
