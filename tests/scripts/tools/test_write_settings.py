"""Tests of the page that lists the settings."""

import re
from dataclasses import fields, is_dataclass

import pytest

from ringattn.train.settings.config import Config
from scripts.tools import write_settings

NAMES = [
    f"{group.name}.{field.name}" if is_dataclass(group.type) else group.name
    for group in fields(Config)
    for field in (fields(group.type) if is_dataclass(group.type) else [group])
]


def test_page_is_up_to_date():
    stale = "docs/settings.md is out of date: run `python -m scripts.tools.write_settings`"
    assert write_settings.PAGE.read_text() == write_settings.page(), stale


def test_page_explains_every_setting():
    found = re.findall(r"^\*\*`([\w.]+)=.*?`\*\*: \S.*\.$", write_settings.page(), re.MULTILINE)
    assert sorted(found) == sorted(NAMES), "every setting needs a comment above its field in train/settings/config.py"


def test_output(tmp_path):
    write_settings.main(["--output", str(tmp_path / "settings.md")])
    assert (tmp_path / "settings.md").read_text() == write_settings.page()


def test_page_that_cannot_be_written_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        write_settings.main(["--output", str(tmp_path / "new" / "settings.md")])
    assert f"error: cannot write {tmp_path}/new/settings.md: [Errno 2]" in capsys.readouterr().err
