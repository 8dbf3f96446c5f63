"""The benchmark of generation, with a tiny model on the CPU. Speeds are not checked, only that both implementations run."""

from dataclasses import replace

import pytest
import torch

from ringattn.train.inference import token_step
from ringattn.train.settings.config import ModelConfig
from scripts.bench import generation

CONFIG = ModelConfig(vocab_size=64, layers=2, dim=64, heads=4, kv_heads=2)
CPU = torch.device("cpu")


def test_ringattn_appends_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token attends to all earlier tokens."""
    lengths = []
    decode = token_step.decode

    def record(*arguments, place, **options):
        lengths.append(int(place.bounds[1]))
        return decode(*arguments, place=place, **options)

    monkeypatch.setattr(token_step, "decode", record)
    speed = generation.time_ringattn(CONFIG, 32, 3, CPU)
    assert lengths[::2] == list(range(33, 33 + generation.WARM_UP + 3))
    assert speed.ms_per_token > 0


@pytest.mark.slow
def test_transformers_generates_after_a_filled_cache() -> None:
    """The cache holds the context, so every step processes one token."""
    pytest.importorskip("transformers")
    theirs = generation.time_transformers(CONFIG, 32, 3, CPU, compiled=False)
    assert theirs.ms_per_token > 0
    assert theirs.bytes == generation.time_ringattn(CONFIG, 32, 3, CPU).bytes


def test_the_bytes_of_a_token() -> None:
    """Keys and values of all layers, and all weights in bf16. An embedding that is not the output matrix is not read."""
    tied = 2 * (2 * 2 * 100 * 2 * 16 + 10_000)
    assert generation.bytes_per_token(CONFIG, 100, 10_000) == tied
    assert generation.bytes_per_token(replace(CONFIG, tie_embeddings=False), 100, 10_000) == tied - 2 * 64 * 64


def test_the_first_tokens_are_not_timed() -> None:
    """Compilation takes place while they are generated."""
    times = [100.0 * i for i in range(generation.WARM_UP)] + [1000.0, 1000.5, 1001.0]
    assert generation.speed_of(times, CONFIG, 100, 10_000).ms_per_token == pytest.approx(500)


def test_failures_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(generation, "time_ringattn", fail)
    monkeypatch.setattr(generation, "time_transformers", lambda *_, compiled: generation.Speed(1.0 + compiled, 10))
    results = generation.measure(CONFIG, 32, 3, CPU)
    assert results["ringattn"] == "RuntimeError: no memory"
    assert results["transformers, compiled"].ms_per_token == 2.0
