import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.labs import gpt2
from scripts.plots import save_plot

CPU = torch.device("cpu")
TINY = replace(gpt2.SMALL, vocab_size=256, layers=1, dim=32, heads=2, kv_heads=2)
TEXT = gpt2.text_of_steps(3, 32, 256)


def build(variant: str) -> tuple[torch.nn.Module, gpt2.Loss]:
    if variant == "ringattn":
        return gpt2.build_ringattn(TINY, CPU, compiled=False)
    pytest.importorskip("transformers")
    return gpt2.build_hugging_face(variant, TINY, 32, CPU, compiled=False)


def test_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit):
        gpt2.main(["--device", "cpu", "--variants", "eager"])
    assert "pip install 'transformers>=5'" in capsys.readouterr().err


def test_lengths_that_do_not_divide_the_longest_one_are_an_error(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        gpt2.main(["--device", "cpu", "--lengths", "8", "12"])
    assert "--lengths 8 12: every length must divide" in capsys.readouterr().err


def test_length_beyond_the_text_is_an_error(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        gpt2.main(["--device", "cpu", "--lengths", "100000000"])
    assert "21 steps of 100000000 tokens are longer than the text" in capsys.readouterr().err.splitlines()[-1]


def test_steps_of_all_lengths_have_the_same_tokens() -> None:
    batches = []

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        batches.append((tokens, labels))
        return torch.zeros((), requires_grad=True)

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for length in (8, 32):
        gpt2.training_step(loss, optimizer, TEXT[0], length)
    assert [tokens.shape for tokens, _ in batches] == [(4, 8), (1, 32)]
    for tokens, labels in batches:
        assert torch.equal(tokens.flatten(), TEXT[0, :-1])
        assert torch.equal(labels.flatten(), TEXT[0, 1:])
    assert torch.equal(TEXT[0, -1], TEXT[1, 0])
    first = sorted(Path(os.__file__).parent.glob("*.py"))[0]
    assert bytes(TEXT[0].tolist()) == first.read_bytes()[:33]


@pytest.mark.parametrize("variant", ["ringattn", *(pytest.param(x, marks=pytest.mark.slow) for x in ("eager", "sdpa"))])
def test_models_attend_to_earlier_tokens_only(variant: str) -> None:
    """The loss of the token at position 5 depends on the token at position 2, but not on the token at position 8."""
    model, loss = build(variant)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    losses = []
    for changed in (None, 2, 8):
        tokens = torch.arange(16)[None].clone()
        if changed is not None:
            tokens[0, changed] = 99
        labels = torch.full((1, 16), -100)
        labels[0, 5] = 7
        losses.append(loss(tokens, labels).item())
    assert losses[1] != pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == losses[0]


def test_a_row_contains_the_loss_after_training() -> None:
    """Before the training, all tokens have about the same probability."""
    row, longer = (gpt2.measure_variant("ringattn", TINY, 32, TEXT[[0] * n], CPU, compiled=False) for n in (2, 20))
    assert row.tokens_per_s > 0
    assert row.host_ms > 0
    assert row.bytes > 0
    assert longer.loss < row.loss < math.log(256)


def test_length_without_enough_memory_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpt2, "training_step", fail)
    row = gpt2.measure_variant("ringattn", TINY, 8, TEXT, CPU, compiled=False)
    assert "| 8 | no | ringattn | 0.0 | out of memory | - | - | - |" in gpt2.results_table([row])
    save_plot(gpt2.plot([row], "a picture without figures"), tmp_path / "lab.png")


@pytest.mark.slow
def test_all_variants_train(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both implementations of attention in transformers reach the same loss."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(gpt2, "SMALL", TINY)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    path = tmp_path / "lab.png"
    gpt2.main(["--device", "cpu", "--lengths", "8", "16", "--compile", "both", "--output", str(path)])
    rows = [row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines()[2:14]]
    expected = [[n, compiled, variant] for n in ("8", "16") for compiled in ("no", "yes") for variant in gpt2.VARIANTS]
    assert [row[:3] for row in rows] == expected
    losses = {(length, variant): float(loss) for length, _, variant, *_, loss in rows}
    for length in ("8", "16"):
        assert losses[length, "eager"] == pytest.approx(losses[length, "sdpa"], abs=0.002)
        assert losses[length, "ringattn"] < 5.6
    assert path.stat().st_size < 100_000


@pytest.mark.slow
def test_transformers_uses_the_given_attention() -> None:
    for attention in ("eager", "sdpa"):
        assert build(attention)[0].config._attn_implementation == attention
