"""The settings of a launch: those of the checkpoint or of a model's folder, and the overrides of the command line."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ringattn.train.commands.launch_settings import resolve_settings
from ringattn.train.settings.config import Config, ConfigError, ModelConfig, check, with_settings
from tests.train.hub_models import LLAMA3, SIZES, settings_of, write_config


def config_with(**settings: object) -> Config:
    """The default settings with changes. A name such as `trainer__steps` stands for trainer.steps."""
    return with_settings(Config(), {name.replace("__", "."): value for name, value in settings.items()})


def write_checkpoint(directory: Path, config: Config, step: int = 5) -> Path:
    """Write the meta of a checkpoint, but no tensors."""
    path = directory / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "meta.json").write_text(json.dumps({"step": step, "files": {}, "config": asdict(config), "origin": None}))
    return path


@pytest.fixture
def directory(tmp_path) -> Path:
    """The directory of a run with a checkpoint."""
    saved = config_with(optim__lr=0.1, optim__warmup_steps=3, trainer__steps=30, trainer__seed=7, data__seq_len=99)
    write_checkpoint(tmp_path / "run", saved)
    return tmp_path / "run"


def test_a_new_run_has_the_composed_settings(tmp_path):
    composed = config_with(optim__lr=0.5, trainer__steps=9)
    assert resolve_settings(composed, ["optim.lr=0.5", "trainer.steps=9"], tmp_path) == composed


def test_a_recipe_may_set_what_the_command_line_makes_useless(tmp_path):
    """The user has not set this number, so an error about it could not be resolved by leaving it out."""
    composed = config_with(trainer__eval_tokens=524_288, data__eval_fraction=0.0, data__source="text", data__path="x")
    overrides = ["data=text", "data.path=x", "data.eval_fraction=0"]
    check(resolve_settings(composed, overrides, tmp_path), world_size=1)
    with pytest.raises(ConfigError, match=r"eval_tokens=524288 has no effect without held-out text"):
        check(resolve_settings(composed, [*overrides, "trainer.eval_tokens=524288"], tmp_path), world_size=1)


def test_a_run_keeps_the_settings_of_its_checkpoint(directory):
    config = resolve_settings(Config(), [], directory)
    assert (config.optim.lr, config.optim.warmup_steps, config.trainer.steps, config.trainer.seed) == (0.1, 3, 30, 7)


@pytest.mark.parametrize(
    "override", ["trainer.seed=4", "+trainer.seed=4", "trainer={seed: 4}"], ids=["one setting", "with +", "as a dict"]
)
def test_an_override_sets_one_setting(override, directory):
    config = resolve_settings(config_with(trainer__seed=4), [override], directory)
    assert (config.trainer.seed, config.trainer.steps, config.data.seq_len) == (4, 30, 99)


@pytest.mark.parametrize("overrides", [[], ["data=text"], ["recipe=cpu"]], ids=str)
def test_a_run_keeps_its_held_out_fraction_unless_the_command_line_sets_it(overrides, tmp_path):
    """Version 0.2.0 held out no text."""
    write_checkpoint(tmp_path, config_with(data__eval_fraction=0.0))
    assert resolve_settings(Config(), overrides, tmp_path).data.eval_fraction == 0.0
    assert resolve_settings(Config(), [*overrides, "data.eval_fraction=0.01"], tmp_path).data.eval_fraction == 0.01


@pytest.mark.parametrize("saved", [None, 4])
@pytest.mark.parametrize("overrides", [[], ["data=text"], ["experiment=longer"]], ids=str)
def test_a_run_keeps_its_group_size_unless_the_command_line_sets_it(saved, overrides, tmp_path):
    write_checkpoint(tmp_path, config_with(data__group_size=saved))
    assert resolve_settings(Config(), overrides, tmp_path).data.group_size == saved
    composed = config_with(data__group_size=2)
    assert resolve_settings(composed, [*overrides, "data.group_size=2"], tmp_path).data.group_size == 2


def test_an_element_of_a_list_can_be_set(directory):
    config = resolve_settings(config_with(optim__betas=[0.5, 0.95]), ["optim.betas.0=0.5"], directory)
    assert config.optim.betas == [0.5, 0.95]


def test_the_choice_of_a_file_sets_the_whole_group(directory):
    config = resolve_settings(config_with(optim__schedule="wsd"), ["optim=wsd", "optim.eps=1e-7"], directory)
    assert (config.optim.schedule, config.optim.lr, config.trainer.seed) == ("wsd", None, 7)


@pytest.mark.parametrize("override", ["experiment=124m-64k", "+experiment=x", "recipe=gpu"])
def test_an_experiment_or_recipe_defines_all_settings_but_the_steps(override, directory):
    composed = config_with(data__seed=64, trainer__steps=900)
    config = resolve_settings(composed, [override], directory)
    assert (config.data.seed, config.trainer.seed, config.trainer.steps) == (64, 0, 30)
    assert resolve_settings(composed, [override, "trainer.steps=900"], directory).trainer.steps == 900


@pytest.mark.parametrize(
    ("overrides", "seq_len"),
    [
        (["recipe=gpu"], 99),
        (["data=text"], 99),
        (["data=text", "data.seq_len=64"], 64),
        (["experiment=x"], 64),
        (["recipe=gpu", "data.seq_len=64"], 64),
    ],
    ids=str,
)
def test_a_run_keeps_its_length_if_a_recipe_would_set_it(overrides, seq_len, directory):
    """The same command on another number of ranks composes another length."""
    assert resolve_settings(config_with(data__seq_len=64), overrides, directory).data.seq_len == seq_len


def test_no_experiment_keeps_the_settings(directory):
    assert resolve_settings(Config(), ["experiment=null"], directory).trainer.seed == 7


def test_the_checkpoint_to_resume_is_not_kept(tmp_path):
    path = write_checkpoint(tmp_path, config_with(trainer__resume=str(tmp_path / "checkpoints" / "step_00000005")))
    write_checkpoint(tmp_path, config_with(trainer__resume=str(path)), step=7)
    assert resolve_settings(Config(), [], tmp_path).trainer.resume == "auto"


def test_a_branch_has_the_settings_of_the_other_run(directory, tmp_path):
    path = write_checkpoint(tmp_path / "other", config_with(trainer__seed=8, trainer__init_from="/weights"))
    composed = config_with(trainer__resume=str(path))
    config = resolve_settings(composed, [f"trainer.resume={path}"], tmp_path / "branch")
    assert (config.trainer.seed, config.trainer.init_from, config.trainer.resume) == (8, None, str(path))


@pytest.mark.parametrize("saved", ["auto", "online", "offline", "off"])
@pytest.mark.parametrize("mode", ["auto", "online", "offline", "off"])
def test_a_checkpoint_never_sends_data_to_wandb(saved, mode, tmp_path):
    """A resumed run stays off or offline. The checkpoint of another run has no effect."""
    path = write_checkpoint(tmp_path / "a", config_with(logger__wandb=saved, logger__project="theirs"))
    composed = config_with(logger__wandb=mode)
    own = resolve_settings(composed, [], tmp_path / "a").logger
    assert own.wandb == (saved if saved in ("offline", "off") else mode if saved == "online" else "auto")
    composed = with_settings(composed, {"trainer.resume": str(path)})
    branch = resolve_settings(composed, [f"trainer.resume={path}"], tmp_path / "b").logger
    assert (branch.wandb, branch.project) == (mode, None)


@pytest.mark.parametrize("overrides", [["logger.wandb=online"], ["logger=online"]], ids=str)
def test_the_command_line_chooses_the_mode_of_wandb(overrides, tmp_path):
    write_checkpoint(tmp_path, config_with(logger__wandb="off"))
    assert resolve_settings(config_with(logger__wandb="online"), overrides, tmp_path).logger.wandb == "online"


def test_a_run_keeps_its_initial_weights(tmp_path):
    write_checkpoint(tmp_path, config_with(trainer__init_from="/weights"))
    assert resolve_settings(Config(), [], tmp_path).trainer.init_from == "/weights"


def test_a_model_that_is_chosen_again_keeps_its_other_settings(tmp_path):
    """The file sets the sizes. The run had set the base of the rotary embedding on its command line."""
    write_checkpoint(
        tmp_path,
        config_with(
            model__dim=64,
            model__rope_theta=5.0,
            data__tokenizer="own.json",
            data__eos_token="</s>",
            data__special_tokens="parse",
        ),
    )
    config = resolve_settings(config_with(model__dim=96), ["model=large", "data=text"], tmp_path)
    assert (config.model.dim, config.model.rope_theta) == (96, 5.0)
    assert (config.data.tokenizer, config.data.eos_token, config.data.special_tokens) == ("own.json", "</s>", "parse")


def write_model(folder: Path, **changes: object) -> Path:
    write_config(folder, **changes)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_folder_defines_the_model_and_the_tokenizer(tmp_path):
    folder = write_model(tmp_path / "hf", rope_parameters=LLAMA3)
    config = resolve_settings(config_with(trainer__init_from=str(folder)), [f"trainer.init_from={folder}"], tmp_path / "run")
    assert config.model == settings_of(folder)
    assert config.model.rope_factor == 4.0
    assert config.data.tokenizer == str(folder / "tokenizer.json")


def test_the_command_line_overrides_the_folder(tmp_path):
    """A setting counts even if its value is the default."""
    folder = write_model(tmp_path / "hf")
    overrides = ["model.rope_theta=10000", "model.layers=2", "data.tokenizer=bytes"]
    config = resolve_settings(config_with(trainer__init_from=str(folder)), overrides, tmp_path / "run")
    assert (config.model.rope_theta, config.model.norm_eps, config.data.tokenizer) == (10_000, 1e-6, "bytes")


def test_a_chosen_model_sets_its_sizes_but_no_defaults_of_other_settings(tmp_path):
    folder = write_model(tmp_path / "hf")
    composed = config_with(trainer__init_from=str(folder))
    composed = with_settings(composed, {"model": ModelConfig(dim=64, rope_theta=3.0)})
    config = resolve_settings(composed, ["model=large"], tmp_path / "run")
    assert (config.model.dim, config.model.heads, config.model.rope_theta, config.model.norm_eps) == (64, 4, 3.0, 1e-6)
    assert config.model.ffn_dim == SIZES["ffn_dim"]


def test_an_experiment_may_set_the_scaling_only(tmp_path):
    folder = write_model(tmp_path / "hf")
    composed = config_with(trainer__init_from=str(folder), model__rope_factor=2.0, model__rope_trained_len=64)
    config = resolve_settings(composed, ["experiment=longer"], tmp_path / "run")
    assert (config.model.dim, config.model.rope_factor, config.model.rope_trained_len) == (32, 2.0, 64)


def test_the_scaling_of_a_folder_can_be_removed(tmp_path):
    folder = write_model(tmp_path / "hf", rope_parameters=LLAMA3)
    config = resolve_settings(config_with(trainer__init_from=str(folder)), ["model.rope_factor=null"], tmp_path / "run")
    assert (config.model.rope_factor, config.model.rope_trained_len) == (None, None)


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path):
    folder = write_model(tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    composed = config_with(trainer__init_from=str(folder))
    with pytest.raises(ConfigError, match=r"hf has no tokenizer\.json: .* data\.tokenizer=bytes"):
        resolve_settings(composed, [], tmp_path / "run")
    assert resolve_settings(composed, ["data.tokenizer=bytes"], tmp_path / "run").data.tokenizer == "bytes"


def test_a_resumed_run_does_not_need_the_folder(tmp_path):
    saved = config_with(trainer__init_from="/deleted", model__dim=64, data__tokenizer="/copy/tokenizer.json")
    write_checkpoint(tmp_path, saved)
    config = resolve_settings(config_with(trainer__init_from="/deleted"), ["data=text", "trainer.init_from=/deleted"], tmp_path)
    assert (config.model.dim, config.data.tokenizer) == (64, "/copy/tokenizer.json")


@pytest.mark.parametrize(
    ("overrides", "composed", "expected"),
    [
        ([], {}, (30, 3000, 2, 200)),
        (["trainer.steps=9", "trainer.accumulate=4"], {"steps": 9, "accumulate": 4}, (9, None, 4, None)),
        (["trainer.total_tokens=70"], {"total_tokens": 70}, (30, 70, 2, 200)),
        (["trainer.tokens_per_step=null"], {}, (30, 3000, 2, None)),
        (["experiment=x"], {"total_tokens": 70, "tokens_per_step": 7}, (30, 3000, 1, 7)),
    ],
    ids=["no override", "derived settings", "total tokens", "no tokens per step", "experiment"],
)
def test_a_derived_setting_replaces_the_numbers_of_tokens_of_the_checkpoint(overrides, composed, expected, tmp_path):
    """A launch without an experiment may set `steps` or `accumulate` of a run that derived them from numbers of tokens."""
    tokens = {"trainer__total_tokens": 3000, "trainer__tokens_per_step": 200}
    write_checkpoint(tmp_path, config_with(trainer__steps=30, trainer__accumulate=2, **tokens))
    settings = config_with(**{f"trainer__{name}": value for name, value in composed.items()})
    trainer = resolve_settings(settings, overrides, tmp_path).trainer
    assert (trainer.steps, trainer.total_tokens, trainer.accumulate, trainer.tokens_per_step) == expected


def test_a_ring_replaces_the_fastest_mesh_of_the_checkpoint(tmp_path):
    """The checkpoint contains the mesh that was chosen. A launch on other ranks chooses again, unless the user sets a ring."""
    write_checkpoint(tmp_path, config_with(parallel__mesh="fastest", parallel__ring=4, parallel__ulysses=2))
    again = resolve_settings(Config(), [], tmp_path).parallel
    assert (again.mesh, again.ring, again.ulysses) == ("fastest", 4, 2)
    ring = resolve_settings(config_with(parallel__ring=2), ["parallel.ring=2"], tmp_path).parallel
    assert (ring.mesh, ring.ring, ring.ulysses) == ("sizes", 2, 1)


def test_an_experiment_and_the_command_line_must_not_set_the_same_length_twice(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.steps=9 .*trainer\.total_tokens=70"):
        resolve_settings(config_with(trainer__steps=9, trainer__total_tokens=70), ["trainer.steps=9"], tmp_path)


def test_jobs_of_a_sweep_over_lengths_have_the_same_tokens_per_step(tmp_path):
    """`trainer.accumulate` applies to the longest sequences, and `trainer.tokens_per_step` has precedence."""
    overrides, lengths = ["trainer.accumulate=3"], [64, 256]
    composed = config_with(trainer__accumulate=3)
    assert resolve_settings(composed, overrides, tmp_path, lengths, 1).trainer.tokens_per_step == 768
    assert composed.trainer.tokens_per_step is None
    assert resolve_settings(config_with(trainer__tokens_per_step=512), [], tmp_path, lengths, 1).trainer.tokens_per_step == 512
    write_checkpoint(tmp_path, config_with(trainer__accumulate=12, trainer__tokens_per_step=768))
    resumed = resolve_settings(composed, overrides, tmp_path, lengths, 1).trainer
    assert (resumed.accumulate, resumed.tokens_per_step) == (12, 768)
