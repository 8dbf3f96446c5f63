import json

import pytest

from ringattn.train.sweep import Outcome, table
from tests.train.launch import SMALL, launch, own_errors, write_corpus

pytestmark = pytest.mark.timeout(300)

SUMMARY = {"final_loss": 2.5, "eval_loss": 2.75, "tokens_per_s": 12345.6, "tflops_per_rank": 0.0123}
SUMMARY |= {"mfu": None, "peak_memory_gib": 1.0}


def test_table():
    outcomes = [Outcome(["a=1", "b=2"], SUMMARY), Outcome(["a=1", "b=3"], None), Outcome(["a=1", "b=4"], None, stopped=True)]
    assert table(outcomes).splitlines() == [
        "Common to all: a=1",
        "",
        "| overrides | final loss | eval loss | tokens/s | TFLOP/s a rank | MFU | peak GiB a rank |",
        "|---|---|---|---|---|---|---|",
        "| b=2 | 2.5000 | 2.7500 | 12,346 | 0.0123 | - | 1.00 |",
        "| b=3 | failed | - | - | - | - | - |",
        "| b=4 | stopped | - | - | - | - | - |",
    ]


def test_a_sweep_over_two_ranks(tmp_path):
    """One torchrun: jobs in order, a directory each, one that cannot be does not stop the others, a table at the end."""
    settings = [*SMALL, f"data.path={write_corpus(tmp_path / 'corpus')}", "trainer.steps=3"]
    result = launch(2, tmp_path, "-m", *settings, "data.seq_len=64,1,128")
    assert result.returncode == 1
    assert "Traceback" not in own_errors(result.stderr)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and "a sequence shorter than the ring of 2 ranks" in errors[0]

    (sweep,) = (tmp_path / "outputs").iterdir()  # one directory, though two ranks were launched
    assert sorted(path.name for path in sweep.iterdir()) == ["0", "1", "2", "multirun.yaml", "sweep.md"]
    for job, seq_len in (("0", 64), ("2", 128)):
        summary = json.loads((sweep / job / "summary.json").read_text())
        assert (summary["seq_len"], summary["ranks"], summary["ring"]) == (seq_len, 2, 2)
        assert (sweep / job / ".hydra" / "config.yaml").exists()
    rows = (sweep / "sweep.md").read_text()
    assert rows.strip() in result.stdout
    assert [line.split(" | ")[0] for line in rows.splitlines()[4:]] == [
        "| data.seq_len=64",
        "| data.seq_len=1",
        "| data.seq_len=128",
    ]
    assert "failed" in rows.splitlines()[5]
