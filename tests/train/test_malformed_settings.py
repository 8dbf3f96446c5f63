"""Every malformed command line is reported as one line, without a traceback and within ten seconds."""

import shlex
import time
from pathlib import Path

import pytest

from tests.train import malformed_settings

LINES = Path(__file__).with_name("malformed_settings.txt").read_text().splitlines()


def test_the_list_is_up_to_date():
    assert list(malformed_settings.generate()) == LINES
    assert len(set(LINES)) == len(LINES) >= 250


# The complete list is divided into parts, so that several processes of pytest-xdist can share the work.
PARTS = [pytest.param(LINES[i::5], id=f"part {i + 1} of 5", marks=pytest.mark.slow) for i in range(5)]


@pytest.mark.parametrize("lines", PARTS)
def test_malformed_settings_are_reported_in_one_line(lines, run_command_line, capfd):
    Path("loop").symlink_to("loop")
    Path("file").write_text("")
    failed = []
    # A run whose settings are accepted by mistake has only one step, so that the test continues with the next line.
    settings = ["logger=off", "trainer.device=cpu", "trainer.steps=1"]
    assert run_command_line(*settings, "--cfg", "job") == 0, capfd.readouterr().err
    for line in lines:
        start = time.monotonic()
        try:
            status = run_command_line(*settings, *shlex.split(line))
        except BaseException as error:
            status = repr(error)
        seconds, output = time.monotonic() - start, capfd.readouterr().err
        errors = [text for text in output.splitlines() if text.startswith("error: ")]
        if status not in (1, 2) or len(errors) != 1 or "Traceback" in output or seconds > 60:
            failed.append((line[:80], status, seconds, output[-300:]))
    assert failed == []
