"""Tests of the default settings, of the YAML files, and of the checks of settings."""

from dataclasses import FrozenInstanceError, asdict, replace
from functools import cache
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from ringattn.train import optim
from ringattn.train.commands.run import CONFIGS, to_config
from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import (
    Config,
    ConfigError,
    ModelConfig,
    ParallelConfig,
    Rope,
    check,
    check_values,
    with_settings,
)
from ringattn.train.settings.token_budget import by_ranks, resolve_token_budget


def changed(**changes) -> Config:
    """The default settings with some changes, such as model__heads=3."""
    return with_settings(Config(), {name.replace("__", "."): value for name, value in changes.items()})


@cache
def composed(*overrides: str) -> Config:
    """The settings that Hydra composes from the YAML files and the overrides."""
    ConfigStore.instance().store(name="schema", node=Config)
    OmegaConf.register_new_resolver("by_ranks", by_ranks, replace=True)
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return to_config(compose("train", ["name=a", *overrides]))


def options(group: str) -> list[str]:
    """The names of the YAML files of a group."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def test_default_yaml_files_equal_the_defaults_of_the_dataclasses():
    config = composed("name=run")
    assert asdict(config.model) == asdict(Config().model)
    # Only the standard library is split by default, because users split their own text themselves.
    held_out = {"split": "train[:95%]", "eval_split": "train[95%:]"}
    assert asdict(config.data) == asdict(Config().data) | held_out
    assert asdict(config.parallel) == asdict(Config().parallel)
    assert asdict(config.logger) == asdict(Config().logger)
    check(config, world_size=2)


# The promises in the names and comments of all YAML files, such as a model's number of parameters in millions.
LLAMA, QWEN = {"rope_theta": 500_000, "rope_trained_len": 8192}, {"rope_theta": 1_000_000, "norm_eps": 1e-6}
RECALL = {"data.source": "recall", "optim.schedule": "wsd", "trainer.checkpoint_every": 0}
PROMISES = {
    "model": {
        "1.4b": (1439, {"head_dim": None, "dim": 2048, "heads": 16}),
        "124m": (124, {"layers": 12, "dim": 768, "heads": 12}),
        "350m": (355, {"layers": 24, "dim": 1024, "heads": 16}),
        "52m": (52, {"qk_norm": True, "vocab_size": None}),
        "70b": (70554, {"layers": 80, "dim": 8192, "heads": 64, "kv_heads": 8}),
        "8b": (8030, {"layers": 32, "dim": 4096, "kv_heads": 8, "rope_factor": None}),
        "gemma-3-4b": (3880, {"norm": "rms_plus_one", "norm_position": "both", "window": 1024, "rope_scaling": "linear"}),
        "gpt-oss-4b": (3582, {"sinks": True, "window": 128, "experts": 32, "experts_per_token": 4, "activation": "clamped"}),
        "llama-3.1-8b": (8030, LLAMA | {"rope_factor": 8, "layers": 32}),
        "llama-3.2-1b": (1236, LLAMA | {"rope_factor": 32, "tie_embeddings": True}),
        "qwen2.5-7b": (7616, QWEN | {"qkv_bias": True, "qk_norm": False, "tie_embeddings": False}),
        "qwen3-0.6b": (596, QWEN | {"qk_norm": True, "qkv_bias": False, "head_dim": 128}),
        "qwen3-8b": (8191, QWEN | {"qk_norm": True, "qkv_bias": False, "tie_embeddings": False}),
        "recall": (0.468, {"layers": 2, "qk_norm": True}),
        "tiny": (0.435, {"layers": 2}),
    },
    "data": {
        "hub": {"source": "hub", "subset": None, "split": "train", "column": "text"},
        "jsonl": {"source": "jsonl", "column": "text"},
        "mix": {"source": "mix", "mix": []},
        "prepared": {"source": "prepared"},
        "packages": {"source": "packages", "split": "train[:95%]", "eval_split": "train[95%:]"},
        "parquet": {"source": "parquet", "column": "text"},
        "recall": {"source": "recall"},
        "stdlib": {"source": "stdlib", "split": "train[:95%]", "eval_split": "train[95%:]"},
        "text": {"source": "text", "split": "train", "eval_split": None},
    },
    "parallel": {
        "auto": {"mesh": "sizes", "ring": None, "ulysses": 1, "layout": "auto", "schedule": "auto", "route": "auto"},
        "fastest": {"mesh": "fastest", "ring": None, "ulysses": None},
        "hybrid": {"mesh": "sizes", "ring": None, "ulysses": None},
        "kv_ring": {"schedule": "kv", "route": "relay", "ulysses": 1},
        "state_ring": {"schedule": "state", "route": "relay", "ulysses": 1},
        "ulysses": {"ulysses": 0},
    },
    "optim": {"cosine": {"schedule": "cosine"}, "wsd": {"schedule": "wsd", "decay_fraction": 0.2}},
    "logger": {name: {"wandb": name} for name in ("auto", "off", "offline", "online")},
    "recipe": {
        "cpu": (0.435, {"trainer.steps": 1500}),
        "gpu": (52, {"data.source": "packages", "data.seq_len": 32_768, "trainer.steps": 500}),
    },
    "experiment": {
        "124m-64k": (124, {"data.seq_len": 65_536, "trainer.tokens_per_step": 8 * 65_536, "trainer.steps": 5000}),
        "benchmark-124m-64k": (124, {"data.seq_len": 65_536, "trainer.steps": 20, "trainer.save_final": False}),
        "context-sweep": (0.435, {"trainer.tokens_per_step": 4096, "trainer.total_tokens": 262_144}),
        # The facts and the queries have 32 tokens each, and the answers lie at most this number of tokens back.
        "recall": (0.468, RECALL | {"data.seq_len": 1024 + 64, "trainer.steps": 400}),
        "recall-16k": (0.468, RECALL | {"data.seq_len": 16_384 + 64, "trainer.steps": 1000}),
        "recall-64k": (0.468, RECALL | {"data.seq_len": 65_536 + 64, "trainer.steps": 500}),
    },
}


@pytest.mark.parametrize("group", PROMISES)
def test_every_yaml_file_keeps_its_promise_and_is_valid(group):
    assert options(group) == sorted(PROMISES[group])
    for option, promise in PROMISES[group].items():
        needs_path = group == "data" and option not in ("mix", "stdlib", "packages", "recall")
        config = composed(f"{group}={option}", *(["data.path=x"] if needs_path else []))
        parameters, promise = promise if isinstance(promise, tuple) else (None, promise)
        if parameters is not None:
            assert num_parameters(config.model) / 1e6 == pytest.approx(parameters, rel=0.01), option
        settings = config if group in ("recipe", "experiment") else getattr(config, group)
        assert {name: attrgetter(name)(settings) for name in promise} == promise, option
        if option != "mix":  # It has no sources yet.
            check(resolve_token_budget(config, world_size=4), world_size=4)


def test_jobs_of_the_context_sweep_train_on_the_same_tokens():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        sweep = compose("train", ["experiment=context-sweep"], return_hydra_config=True).hydra
    assert (sweep.mode.name, sweep.sweeper.params) == ("MULTIRUN", {"data.seq_len": "512,1024,2048,4096"})
    for length in (512, 1024, 2048, 4096):
        config = composed("experiment=context-sweep", f"data.seq_len={length}")
        config = resolve_token_budget(config, world_size=2)
        assert (config.trainer.accumulate, config.trainer.steps) == (4096 // length, 64)


def test_command_line_overrides_an_experiment():
    """An experiment sets options of several groups."""
    config = composed("experiment=124m-64k", "trainer.steps=5")
    check(config, world_size=4)
    assert (config.model.dim, config.data.seq_len, config.trainer.steps) == (768, 65536, 5)


def num_parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(model, vocab_size=257).parameters())


@pytest.mark.parametrize("group", ["model", "optim", "recipe", "experiment"])
def test_learning_rate_follows_from_the_model(group):
    """No YAML file sets the rate. The command line can combine any model and sizes with any recipe or experiment."""
    for option in options(group):
        assert composed(f"{group}={option}").optim.lr is None


def test_command_line_chooses_another_model_for_every_recipe_and_experiment():
    expected = num_parameters(composed("model=1.4b").model)
    for choice in [f"{group}={option}" for group in ("recipe", "experiment") for option in options(group)]:
        assert num_parameters(composed(choice, "model=1.4b").model) == expected, choice


def test_default_model_of_a_gpu_keeps_its_learning_rate():
    model = composed("recipe=gpu").model
    assert optim.default_lr(num_parameters(model), model.qk_norm, continued=False) == pytest.approx(1.5e-3, rel=0.01)


def test_steps_of_an_experiment_have_the_same_tokens_at_every_length():
    config = composed("experiment=124m-64k", "data.seq_len=131072")
    config = resolve_token_budget(config, world_size=4)
    assert (config.trainer.accumulate, config.trainer.tokens_per_step) == (4, 524288)


YARN = dict(model__rope_scaling="yarn", model__rope_factor=2.0, model__rope_trained_len=64)

# For each kind of mistake: the changes of the default settings, the number of ranks, and what the message must name.
INVALID = {
    "key heads that do not divide the heads": (dict(model__kv_heads=3), 1, ["model.kv_heads=3", "model.heads=4", "1, 2, 4"]),
    "heads that do not divide the width": (dict(model__dim=130), 1, ["model.heads=4", "model.dim=130"]),
    "odd head dim": (dict(model__head_dim=33), 1, ["33", "even", "model.head_dim"]),
    "head dim above the largest one": (dict(model__head_dim=258), 1, ["258", "256", "model.head_dim"]),
    "no layers": (dict(model__layers=0), 1, ["model.layers=0", "from 1 to"]),
    "no time": (dict(trainer__time_limit_s=0), 1, ["trainer.time_limit_s=0", "from 1e-"]),
    "negative interval": (dict(trainer__eval_every=-1), 1, ["trainer.eval_every=-1", "from 0 to"]),
    "length without its factor": (dict(model__rope_trained_len=4096), 1, ["rope_trained_len=4096", "model.rope_factor"]),
    "factor without its length": (dict(model__rope_factor=4.0), 1, ["rope_factor=4.0", "model.rope_trained_len"]),
    "infinite factor": (dict(model__rope_factor=float("inf")), 1, ["rope_factor=inf", "from 1 to"]),
    "factor below 1": (dict(model__rope_factor=0.5), 1, ["model.rope_factor=0.5", "from 1 to"]),
    "scaling without its factor": (dict(model__rope_scaling="yarn"), 1, ["rope_scaling=yarn", "model.rope_factor"]),
    "unknown scaling": (dict(model__rope_scaling="ntk"), 1, ["model.rope_scaling=ntk", "llama3, yarn"]),
    "yarn with constant frequencies": (YARN | dict(model__rope_theta=1.0), 1, ["rope_theta=1.0", "rope_scaling=yarn"]),
    "evaluation without held-out text": (
        dict(trainer__eval_tokens=61, data__eval_fraction=0.0),
        1,
        ["trainer.eval_tokens=61", "data.eval_split"],
    ),
    "interval without held-out text": (
        dict(trainer__eval_every=7, data__eval_fraction=0.0),
        1,
        ["trainer.eval_every=7", "data.eval_fraction"],
    ),
    "all text held out": (dict(data__eval_fraction=1.0), 1, ["data.eval_fraction=1.0", "from 0 to"]),
    "fraction of text with a split of its own": (
        dict(data__eval_fraction=0.1, data__eval_split="train[90%:]"),
        1,
        ["data.eval_fraction=0.1", "data.eval_split"],
    ),
    "evaluation of a split that is switched off": (
        dict(data__eval_fraction=0.0, data__source="packages", data__split="train[:95%]", data__eval_split="train[95%:]"),
        1,
        ["data.eval_fraction=0.0", "data.eval_split=train[95%:]", "data.eval_path=None", "set both to null"],
    ),
    "prompt without a sample": (
        dict(trainer__sample_prompt="a", trainer__sample_tokens=0),
        1,
        ["trainer.sample_prompt=a", "trainer.sample_tokens"],
    ),
    "prompt that is not UTF-8": (dict(trainer__sample_prompt="a\udcffb"), 1, ["trainer.sample_prompt=a?b: must be UTF-8"]),
    "project without W&B": (dict(logger__project="p", logger__wandb="off"), 1, ["logger.project=p", "logger.wandb"]),
    "norm of all heads without a norm": (dict(model__qk_norm_all_heads=True), 1, ["qk_norm_all_heads=True", "model.qk_norm:"]),
    "parallel layers with norms after them": (
        dict(model__parallel=True, model__norm_position="both"),
        1,
        ["model.parallel=true", "norm_position=both"],
    ),
    "unknown norm": (dict(model__norm="batch"), 1, ["model.norm=batch", "rms, rms_plus_one, layer"]),
    "longrope without its divisors": (
        dict(model__rope_factor=2.0, model__rope_trained_len=64, model__rope_scaling="longrope"),
        1,
        ["rope_scaling=longrope", "model.rope_factors", "32 positive numbers"],
    ),
    "divisors without longrope": (dict(model__rope_factors=[1.0]), 1, ["rope_factors=[1.0]", "model.rope_scaling=longrope"]),
    "window below 1": (dict(model__window=0), 1, ["model.window=0", "from 1 to"]),
    "unknown layer type": (dict(model__layer_types=["full", "local"]), 1, ["model.layer_types=[full,local]", "full-nope"]),
    "more layer types than layers": (dict(model__layer_types=["full"] * 3), 1, ["[full,full,full]", "model.layers=2"]),
    "no layer types": (dict(model__layer_types=[]), 1, ["model.layer_types=[]", "from 1"]),
    "sliding layers without a window": (dict(model__layer_types=["sliding"]), 1, ["model.layer_types", "model.window"]),
    "window without sliding layers": (dict(model__layer_types=["full"], model__window=5), 1, ["model.window=5", "layer_types"]),
    "local theta without sliding layers": (dict(model__local_rope_theta=5.0), 1, ["local_rope_theta=5", "model.layer_types"]),
    "fraction of an odd number": (dict(model__rotary_fraction=0.1), 1, ["rotary_fraction=0.1", "3 of 32", "even"]),
    "linear scaling with a length": (
        dict(model__rope_factor=2.0, model__rope_trained_len=64, model__rope_scaling="linear"),
        1,
        ["rope_trained_len=64", "rope_scaling=linear"],
    ),
    "ring that does not divide the ranks": (dict(parallel__ring=3), 4, ["parallel.ring=3", "4", "1, 2, 4"]),
    "ring of more ranks than there are": (dict(parallel__ring=4), 2, ["parallel.ring=4", "1, 2"]),
    "Ulysses that does not divide the ring": (dict(parallel__ulysses=4), 6, ["parallel.ulysses=4", "6", "1, 2"]),
    "Ulysses that does not divide the heads": (dict(parallel__ulysses=8), 8, ["model.heads=4", "1, 2, 4"]),
    "sequence shorter than the ring": (dict(data__seq_len=3), 4, ["data.seq_len=3", "4"]),
    "unknown layout": (dict(parallel__layout="spiral"), 1, ["spiral", "contiguous, zigzag, striped, auto"]),
    "unknown schedule": (dict(parallel__schedule="fast"), 1, ["parallel.schedule=fast", "state, kv"]),
    "unknown kernel": (dict(parallel__kernel="cuda"), 1, ["parallel.kernel=cuda", "hopper"]),
    "text for the recall task": (dict(data__source="recall", data__path="x"), 1, ["data.path=x", "data.source=recall"]),
    "split of the recall task": (dict(data__source="recall", data__split="x"), 1, ["data.split=x", "data.source=recall"]),
    "recall across documents": (dict(data__source="recall", data__mask_documents=False), 1, ["data.mask_documents=false"]),
    "unknown source": (dict(data__source="web"), 1, ["data.source=web", "stdlib, packages, text, jsonl"]),
    "unknown precision": (dict(trainer__precision="fp8"), 1, ["trainer.precision=fp8", "auto, fp32, bf16"]),
    "unknown use of FP8": (dict(trainer__fp8_attention="on"), 1, ["trainer.fp8_attention=on", "never, inference, always"]),
    "FP8 in evaluation without evaluation": (
        dict(trainer__fp8_attention="inference", data__eval_fraction=0.0, trainer__sample_tokens=0),
        1,
        ["trainer.fp8_attention=inference", "held-out text", "trainer.sample_tokens", "always"],
    ),
    "unknown learning-rate schedule": (dict(optim__schedule="linear"), 1, ["optim.schedule=linear", "cosine, wsd"]),
    "offload of one layer": (dict(memory__activations="offload", model__layers=1), 1, ["memory.activations=offload", "two"]),
    "8-bit moments in host memory": (
        dict(memory__moments="8bit", memory__optimizer="offload", model__dim=256),
        1,
        ["memory.moments=8bit", "memory.optimizer=offload", "leave one of them out"],
    ),
    "8-bit moments of narrow matrices": (dict(memory__moments="8bit"), 1, ["memory.moments=8bit", "256", "is 128", "use fp32"]),
    "warmup longer than the run": (dict(optim__warmup_steps=101), 1, ["optim.warmup_steps=101", "trainer.steps=100"]),
    "learning rate that is not a number": (dict(optim__lr=float("nan")), 1, ["optim.lr=nan", "from 1e-"]),
    "one beta": (dict(optim__betas=[0.9]), 1, ["optim.betas=[0.9]", "two numbers"]),
    "decay longer than the run": (
        dict(optim__schedule="wsd", optim__decay_fraction=1.5),
        1,
        ["decay_fraction=1.5", "to 1"],
    ),
    "decay fraction of a cosine": (dict(optim__decay_fraction=0.5), 1, ["optim.decay_fraction=0.5", "optim=wsd"]),
    "negative decay": (dict(optim__weight_decay=-0.1), 1, ["optim.weight_decay=-0.1", "from 0 to"]),
    "last learning rate above the peak": (dict(optim__min_lr_ratio=1.5), 1, ["optim.min_lr_ratio=1.5", "from 0 to 1"]),
    "seed of more than 63 bits": (dict(data__seed=2**63), 1, ["data.seed=9223372036854775808", "9223372036854775807"]),
    "files of the standard library": (dict(data__path="a"), 1, ["data.path=a", "data.source=stdlib", "data=text"]),
    "held-out files of the standard library": (dict(data__eval_path="a"), 1, ["data.eval_path=a", "data.source=stdlib"]),
    "subset of files": (dict(data__source="text", data__subset="en"), 1, ["data.subset=en", "data=hub"]),
    "column of text files": (dict(data__source="text", data__column="body"), 1, ["data.column=body", "data.source=text"]),
    "initial weights and a checkpoint": (
        dict(trainer__init_from="a", trainer__resume="b"),
        1,
        ["trainer.init_from=a", "trainer.resume=b"],
    ),
}


@pytest.mark.parametrize(("changes", "world_size", "named"), INVALID.values(), ids=INVALID.keys())
def test_message_names_the_setting_and_the_remedy(changes, world_size, named):
    config = changed(trainer__steps=100, **changes)
    with pytest.raises(ConfigError) as error:
        check(config, world_size)
    assert [part for part in named if part not in str(error.value)] == []


def test_settings_that_depend_on_another_one_are_valid_with_it():
    """The valid counterparts of combinations that are invalid above."""
    check(changed(**YARN), 1)
    check(changed(optim__schedule="wsd", optim__decay_fraction=0.5), 1)
    check(changed(data__eval_split="train[90%:]", trainer__eval_every=7), 1)
    check(changed(trainer__init_from="a", trainer__resume="never"), 1)
    check(changed(trainer__fp8_attention="always", data__eval_fraction=0.0, trainer__sample_tokens=0), 1)
    check(changed(trainer__fp8_attention="inference", data__eval_fraction=0.0), 1)
    check(changed(parallel__ring=3, parallel__ulysses=1, data__seq_len=3), 6)


def test_each_layer_has_its_window_and_its_rotary_embedding():
    """The list of types repeats. Only full layers have the scaling, and local_rope_theta applies to sliding layers."""
    model = ModelConfig(
        layers=5,
        dim=64,
        rotary_fraction=0.5,
        rope_theta=1e6,
        rope_factor=8.0,
        rope_scaling="linear",
        window=7,
        local_rope_theta=1e4,
        layer_types=["sliding", "sliding-nope", "full"],
    )
    local, nope, full = (7, Rope(8, 1e4)), (7, Rope(0, 1e4)), (None, Rope(8, 1e6, 8.0, None, "linear"))
    assert [model.layer(i) for i in range(5)] == [local, nope, full, local, nope]
    assert model.windows == [7, 7, None, 7, 7]
    assert replace(model, local_rope_theta=None).layer(0) == (7, full[1])
    assert replace(model, layer_types=["full-nope"]).layer(4) == (None, Rope(0, *full[1][1:]))


@pytest.mark.parametrize("window", [None, 7])
def test_layers_are_equal_by_default(window):
    model = ModelConfig(window=window)
    assert {model.layer(i) for i in range(2)} == {(window, Rope(32, 10_000.0))}


def test_configs_are_next_to_the_package():
    assert Path(__file__).resolve().parents[3] / "configs" == CONFIGS


def test_unknown_kernels_are_errors():
    config = Config(parallel=ParallelConfig(kernel="nonsense"))
    with pytest.raises(ConfigError, match=r"choose one of auto, hopper, triton, blockwise, reference$"):
        check_values(config)


def test_settings_are_frozen():
    config = Config()
    with pytest.raises(FrozenInstanceError):
        config.trainer.steps = 5
    with pytest.raises(FrozenInstanceError):
        config.name = "other"
    changed = with_settings(config, {"trainer.steps": 5, "name": "other"})
    assert (changed.trainer.steps, changed.name, config.trainer.steps) == (5, "other", Config().trainer.steps)
