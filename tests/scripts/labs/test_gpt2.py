import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.labs import gpt2
from scripts.plots import save_plot

CPU = torch.device("cpu")
TINY = replace(gpt2.SMALL, vocab_size=64, layers=1, dim=32, heads=2, kv_heads=2)


def test_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit):
        gpt2.main(["--device", "cpu", "--variants", "eager"])
    assert "pip install 'transformers>=5'" in capsys.readouterr().err


def test_lengths_have_the_same_number_of_tokens_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()
    training_step = gpt2.training_step

    def record(loss, optimizer, tokens):
        shapes.add(tuple(tokens.shape))
        training_step(loss, optimizer, tokens)

    monkeypatch.setattr(gpt2, "training_step", record)
    rows = gpt2.measure_variant("ringattn", TINY, [8, 32], CPU, compiled=False)
    assert shapes == {(4, 9), (1, 33)}
    assert all(row.tokens_per_s > 0 and row.bytes > 0 for row in rows)


def test_length_without_enough_memory_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpt2, "training_step", fail)
    rows = gpt2.measure_variant("ringattn", TINY, [8], CPU, compiled=False)
    assert "| 8 | ringattn | 0.0 | out of memory | - |" in gpt2.results_table(rows)
    save_plot(gpt2.plot(rows, "a picture without figures"), tmp_path / "lab.png")


@pytest.mark.slow
def test_all_variants_train(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(gpt2, "SMALL", TINY)
    path = tmp_path / "lab.png"
    gpt2.main(["--device", "cpu", "--lengths", "8", "16", "--output", str(path)])
    rows = [row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines()[2:8]]
    assert [row[:2] for row in rows] == [[n, variant] for n in ("8", "16") for variant in gpt2.VARIANTS]
    assert path.stat().st_size < 100_000


@pytest.mark.slow
def test_attention_implementations_compute_the_same_loss() -> None:
    pytest.importorskip("transformers")
    tokens = torch.randint(64, (2, 16))
    losses = []
    for attention in ("eager", "sdpa"):
        torch.manual_seed(0)
        model, loss = gpt2.build_hugging_face(attention, TINY, 16, CPU, compiled=False)
        losses.append(loss(tokens, tokens).item())
        assert model.config._attn_implementation == attention
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
