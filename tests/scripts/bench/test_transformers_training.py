"""Test the peers in the benchmark of training: their rates count the same FLOPs as those of ringattn."""

from dataclasses import replace

import pytest
import torch

from ringattn import Mask
from ringattn.train.model import flops
from ringattn.train.model.gpt import GPT
from ringattn.train.parallel.memory.estimate import used_block_parameters
from scripts.bench import stock_training, transformers_training
from scripts.bench.stock_training import load_model_config


@pytest.mark.parametrize("name", ["qwen3-0.6b"])
def test_flops_are_those_of_the_training_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with a window counts only the pairs that its mask allows."""
    config = replace(load_model_config(name), layers=3, layer_types=["sliding", "sliding", "full"], window=100)
    monkeypatch.setattr(flops, "peak_flops", lambda device: None)
    monkeypatch.setattr(stock_training, "peak_memory_gib", lambda device: 0.0)
    counted: list[int] = []
    step_flops = flops.step_flops
    monkeypatch.setattr(flops, "step_flops", lambda *arguments: counted.append(arguments[2]) or step_flops(*arguments))
    with torch.device("meta"):
        model = GPT(config, 256)
    summary = transformers_training.summarise(model, 1000, 0.5, torch.device("cpu"), ranks=1)
    assert counted == [2 * Mask.causal(100).pairs(1000)[0] + 1000 * 1001 // 2]
    assert summary["tokens_per_s"] == 2000


def test_flops_of_gpt_oss_count_the_chosen_experts_and_the_allowed_pairs() -> None:
    config = load_model_config("gpt-oss-4b")
    with torch.device("meta"):
        model = GPT(config, 256)
    summary = stock_training.summarise(model, 1000, 1e-12, torch.device("cpu"), ranks=1)
    weights = config.layers * used_block_parameters(config) + 50_304 * 2880
    pairs = 2 * Mask.causal(128).pairs(1000)[0] + 2 * 1000 * 1001 // 2
    assert summary["tflops_per_rank"] == pytest.approx(6 * weights * 1000 + 12 * 64 * 64 * pairs)


@pytest.mark.slow
def test_a_small_gpt_oss_trains() -> None:
    """The first loss of random tokens is the logarithm of the vocabulary."""
    config = replace(load_model_config("gpt-oss-4b"), vocab_size=64, dim=64, heads=4, kv_heads=2, ffn_dim=32, window=16)
    summary = transformers_training.train(config, 64, 3, torch.device("cpu"))
    assert summary["tokens_per_s"] > 0
