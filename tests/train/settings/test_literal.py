"""Text in files and in settings is never replaced by the value of an environment variable or of another setting."""

import random
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ringattn.train.checkpoint.resume import saved_config
from ringattn.train.commands.arguments import apply_overrides
from ringattn.train.commands.options import folder_config
from ringattn.train.commands.run import to_config
from ringattn.train.settings.config import Config, ConfigError, MixSource, unused_settings, with_settings
from ringattn.train.settings.literal import literal_config, literal_settings
from tests.train.hub_models import write_config

SECRET = "${oc.env:SECRET}"


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("SECRET", "7")


def random_texts(count: int = 60) -> list[str]:
    draw, parts = random.Random(0), ["\\", "$", "{", "}", "${", SECRET, "${name}", "a", "'", '"', "\n", ":"]
    return [SECRET, "\\" + SECRET, *("".join(draw.choices(parts, k=draw.randrange(9))) for _ in range(count))]


def test_every_text_is_kept():
    texts = random_texts()
    assert sum("${" in text for text in texts) > 20
    for text in texts:
        settings = {"name": text, "trainer": {"sample_prompt": text}, "data": {"path": text}}
        config = OmegaConf.to_object(literal_settings(settings))
        assert (config.name, config.trainer.sample_prompt, config.data.path) == (text, text, text)


def test_changed_result_does_not_change_the_defaults():
    settings = literal_settings({})
    settings.trainer.steps = 7
    settings.optim.betas[0] = 0.5
    settings.data.mix.append(MixSource(name="other"))
    literal_config({}).data.mix.append(None)
    assert literal_settings({}) == OmegaConf.structured(Config)


@pytest.mark.parametrize("group", ["model", "data", "parallel", "optim", "trainer", "logger"])
def test_every_string_of_a_checkpoint_is_kept_or_rejected(group):
    """Settings that have no effect are reset to their defaults when a checkpoint is loaded."""
    for name, default in vars(getattr(Config(), group)).items():
        try:
            config = saved_config({"config": {group: {name: SECRET}}})
        except ConfigError as error:
            assert SECRET in str(error)
        else:
            value = getattr(getattr(config, group), name)
            unused = {unused_name for unused_name, _, _ in unused_settings(literal_config({group: {name: SECRET}}))}
            assert value == (default if f"{group}.{name}" in unused else SECRET)


def test_element_of_a_list_is_rejected():
    with pytest.raises(ConfigError, match=r"optim.betas\[1\]: .*could not be converted to Float"):
        saved_config({"config": {"optim": {"betas": [0.9, SECRET]}}})


def test_commands_for_inference_keep_the_text():
    config = with_settings(Config(), dict.fromkeys(("name", "data.path", "trainer.sample_prompt"), SECRET))
    changed = apply_overrides(config, {"trainer.device": "cpu"})
    assert (changed.name, changed.data.path, changed.trainer.sample_prompt) == (SECRET, SECRET, SECRET)


def test_model_of_a_folder_is_rejected(tmp_path):
    folder = tmp_path / SECRET
    write_config(folder, max_window_layers=0, model_type="mistral", sliding_window=SECRET)
    Path(folder, "tokenizer.json").write_text("{}")
    with pytest.raises((ConfigError, OmegaConfBaseException), match="SECRET"):
        apply_overrides(folder_config(folder), {})


def test_value_from_the_environment_is_not_replaced_again(monkeypatch):
    """The user may insert a variable. References inside its text are not replaced."""
    monkeypatch.setenv("PROMPT", SECRET)
    composed = OmegaConf.create({"trainer": {"sample_prompt": "${oc.env:PROMPT}"}})
    assert to_config(composed).trainer.sample_prompt == SECRET
