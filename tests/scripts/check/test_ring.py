import pytest
import torch

from scripts.check import ring as check_ring
from tests.train.jobs import one_rank
from tests.train.launch import launch, own_errors

CPU = torch.device("cpu")


def test_two_ranks_are_held_to_float64(tmp_path):
    done = launch(2, tmp_path, "--seq-len", "131", "--head-dim", "16", script="scripts.check.ring")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "every error is within its tolerance" and "2 ranks on cpu, float32, S 131, D 16" in lines
    rows = [line for line in lines if line.startswith("| p2p")]
    ways = ("p2p, state", "p2p, kv", "p2p, auto, heads exchanged among 2")
    assert len(rows) == 4 * len(ways) and all(
        any(f"| {way} | {mask} |" in row for row in rows) for way in ways for mask in MASKS
    )


MASKS = ("causal", "full", "window", "documents")


def test_too_short_a_sequence_is_one_line(tmp_path):
    done = launch(2, tmp_path, "--seq-len", "63", script="scripts.check.ring")
    assert done.returncode == 1 and own_errors(done.stderr).count("error: --seq-len 63: every rank needs some rows") == 1


@pytest.mark.parametrize("name", check_ring.NAMES)
def test_one_wrong_row_is_told(name, monkeypatch):
    """Of one mask and one layout, by as much as a row that misses one of its keys."""
    honest = check_ring.attend

    def attend(way, layout, mask, shards):
        results = honest(way, layout, mask, shards)
        if mask.window and layout.whole.kind == "striped":
            results[check_ring.NAMES.index(name)][0, 70] *= 1.01
        return results

    monkeypatch.setattr(check_ring, "attend", attend)
    with one_rank():
        failures = check_ring.check(CPU, seq_len=131, head_dim=16)
    assert failures and all("window: rank 0 is off by" in line and line.endswith(f" in {name}") for line in failures)
