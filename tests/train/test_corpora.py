"""Tests of whole runs on mixtures of several sources."""

import json
from pathlib import Path

import pytest

from tests.train.launch import SMALL

WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}


def train(run_command_line, *arguments: str) -> int:
    """Train on three files of JSON lines, each with 200 documents of 64 tokens."""
    for name in WEIGHTS:
        Path(f"{name}.jsonl").write_text(f'{{"text": "{name * 63}"}}\n' * 200)
    sources = [f"{{name:{name},source:jsonl,path:{name}.jsonl,weight:{weight}}}" for name, weight in WEIGHTS.items()]
    small = [each for each in SMALL if each != "data=text"]
    return run_command_line(*small, "data=mix", f"data.mix=[{','.join(sources)}]", "name=a", *arguments)


def test_a_run_records_the_sources_and_repeats_or_ends(run_command_line, tmp_path, monkeypatch, capfd):
    """Source a has 199 sequences and a share of 60%, so it runs out after 331 sequences. A step has 30 sequences."""
    monkeypatch.chdir(tmp_path)
    arguments = "trainer.steps=12", "trainer.batch_size=30"
    assert train(run_command_line, *arguments, "data.exhausted=end") == 0
    assert "11 instead of 12, because then the source a of data.mix runs out" in capfd.readouterr().out
    records = [json.loads(line) for line in Path("outputs/a/metrics.jsonl").read_text().splitlines()]
    assert len(records) == 11
    assert [records[-1][f"tokens/{name}"] for name in WEIGHTS] == [64 * count for count in (198, 99, 33)]
    assert records[-1]["epochs/a"] == pytest.approx(198 / 199)
    # The same command without `end` continues the run, and reports the repetition.
    assert train(run_command_line, *arguments) == 0
    output = capfd.readouterr().out
    assert "the source a ran out, and step 12 began to read it again (epoch 2)" in output
    assert "a 13,824 tokens (1.09 epochs)" in output
