"""Which checkpoint a run resumes from, and which settings may differ from those of the checkpoint."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from ringattn.train.checkpoint import storage
from ringattn.train.checkpoint.resume import (
    apply_saved_settings,
    check_corpus,
    compare_model_settings,
    compare_settings,
    find_checkpoint,
    saved_config,
)
from ringattn.train.settings.config import Config, ConfigError, TrainerConfig, check, with_settings
from tests.train.jobs import one_rank

PATH = Path("runs/a/checkpoints/step_00000005")
DIRECTORY = PATH.parent


def write_checkpoint(directory: Path, step: int, init_from: str | None = None, parent: str | None = None) -> Path:
    """Write the meta of a checkpoint, but no tensors."""
    path = directory / f"step_{step:08d}"
    path.mkdir(parents=True)
    config = {"trainer": {"init_from": init_from}}
    (path / "meta.json").write_text(json.dumps({"step": step, "files": {}, "config": config, "origin": parent}))
    return path


@pytest.fixture
def directory(tmp_path) -> Iterator[Path]:
    """The directory of a run's checkpoints, in a process that is the only rank."""
    with one_rank():
        yield tmp_path / "run" / "checkpoints"


@pytest.fixture
def another_run(tmp_path) -> Path:
    """A checkpoint of another run."""
    return write_checkpoint(tmp_path / "another" / "checkpoints", 3)


@pytest.mark.parametrize("value", [[[]], {"a": 1}, json.loads("[" * 400 + "]" * 400)], ids=["list", "dict", "nested"])
def test_a_setting_of_a_wrong_type_is_an_error(value):
    with pytest.raises(ConfigError, match=r"meta\.json of the checkpoint is damaged"):
        saved_config({"config": {"trainer": {"sample_prompt": value}}})


def find(directory: Path, **settings: object) -> tuple[Path | None, str | None]:
    return find_checkpoint(directory, TrainerConfig(**settings))


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_new_run_has_no_checkpoint_to_resume_from(resume, directory):
    assert find(directory, resume=resume) == (None, None)


def test_a_run_resumes_from_its_newest_checkpoint(directory):
    write_checkpoint(directory, 5)
    newest = write_checkpoint(directory, 10, parent="/another/step_00000001")
    assert find(directory) == (newest, "/another/step_00000001")


def test_a_run_goes_back_to_the_checkpoint_that_resume_names(directory):
    earlier = write_checkpoint(directory, 5)
    write_checkpoint(directory, 10)
    assert find(directory, resume=str(earlier)) == (earlier, None)


def test_a_run_must_not_overwrite_checkpoints_if_resume_is_never(directory):
    newest = write_checkpoint(directory, 5)
    with pytest.raises(ConfigError, match=f"trainer.resume=never, but {newest}.*another name"):
        find(directory, resume="never")


def test_a_branch_starts_at_the_checkpoint_and_resumes_from_its_own(directory, another_run):
    assert find(directory, resume=str(another_run)) == (another_run, str(another_run))
    own = write_checkpoint(directory, 4, parent=str(another_run))
    assert find(directory, resume=str(another_run)) == (own, str(another_run))


def test_a_run_that_did_not_branch_is_not_overwritten(directory, another_run):
    own = write_checkpoint(directory, 4)
    with pytest.raises(ConfigError, match=f"{own} belongs to a run that did not branch.*another name"):
        find(directory, resume=str(another_run))


def test_a_missing_checkpoint_is_an_error_when_the_run_has_checkpoints(directory):
    write_checkpoint(directory, 4)
    with pytest.raises(storage.CheckpointError, match="no such directory"):
        find(directory, resume=str(directory / "step_00000009"))


@pytest.mark.parametrize("init_from", [None, "/weights"])
def test_the_weights_that_a_run_started_from_may_be_repeated_or_left_out(init_from, directory):
    newest = write_checkpoint(directory, 4, init_from="/weights")
    assert find(directory, init_from=init_from) == (newest, None)


@pytest.mark.parametrize(("saved", "named"), [("/weights", "/weights"), (None, "random weights")])
def test_other_weights_than_those_a_run_started_from_are_an_error(saved, named, directory):
    write_checkpoint(directory, 4, init_from=saved)
    with pytest.raises(ConfigError, match=f"trainer.init_from=/other, but .* started from {named}"):
        find(directory, init_from="/other")


def meta_of(config: Config, **entries: object) -> dict:
    """The meta of a checkpoint of five steps that was saved with `config`."""
    return json.loads(json.dumps({"step": 5, "config": asdict(config), "tokens_per_step": 100})) | entries


def changed(name: str, value: object) -> Config:
    return with_settings(Config(), {name: value})


def compare(now: Config, before: Config | None = None, tokens_per_step: int = 100) -> str:
    return compare_settings(PATH, meta_of(before or Config()), now, tokens_per_step)


def test_the_same_settings_do_not_differ():
    assert compare(Config()) == ""


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [("optim.lr", 0.1, 0.5), ("optim.betas", [0.5, 0.5], [0.5, 0.9]), ("parallel.layout", "zigzag", "striped")],
)
def test_settings_that_may_change_are_described_with_both_values(name, before, now):
    assert compare(changed(name, now), changed(name, before)) == f"{name}={before} (now {now})"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trainer.checkpoint_every", 3),
        ("trainer.time_limit_s", 3.0),
        ("data.path", "elsewhere"),
    ],
)
def test_settings_that_do_not_affect_the_losses_are_not_described(name, value):
    assert compare(changed(name, value)) == ""


def test_another_number_of_tokens_per_step_is_described():
    assert compare(Config(), tokens_per_step=200) == "tokens_per_step=100 (now 200)"


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.dim", 64), ("model.rope_factor", 2.0), ("data.mask_documents", False), ("memory.moments", "8bit")],
)
def test_settings_that_change_the_meaning_of_weights_are_an_error(name, value):
    with pytest.raises(ConfigError, match=rf"step_00000005 was trained with {name}=.* \(now {value}\).*another name"):
        compare(changed(name, value))


def test_scaling_is_compared_if_a_factor_is_set():
    before, now = Config(), Config()
    before = with_settings(before, {"model.rope_factor": 2.0})
    now = with_settings(now, {"model.rope_factor": 2.0, "model.rope_scaling": "yarn"})
    with pytest.raises(ConfigError, match=r"model\.rope_scaling"):
        compare(now, before)


def test_a_setting_that_the_checkpoint_does_not_contain_had_its_default_value():
    meta, default = meta_of(changed("optim.lr", 9.0)), Config().optim.lr
    del meta["config"]["optim"]["lr"]
    assert compare_settings(PATH, meta, Config(), 100) == ""
    assert compare_settings(PATH, meta, changed("optim.lr", 0.5), 100) == f"optim.lr={default} (now 0.5)"


def test_a_completed_run_does_not_change_its_settings():
    before, now = changed("optim.lr", 0.1), changed("optim.lr", 0.5)
    before = with_settings(before, {"trainer.steps": 5})
    now = with_settings(now, {"trainer.steps": 5})
    with pytest.raises(ConfigError, match=r"completed all 5 steps, with optim.lr=0.1 \(now 0.5\).*raise trainer.steps"):
        compare(now, before)


@pytest.mark.parametrize(("name", "value"), [("parallel.ring", 1), ("memory.optimizer", "offload")])
def test_a_completed_run_may_be_sampled_from_on_other_ranks(name, value):
    before, now = Config(), changed(name, value)
    before = with_settings(before, {"trainer.steps": 5})
    now = with_settings(now, {"trainer.steps": 5})
    assert name in compare(now, before, tokens_per_step=200)


def test_initial_weights_may_have_other_settings_but_not_other_heads():
    assert compare_model_settings(PATH, meta_of(Config()), changed("model.window", 9)) == "model.window=None (now 9)"
    assert compare_model_settings(PATH, meta_of(Config()), changed("optim.lr", 9.0)) == ""
    with pytest.raises(ConfigError, match=r"contains a model with model.kv_heads=\d+ \(now 1\)"):
        compare_model_settings(PATH, meta_of(Config()), changed("model.kv_heads", 1))
    scaled = changed("model.rope_factor", 4.0)
    assert compare_model_settings(PATH, meta_of(Config()), scaled).endswith("None (now 4.0), model.rope_scaling=llama3")


def resumed(directory: Path, warmup: int | None = None, steps: int = 20) -> Config:
    """The settings of a run after those of a checkpoint, which has a warmup of 10 steps, were applied."""
    saved, config = changed("trainer.init_from", "/weights"), Config()
    saved = with_settings(saved, {"optim.warmup_steps": 10})
    config = with_settings(config, {"optim.warmup_steps": warmup, "trainer.steps": steps})
    return apply_saved_settings(PATH, directory, meta_of(saved), config)


@pytest.mark.parametrize(("warmup", "expected"), [(None, 10), (3, 3)])
def test_a_resumed_run_keeps_its_warmup_unless_it_is_set(warmup, expected):
    assert resumed(DIRECTORY, warmup).optim.warmup_steps == expected


def test_a_resumed_run_must_not_end_within_its_warmup():
    assert resumed(DIRECTORY, steps=10).optim.warmup_steps == 10
    with pytest.raises(ConfigError, match=r"trainer\.steps=9 would end during the 10 warmup steps"):
        resumed(DIRECTORY, steps=9)


def test_only_a_run_itself_keeps_its_initial_weights():
    assert resumed(DIRECTORY).trainer.init_from == "/weights"
    assert resumed(Path("runs/b/checkpoints")).trainer.init_from is None


CORPUS = {"tokens_per_epoch": 99, "documents": 1, "text": 2, "seq_len": 8, "seed": 0, "sequences": "shuffled"}


def check_corpus_of(saved: dict | None, current: dict, now: Config | None = None, before: Config | None = None) -> None:
    check_corpus(PATH, meta_of(before or Config(), corpus=saved, consumed=0), current, now or Config())


def test_the_same_corpus_is_accepted():
    check_corpus_of(CORPUS, CORPUS)


@pytest.mark.parametrize("consumed", [None, "x", -7, 1.5, True, [], {}], ids=repr)
def test_an_invalid_position_in_the_corpus_is_an_error(consumed):
    with pytest.raises(ConfigError, match=r"step_00000005 is damaged: meta\.json has consumed=.*at least 0"):
        check_corpus(PATH, {"corpus": CORPUS, "consumed": consumed}, CORPUS, Config())


@pytest.mark.parametrize("name", CORPUS)
def test_another_corpus_is_an_error(name):
    with pytest.raises(ConfigError, match=r"step_00000005 was trained on another corpus: .*trainer\.init_from"):
        check_corpus_of(CORPUS, CORPUS | {name: "another"})


@pytest.mark.parametrize(
    ("setting", "value", "entries"),
    [
        ("data.path", "b/*.txt", ["text"]),
        ("data.source", "jsonl", ["documents", "text"]),
        ("data.split", "train[:5]", ["tokens_per_epoch", "documents"]),
        ("data.column", "body", ["text"]),
        ("data.eval_fraction", 0.5, ["tokens_per_epoch", "documents"]),
        ("data.tokenizer", "x/tokenizer.json", ["tokens_per_epoch"]),
        ("data.eos_token", "</s>", ["text"]),
        ("data.seq_len", 77, ["seq_len", "tokens_per_epoch"]),
        ("data.seed", 5, ["seed"]),
        ("data.group_size", 4, ["sequences"]),
    ],
)
def test_the_error_of_another_corpus_names_the_setting(setting, value, entries):
    before = f"{setting}={getattr(Config().data, setting.split('.')[1])}"
    with pytest.raises(ConfigError) as error:
        check_corpus_of(CORPUS, CORPUS | dict.fromkeys(entries, 3), changed(setting, value))
    assert f"another corpus: {before} (now {value}); its position" in str(error.value)
    assert "{" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens_per_epoch": 98, "text": 3},
            "the text of data.source=stdlib has changed from 99 to 98 tokens, although the settings are equal",
        ),
        ({"text": 3}, "the text of data.source=stdlib has changed from 99 to 99 tokens, although the settings are equal"),
        ({"sequences": "in order"}, "sequences shuffled .now in order.;"),
    ],
)
def test_the_error_of_another_corpus_without_another_setting(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_corpus_of(CORPUS, CORPUS | changes)


def test_a_checkpoint_without_an_entry_read_its_sequences_in_order():
    saved = {name: value for name, value in CORPUS.items() if name not in ("sequences", "text")}
    check_corpus_of(saved, CORPUS | {"sequences": "in order"})
    with pytest.raises(ConfigError, match=r"another corpus: sequences in order .now shuffled."):
        check_corpus_of(saved, CORPUS)


def test_a_checkpoint_without_a_corpus_is_an_error():
    with pytest.raises(ConfigError, match="another corpus: it does not describe its corpus"):
        check_corpus_of(None, CORPUS | {"sequences": "in order"})


def test_saved_settings_are_read_with_their_types():
    saved = changed("optim.betas", (0.5, 0.6))
    saved = with_settings(saved, {"optim.lr": 0.25, "name": "a"})
    config = saved_config(meta_of(saved))
    assert (config.name, config.optim.lr, list(config.optim.betas)) == ("a", 0.25, [0.5, 0.6])


def test_saved_settings_may_be_incomplete_and_contain_unknown_settings(caplog):
    stored = {"model": {"dim": 64, "removed": None}, "trainer": {"eval_sequences": 16}, "data": {"added": [1]}}
    for _ in range(2):
        config = saved_config({"config": stored})
    assert config.model.dim == 64
    assert config.trainer == TrainerConfig()
    assert caplog.text.count("this version does not have them: data.added=[1], trainer.eval_sequences=16") == 1


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        ({"model": {"removed": 3}}, "saved with model.removed=3, which this version does not know"),
        ({"model": {"dim": "wide"}}, "damaged: model.dim"),
        ({"model": 3}, "damaged"),
        ([], "damaged"),
    ],
)
def test_saved_settings_that_cannot_be_used_are_an_error(saved, message):
    with pytest.raises(ConfigError, match=message):
        saved_config({"config": saved})


def test_a_run_of_an_earlier_version_held_out_no_text_by_default():
    meta = meta_of(Config())
    del meta["config"]["data"]["eval_fraction"]
    assert saved_config(meta).data.eval_fraction == 0
    meta["config"]["data"]["eval_split"] = "test"
    assert saved_config(meta).data.eval_fraction == Config().data.eval_fraction


def test_an_earlier_run_switched_off_a_fraction_without_effect():
    meta = meta_of(with_settings(Config(), {"data.eval_split": "train[95%:]", "data.eval_fraction": 0.0}))
    check(saved_config(meta), world_size=1)
    assert saved_config(meta).data.held_out is not None


def test_scaling_without_a_factor_is_not_read():
    """Earlier versions saved this length although it had no effect."""
    assert saved_config(meta_of(changed("model.rope_trained_len", 8192))).model == Config().model


def test_number_of_target_tokens_is_only_read_with_held_out_text():
    """Earlier versions saved another default. Without held-out text, the setting would be rejected."""
    meta = meta_of(changed("trainer.eval_tokens", 65_536))
    assert saved_config(meta).trainer.eval_tokens == 65_536
    meta["config"]["data"]["eval_fraction"] = 0.0
    check(saved_config(meta), world_size=1)
