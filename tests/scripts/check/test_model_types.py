"""Types of models are exact on a ring, or rejected by name."""

import pytest

pytest.importorskip("transformers")

from scripts.check import model_types
from scripts.check.model_types import check_types
from scripts.command import ROOT

QUICK = {
    "gpt_oss": "exact",  # windows and attention sinks
    "gemma3n_text": "exact",  # layers that share keys
    "deepseek_v3": "exact",  # values with another head dim
    "opt": "exact",  # learned positions
    "gemma2": "rejected",  # softcap
    "roberta": "rejected",  # other positions
    "xlstm": "rejected",  # no attention
    "bloom": "rejected",  # attention that cannot be replaced
}


def test_some_types() -> None:
    outcomes = {outcome.kind: outcome for outcome in check_types(list(QUICK))}
    assert {kind: outcome.result for kind, outcome in outcomes.items()} == QUICK, outcomes
    assert outcomes["gemma2"].detail.startswith("Gemma2Attention passes softcap")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_type_is_wrong() -> None:
    outcomes = list(check_types(model_types.causal_types()))
    assert not [outcome for outcome in outcomes if outcome.result == "wrong"]
    assert sum(outcome.result == "rejected" for outcome in outcomes) > 60
    page = (ROOT / "docs" / "how-to" / "your-own-loop.md").read_text()
    listed = page.partition("exact on a ring:\n\n")[2].partition(".\n\n")[0].replace("\n", " ").split(", ")
    assert listed == [outcome.kind for outcome in outcomes if outcome.result == "exact"]


def test_a_wrong_mask_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that ignores documents has other logits."""
    from ringattn.transformers import batch

    monkeypatch.setattr(batch, "documents_of", lambda _: None)
    (outcome,) = check_types(["qwen3"])
    assert outcome.result == "wrong"


def test_the_command_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["model_types", "bloom"])
    model_types.main()
    assert capsys.readouterr().out.splitlines()[2].startswith("| bloom | rejected | BloomForCausalLM does not use")


def test_unknown_type_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["model_types", "opt", "lama"])
    with pytest.raises(SystemExit) as exited:
        model_types.main()
    assert exited.value.code == 2
    assert "transformers has no type lama: leave it out" in capsys.readouterr().err
