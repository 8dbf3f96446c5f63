"""Tests of the settings of an evaluation. test_options.py tests the command."""

from dataclasses import replace

from ringattn.train.commands import evaluate
from ringattn.train.settings.config import DataConfig


def test_another_text_is_encoded_as_the_text_of_the_training():
    trained = DataConfig(tokenizer="tokenizer.json", eos_token="</s>", special_tokens="parse", mask_documents=False)
    text = evaluate.evaluated_text(trained, {"data.source": "text", "data.path": "a.txt"})
    assert text == replace(trained, source="text")
