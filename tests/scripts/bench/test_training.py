"""The benchmark of training: what a job reports, how a failed job is reported, and that the peer computes the same."""

import json
from pathlib import Path

import pytest
import torch

from ringattn import flash_attention
from scripts.bench import stock_training
from scripts.bench import training as bench_training

DATE = "2026-11-24"


def row(variant: str, length: int, tokens_per_s: float) -> bench_training.Row:
    rates = {"tokens_per_s": tokens_per_s, "tflops_per_rank": 100.0, "mfu": 0.25, "peak_memory_gib": 3.0}
    return {"variant": variant, "length": length, "ranks": 2, **rates}


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check for GPUs, and describe the machine without them."""
    monkeypatch.setattr(bench_training.gpus, "require_gpus", lambda ranks: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")


def test_ratio_is_relative_to_the_fastest_stock_job_of_the_same_length():
    failing = {"variant": "stock", "length": 4096, "failed": "out of memory | 3 GiB"}
    rows = [row("ringattn", 4096, 3000), failing, row("stock-recompute", 4096, 2000), row("stock", 8192, 1)]
    ours, first, second, _ = bench_training.results_table(DATE, rows).splitlines()[2:]
    assert ours == "| 4,096 | ringattn | 1,500 | 100 | 25.0% | 3.0 | 1.50 | 2026-11-24 |"
    assert first.startswith("| 4,096 | stock | failed: out of memory / 3 GiB |")
    assert second.endswith("| 1.00 | 2026-11-24 |")


def test_error_message_of_a_job_is_found():
    text = "W0101 noise\nTraceback (most recent call last):\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.\nmore\n"
    assert bench_training.find_reason(text) == "torch.OutOfMemoryError: CUDA out of memory."
    assert bench_training.find_reason("killed\n") == "killed"
    assert bench_training.find_reason("") == "no message"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the stock job fails only without GPUs")
def test_job_with_an_error_does_not_stop_the_benchmark(tmp_path: Path, without_gpus):
    """On the CPU, `train/run.py` succeeds and the stock job fails, because it requires GPUs."""
    arguments = ["--model", "tiny", "--ranks", "1", "--lengths", "128", "--steps", "2", "--variants", "stock", "ringattn"]
    assert bench_training.main([*arguments, "--output", str(tmp_path)]) == 0
    stock, ours = json.loads((tmp_path / "training.json").read_text())["rows"]
    assert "tokens_per_s" not in stock
    assert stock["failed"]
    assert ours["tokens_per_s"] > 0
    assert ours["ranks"] == 1
    assert (tmp_path / "training.png").stat().st_size > 5_000
    assert "| 128 | stock | failed: " in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("good", "failing", "status"),
    [
        ("ringattn stock", "", 0),
        ("ringattn", "stock", 0),
        ("stock", "ringattn", 1),
        ("stock", "stock-recompute", 0),
        ("", "stock", 1),
        ("", "ringattn stock", 1),
    ],
)
def test_exit_status(good: str, failing: str, status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_gpus):
    """Some stock jobs may fail, but not all, and none of ours."""

    def measure(variant: str, model: str, length: int, *_) -> bench_training.Row:
        return row(variant, length, 1000) if variant in good.split() else {"variant": variant, "length": length, "failed": "x"}

    monkeypatch.setattr(bench_training, "measure", measure)
    monkeypatch.setattr(bench_training, "save_plot", lambda figure, path: bench_training.plt.close(figure))
    arguments = ["--lengths", "4096", "--variants", *good.split(), *failing.split(), "--output", str(tmp_path)]
    assert bench_training.main(arguments) == status


def test_more_ranks_than_gpus_are_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SystemExit, match=r"^error: 2 ranks require one GPU each, but this machine has 1: "):
        bench_training.main(["--ranks", "2", "--model", "tiny", "--lengths", "128", "--output", str(tmp_path / "x")])
    assert not (tmp_path / "x").exists()


def test_jobs_differ_only_in_their_variant(tmp_path: Path):
    stock, recompute = (
        bench_training.job_command(variant, "tiny", 128, 2, 3, tmp_path) for variant in ("stock", "stock-recompute")
    )
    assert recompute == [*stock, "--checkpointing"]
    assert "--nproc_per_node=2" in stock
    ours = bench_training.job_command("ringattn", "tiny", 128, 2, 3, tmp_path)
    assert {"model=tiny", "data.seq_len=128", "trainer.steps=3", f"hydra.run.dir={tmp_path}"} <= set(ours)
    assert {"data.eval_split=null", "data.eval_fraction=0"} <= set(ours)  # an evaluation takes as long as several steps


@pytest.mark.parametrize("key_heads", [4, 2], ids=["multi-head", "grouped"])
def test_stock_attention_computes_the_same(key_heads: int):
    q, k, v = (torch.randn(2, 33, heads, 16, dtype=torch.float64) for heads in (4, key_heads, key_heads))
    expected = flash_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(stock_training.stock_attention(q, k, v, is_causal=True), expected)
