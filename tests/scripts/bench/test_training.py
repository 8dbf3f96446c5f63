"""The benchmark of training: what a job reports, what becomes of one that fails, and that the peer computes the same."""

import json
from pathlib import Path

import pytest
import torch

from ringattn import flash_attention
from scripts.bench import stock_training
from scripts.bench import training as bench_training


def row(variant: str, length: int, tokens_per_s: float) -> bench_training.Row:
    rates = {"tokens_per_s": tokens_per_s, "tflops_per_rank": 100.0, "mfu": 0.25, "peak_memory_gib": 3.0}
    return {"variant": variant, "length": length, "ranks": 2, **rates}


def test_a_ratio_is_to_the_fastest_peer_of_that_length():
    failed = {"variant": "stock", "length": 4096, "failed": "out of memory | 3 GiB"}
    rows = [row("ringattn", 4096, 3000), failed, row("stock-recompute", 4096, 2000), row("stock", 8192, 1)]
    ours, first, second, _ = bench_training.table(rows).splitlines()[2:]
    assert ours == "| 4,096 | ringattn | 1,500 | 100 | 25.0% | 3.0 | 1.50 |"
    assert first.startswith("| 4,096 | stock | failed: out of memory / 3 GiB |")
    assert second.endswith("| 1.00 |")


def test_what_a_failed_job_said_is_found():
    text = "W0101 noise\nTraceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.\nmore\n"
    assert bench_training.reason(text) == "torch.OutOfMemoryError: CUDA out of memory."
    assert bench_training.reason("killed\n") == "killed"
    assert bench_training.reason("") == "no message"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the peer fails only without GPUs")
def test_jobs_run_and_one_that_fails_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On the CPU, behind the back of the check for GPUs, which the peer makes too."""
    monkeypatch.setattr(bench_training.gpus, "require", lambda ranks: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "CPU")
    arguments = ["--model", "tiny", "--ranks", "1", "--lengths", "128", "--steps", "2", "--variants", "stock", "ringattn"]
    assert bench_training.main([*arguments, "--output", str(tmp_path)]) == 0
    stock, ours = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert "tokens_per_s" not in stock and stock["failed"]
    assert ours["tokens_per_s"] > 0 and ours["ranks"] == 1
    assert (tmp_path / "training.png").stat().st_size > 10_000
    assert "| 128 | stock | failed: " in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    "good, failed, status",
    (
        *(("ringattn stock", "", 0), ("ringattn", "stock", 0), ("stock", "ringattn", 1)),
        *(("stock", "stock-recompute", 0), ("", "stock", 1), ("", "ringattn stock", 1)),
    ),
)
def test_peers_may_fail_but_not_all(good: str, failed: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def measure(variant: str, model: str, length: int, *_) -> bench_training.Row:
        return row(variant, length, 1000) if variant in good.split() else {"variant": variant, "length": length, "failed": "x"}

    monkeypatch.setattr(bench_training.gpus, "require", lambda ranks: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(bench_training, "measure", measure)
    arguments = ["--lengths", "4096", "--variants", *good.split(), *failed.split(), "--output", str(tmp_path)]
    assert bench_training.main(arguments) == status


def test_ranks_without_gpus_are_not_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match="^error: 2 ranks need a GPU each, and this machine has 1: "):
        bench_training.main(["--ranks", "2", "--model", "tiny", "--lengths", "128", "--output", str(tmp_path / "x")])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("key_heads", [4, 2], ids=["plain", "grouped"])
def test_the_peer_attends_as_we_do(key_heads: int):
    q, k, v = (torch.randn(2, 33, heads, 16, dtype=torch.float64) for heads in (4, key_heads, key_heads))
    torch.testing.assert_close(
        stock_training.stock_attention(q, k, v, is_causal=True), flash_attention(q, k, v, is_causal=True)
    )
