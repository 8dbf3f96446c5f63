from dataclasses import asdict
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore

from ringattn.train.config import Config, ConfigError, check
from ringattn.train.run import CONFIGS, typed


def changed(**changes) -> Config:
    """The defaults with some settings changed, as model__heads=3."""
    config = Config()
    for name, value in changes.items():
        group, _, option = name.partition("__")
        setattr(getattr(config, group), option, value)
    return config


def composed(*overrides: str) -> Config:
    """What the YAML files and the overrides make."""
    ConfigStore.instance().store(name="schema", node=Config)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return typed(compose("train", list(overrides)))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def test_the_default_files_agree_with_the_typed_defaults():
    config = composed("name=run")
    assert asdict(config.model) == asdict(Config().model)
    held_out = {"split": "train[:95%]", "eval_split": "train[95%:]"}  # of the standard library; other text is the user's to cut
    assert asdict(config.data) == asdict(Config().data) | held_out
    assert asdict(config.parallel) == asdict(Config().parallel)
    assert asdict(config.logger) == asdict(Config().logger)
    check(config, world_size=2)


@pytest.mark.parametrize("group", ["model", "data", "parallel", "optim", "logger", "experiment"])
def test_every_file_is_valid(group):
    for option in options(group):
        needs_path = group == "data" and option != "stdlib"
        check(composed(f"{group}={option}", *(["data.path=x"] if needs_path else [])), world_size=4)


def test_an_experiment_changes_several_groups_and_the_command_line_has_the_last_word():
    config = composed("experiment=124m-64k", "trainer.steps=5")
    check(config, world_size=4)
    assert (config.model.dim, config.data.seq_len, config.trainer.steps) == (768, 65536, 5)


REFUSED = {
    "key heads that do not divide": (dict(model__kv_heads=3), 1, "model.kv_heads=3 does not divide model.heads=4"),
    "heads that do not divide": (dict(model__dim=130, model__heads=4), 1, "model.heads=4 does not divide model.dim=130"),
    "odd head dim": (dict(model__head_dim=33), 1, "a head dim of 33"),
    "large head dim": (dict(model__head_dim=258), 1, "a head dim of 258"),
    "no layers": (dict(model__layers=0), 1, "model.layers=0 makes no sense: it must be at least 1"),
    "no time": (dict(trainer__time_limit_s=0), 1, "trainer.time_limit_s=0 makes no sense: it must be positive"),
    "evaluations that never come": (
        dict(trainer__eval_every=-1),
        1,
        "trainer.eval_every=-1 makes no sense: it must be",
    ),
    "a length without its factor": (dict(model__rope_trained_len=4096), 1, "has no meaning without model.rope_factor"),
    "a factor without its length": (dict(model__rope_factor=4.0), 1, "set model.rope_trained_len to their tokens, too"),
    "a factor without end": (dict(model__rope_factor=float("inf")), 1, "rope_factor=inf makes no sense: it must be at least 1"),
    "evaluations of nothing": (dict(trainer__eval_tokens=61), 1, "trainer.eval_tokens=61 has no meaning"),
    "evaluations of nothing, now and then": (dict(trainer__eval_every=7), 1, "held-out text: data.eval_split"),
    "a prompt for no sample": (
        dict(trainer__sample_prompt="a", trainer__sample_tokens=0),
        1,
        "has no meaning without a sample",
    ),
    "a project without W&B": (dict(logger__project="p", logger__wandb="off"), 1, "logger.project=p has no meaning"),
    "a scaling without its factor": (dict(model__rope_scaling="yarn"), 1, "yarn has no meaning without model.rope_factor"),
    "an unknown scaling": (dict(model__rope_scaling="ntk"), 1, "unknown model.rope_scaling=ntk: choose one of llama3, yarn"),
    "yarn where no pair is slower than another": (
        dict(model__rope_scaling="yarn", model__rope_factor=2.0, model__rope_trained_len=64, model__rope_theta=1.0),
        1,
        "model.rope_theta=1.0 with model.rope_scaling=yarn",
    ),
    "a factor below 1": (dict(model__rope_factor=0.5), 1, "model.rope_factor=0.5 makes no sense: it must be at least 1"),
    "window below 1": (dict(model__window=0), 1, "model.window=0 makes no sense: it must be at least 1"),
    "ring that does not divide": (dict(parallel__ring=3), 4, "parallel.ring=3 does not divide the 4 ranks"),
    "ring larger than the world": (dict(parallel__ring=4), 2, "choose one of 1, 2"),
    "Ulysses that does not divide the ring": (dict(parallel__ulysses=4), 6, "must divide the 6 ranks that share a sequence"),
    "Ulysses that does not divide the heads": (dict(parallel__ulysses=8), 8, "choose one of 1, 2, 4"),
    "sequence shorter than the ring": (dict(data__seq_len=3), 4, "a sequence shorter than the ring of 4 ranks"),
    "unknown layout": (dict(parallel__layout="spiral"), 1, "choose one of contiguous, zigzag, striped, auto"),
    "unknown schedule": (dict(parallel__schedule="fast"), 1, "unknown parallel.schedule=fast"),
    "unknown kernel": (dict(parallel__kernel="cuda"), 1, "unknown parallel.kernel=cuda"),
    "unknown source": (dict(data__source="web"), 1, "choose one of stdlib, text, jsonl, parquet, hub"),
    "unknown precision": (dict(trainer__precision="fp8"), 1, "choose one of auto, fp32, bf16"),
    "unknown lr schedule": (dict(optim__schedule="linear"), 1, "choose one of cosine, wsd"),
    "warmup longer than the run": (dict(optim__warmup_steps=101), 1, "optim.warmup_steps=101 exceeds trainer.steps=100"),
    "lr that is no number": (dict(optim__lr=float("nan")), 1, "optim.lr=nan makes no sense: it must be positive"),
    "one beta": (dict(optim__betas=[0.9]), 1, "AdamW takes two numbers"),
    "decay longer than the run": (dict(optim__decay_fraction=1.5), 1, "above 0, at most 1"),
    "negative decay": (dict(optim__weight_decay=-0.1), 1, "optim.weight_decay=-0.1 makes no sense"),
}


@pytest.mark.parametrize(("changes", "world_size", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(changes, world_size, message):
    config = changed(trainer__steps=100)
    for name, value in changes.items():
        group, _, option = name.partition("__")
        setattr(getattr(config, group), option, value)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        check(config, world_size)


def test_configs_stand_beside_the_package():
    assert CONFIGS == Path(__file__).resolve().parents[2] / "configs"
