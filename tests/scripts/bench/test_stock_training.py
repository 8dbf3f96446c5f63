"""What of the stock trainer needs no GPU: which models there are."""

from pathlib import Path

import pytest

from scripts.bench import stock_training

MODELS = Path(__file__).parents[3] / "configs" / "model"


@pytest.mark.filterwarnings("error")
def test_every_model_can_be_named() -> None:
    models = {path.stem: stock_training.model_of(path.stem) for path in MODELS.glob("*.yaml")}
    assert models["llama-3.1-8b"].layers == models["8b"].layers == 32 and models["llama-3.1-8b"].rope_factor == 8.0


def test_a_model_that_there_is_not(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.argv", ["train_stock.py", "--model=9b", "--output=nowhere"])
    with pytest.raises(SystemExit):
        stock_training.main()
    assert "--model 9b: there is none in" in capsys.readouterr().err
