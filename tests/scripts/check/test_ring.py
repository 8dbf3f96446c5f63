"""The check of a ring: it compares every transport, schedule and mask with float64 results, and reports a single wrong row."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringattn.train.settings.config import ConfigError
from scripts.accuracy import NAMES
from scripts.check import ring as check_ring
from tests.distributed import run_script
from tests.train.jobs import one_rank
from tests.train.launch import launch, own_errors

CPU = torch.device("cpu")
MASKS = ("causal", "full", "window", "documents")


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "seq_len", "title"), [("ieee", 131, ""), ("fp8", 531, ", FP8 forward")])
def test_two_ranks_match_float64(precision, seq_len, title, tmp_path):
    arguments = "--seq-len", str(seq_len), "--head-dim", "16", "--precision", precision
    lines = run_script(Path(check_ring.__file__), 2, tmp_path, *arguments).splitlines()
    assert lines[-1] == "every error is within its limit"
    assert f"2 ranks on cpu, float32, S {seq_len}, D 16{title}" in lines
    rows = [text for text in lines if text.startswith("| p2p")]
    ways = ("p2p, state", "p2p, kv", "p2p, auto, all-to-all among 2")
    assert len(rows) == len(MASKS) * len(ways)
    assert all(any(text.startswith(f"| {way} | {mask} |") for text in rows) for way in ways for mask in MASKS)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["ieee", "fp8"])
def test_four_ranks_on_gpus_match_float64(precision, tmp_path):
    """The ranks share GPUs if there are fewer than four."""
    finished = launch(4, tmp_path, "--seq-len", "515", "--precision", precision, script="scripts.check.ring")
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.splitlines()
    assert lines[-1] == "every error is within its limit"
    assert any("(several ranks share a GPU)" in text for text in lines) == (torch.cuda.device_count() < 4)
    for transport in ("nvlink", "p2p"):
        ways = [f"{transport}, {each}" for each in ("state", "kv", "state, all-to-all among 2", "kv, all-to-all among 2")]
        ways.append(f"{transport}, auto, all-to-all among 4")
        assert all(any(text.startswith(f"| {way} | {mask} |") for text in lines) for way in ways for mask in MASKS)


@pytest.mark.slow
def test_error_on_two_ranks_is_printed_once(tmp_path):
    finished = launch(2, tmp_path, "--seq-len", "63", script="scripts.check.ring")
    assert finished.returncode == 1
    assert own_errors(finished.stderr).count("error: --seq-len 63: must be at least 64 for 2 ranks") == 1


@pytest.mark.slow
def test_memory_that_runs_out_on_two_ranks_is_reported_once(tmp_path):
    arguments = "--seq-len", str(2**31 - 1), "--head-dim", "100000"
    finished = launch(2, tmp_path, *arguments, script="scripts.check.ring")
    assert finished.returncode == 1
    errors = own_errors(finished.stderr)
    assert errors.count("error: the memory is too small, use shorter lengths: ") == 1
    assert "Traceback" not in errors


def test_short_sequence_is_rejected(capsys):
    assert check_ring.main(["--seq-len", "63"]) == 1
    assert capsys.readouterr().err == "error: --seq-len 63: must be at least 64 for 1 ranks\n"
    assert not dist.is_initialized()


def test_head_dim_below_one_is_rejected(capsys):
    with pytest.raises(SystemExit):
        check_ring.main(["--head-dim", "0"])
    assert "argument --head-dim: '0' must be an integer of at least 1" in capsys.readouterr().err


def test_error_of_one_machine_is_reported(monkeypatch, capsys):
    def pick_device(name, share_gpus):
        raise ConfigError("this machine has 0 usable GPUs")

    monkeypatch.setattr(check_ring, "pick_device", pick_device)
    assert check_ring.main([]) == 1
    assert "error: this machine has 0 usable GPUs" in capsys.readouterr().err


@pytest.mark.slow
def test_single_wrong_row_of_each_tensor_is_reported(monkeypatch):
    """One row of one mask and one layout is wrong, by as much as if one of its keys were left out."""
    correct_attend = check_ring.attend

    def attend(way, layout, mask, shards, precision):
        results = correct_attend(way, layout, mask, shards, precision)
        if mask.window and layout.whole.kind == "striped":
            for result in results.values():
                result[0, 70] *= 1.01
        return results

    monkeypatch.setattr(check_ring, "attend", attend)
    with one_rank():
        failures = check_ring.check(CPU, seq_len=131, head_dim=16)
    assert all("window: rank 0 is off by" in text for text in failures)
    assert {text.split(" in ")[-1] for text in failures} == set(NAMES)


def test_correct_results_pass(capsys):
    assert check_ring.main(["--seq-len", "131", "--head-dim", "16"]) == 0
    output = capsys.readouterr().out
    assert all(f"| p2p, auto | {mask} |" in output for mask in MASKS)
    assert output.endswith("every error is within its limit\n")
