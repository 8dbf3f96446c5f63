"""Tests of the settings of an evaluation. test_options.py tests the command."""

from dataclasses import replace

import pytest

from ringattn.train.commands import evaluate, evaluate_needle, evaluate_recall
from ringattn.train.commands.options import Model
from ringattn.train.settings.config import Config, ConfigError, DataConfig
from tests.train.jobs import one_rank


def test_another_text_is_encoded_as_the_text_of_the_training():
    trained = DataConfig(tokenizer="tokenizer.json", eos_token="</s>", special_tokens="parse", mask_documents=False)
    text = evaluate.evaluated_text(trained, {"data.source": "text", "data.path": "a.txt"})
    assert text == replace(trained, source="text")


@pytest.mark.parametrize("setting", ["data.packing=best-fit", "data.streaming=true", "data.seed=1", "data.group_size=2"])
def test_settings_of_training_sequences_are_rejected(setting):
    with pytest.raises(ConfigError, match=f"^{setting} has no effect on an evaluation: leave it out$"):
        evaluate.run_command_line(["run=any", setting])


def test_formats_without_a_place_for_facts_are_rejected():
    for form in ("prompt_completion", "chats"):
        with pytest.raises(ConfigError, match=f"^data.format={form} is impossible with facts in a long text"):
            evaluate_needle.evaluation_configs(Config(), {"data.format": form})
    assert evaluate_needle.evaluation_configs(Config(), {"data.format": "chat"})[0].format == "chat"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"data.format": "chat"},
            "^data.format=chat requires a chat template, but data.tokenizer=bytes has none: leave data.format",
        ),
        ({"data.source": "recall"}, "^data.source=recall is impossible with facts in a long text: choose another source$"),
    ],
)
def test_impossible_facts_are_rejected_before_the_model_is_loaded(overrides, message, tmp_path):
    with one_rank(), pytest.raises(ConfigError, match=message):
        evaluate_needle.evaluate_model(Model(tmp_path, tmp_path, Config()), "needle", overrides, "")


def test_recall_has_the_divisors_of_longrope_for_the_longest_sequences(monkeypatch, tmp_path):
    built = []

    def build(config, _):
        built.append(config.data.seq_len)
        raise ConfigError("built")

    monkeypatch.setattr(evaluate_recall, "build_for_inference", build)
    with one_rank(), pytest.raises(ConfigError, match="built"):
        evaluate_recall.evaluate_model(Model(tmp_path, tmp_path, Config()), {"data.seq_len": "64,128,32"}, "")
    assert built == [128]
