"""The stock training script, as far as it runs without a GPU."""

from pathlib import Path

import pytest

from scripts.bench import stock_training

MODELS = Path(__file__).parents[3] / "configs" / "model"


@pytest.mark.filterwarnings("error")
def test_all_models_are_available() -> None:
    models = {path.stem: stock_training.load_model_config(path.stem) for path in MODELS.glob("*.yaml")}
    assert models["llama-3.1-8b"].layers == models["8b"].layers == 32
    assert models["llama-3.1-8b"].rope_factor == 8.0


def test_unknown_model_is_rejected(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        stock_training.main(["--model=9b", "--output=nowhere"])
    assert f"--model 9b: no such file in {MODELS}" in capsys.readouterr().err
