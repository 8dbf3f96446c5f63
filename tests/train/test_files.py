"""Tests of the functions that write files."""

import os

from ringattn.train.files import write_atomically


def test_file_is_complete_on_the_disk_before_it_replaces_another(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: events.append("sync") or fsync(file))
    monkeypatch.setattr(os, "replace", lambda *names: events.append("rename") or replace(*names))
    write_atomically(tmp_path / "a", b"text")
    assert events == ["sync", "rename"]
    assert (tmp_path / "a").read_text() == "text"
