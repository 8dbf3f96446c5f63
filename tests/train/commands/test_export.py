"""Exported models: transformers loads them, they compute the same, and a failed export leaves nothing behind."""

import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest
import torch
import torch.distributed as dist

from ringattn.train import setup as run_setup
from ringattn.train import trainer as trainer_module
from ringattn.train.checkpoint import families, progress, state_dict, storage
from ringattn.train.commands import export
from ringattn.train.data.tokenizer import load_tokenizer
from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import Config, ConfigError, ModelConfig, with_settings
from tests.distributed import run_ranks
from tests.train.hub_models import (
    LLAMA3,
    LLAMA3_SCALING,
    SIZES,
    change_folder,
    import_folder,
    logits,
    read_files,
    read_tensors,
    settings_of,
    transformers_logits,
    write_chat_folder,
    write_folder,
    write_tokenizer,
)
from tests.train.jobs import job, one_rank
from tests.train.launch import write_corpus

SPECIAL = {"bos_token_id": 256, "eos_token_id": 256}
MODEL = ModelConfig(**SIZES, tie_embeddings=False, qk_norm=True)


def config_for_folder(corpus: str, folder: Path, ranks: int) -> Config:
    """Return the settings of a run that starts from the weights in a folder and leaves them unchanged."""
    config = job(corpus, 1, ring=ranks)
    values = {"model": MODEL, "trainer.init_from": str(folder), "trainer.steps": 1, "optim.lr": 1e-30}
    return with_settings(config, values)


def train_one_step(corpus: str, folder: Path, directory: Path) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    trainer_module.train(config_for_folder(corpus, folder, dist.get_world_size()), directory / "run")


def run_export(*arguments: str) -> None:
    with one_rank():
        export.run_command_line(list(arguments))


def save_checkpoint(directory: Path, **meta) -> Path:
    """Save a checkpoint of an untrained model and return its path."""
    config = {"data": {"tokenizer": "bytes"}, "model": SIZES}
    model = GPT(ModelConfig(**SIZES), 257)
    for module in (*model.blocks, model):
        module.init_weights(torch.Generator())
    return storage.save(directory, 1, state_dict.model_state(model), {"config": config} | meta, keep=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a directory with "hf", a folder of weights, and "run", a run of three ranks that left these weights unchanged.

    The embedding has 259 rows, of which 257 are tokens, and is padded to 320 rows or about 107 per rank. The last rank
    therefore has the last 45 rows and rows of padding.
    """
    directory = tmp_path_factory.mktemp("trained")
    folder, corpus = write_folder(directory / "hf", model_type="qwen3"), write_corpus(directory / "corpus")
    run_ranks(train_one_step, 3, directory / "store", corpus, folder, directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_export_of_a_run_on_three_ranks_equals_the_folder_that_it_started_from(dtype, trained, tmp_path):
    out, path = tmp_path / "out", trained / "run" / "checkpoints" / "step_00000001"
    run_export(f"run={path}", f"output={out}", f"dtype={dtype}")
    before, after = read_tensors(trained / "hf"), read_tensors(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor.to(export.DTYPES[dtype]), rtol=0, atol=0)
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == 259
    assert config["rope_theta"] == 10_000
    assert config["max_position_embeddings"] == 61
    assert settings_of(out) == replace(MODEL, vocab_size=259)
    with pytest.raises(ConfigError, match="out already exists and is not an empty folder"):
        run_export(f"run={path}", f"output={out}", f"dtype={dtype}")


@pytest.mark.slow
def test_model_with_a_window_is_exported_as_mistral(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    config, out = job(write_corpus(tmp_path / "corpus"), 1), tmp_path / "out"
    config = with_settings(config, {"trainer.steps": 3, "optim.lr": 0.03})
    with one_rank():
        trainer_module.train(config, tmp_path / "run")
        run = run_setup.build(config)
        path = storage.latest(tmp_path / "run" / "checkpoints")
        storage.load(path, state_dict.model_state(run.model))
        export.export(path, out, torch.float32)
        tokens = torch.randint(257, (50,), generator=torch.Generator().manual_seed(1))
        ours = logits(run.model, tokens)[:, :257].double()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    torch.testing.assert_close(ours, transformers_logits(out, tokens), rtol=1e-4, atol=1e-4)
    assert settings_of(out).window == config.model.window == 40


@pytest.mark.parametrize(
    "adds_bos", [pytest.param(True, id="with BOS"), pytest.param(False, id="without BOS", marks=pytest.mark.slow)]
)
def test_folder_is_trained_without_model_settings_exported_and_loaded(adds_bos, tmp_path, corpus, run_command_line, capfd):
    """Only the path of the folder is given. transformers then loads the exported model and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path / "hf", max_position_embeddings=4096, rope_parameters=LLAMA3)
    write_tokenizer(folder, adds_bos)
    settings = ["data=text", f"data.path={corpus}", "data.seq_len=48", "logger=off", "trainer.device=cpu"]
    settings += [f"trainer.init_from={folder}", "name=a", "trainer.steps=2", "trainer.sample_tokens=2"]
    assert run_command_line(*settings) == 0
    saved = storage.latest(tmp_path / "outputs" / "a" / "checkpoints")
    assert run_command_line("name=a") == 0
    assert "all 2 steps" in capfd.readouterr().out
    run_export("run=a", "output=out", "dtype=fp32")

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = load_tokenizer(str(folder / "tokenizer.json"))
    text = "the ring of é"
    expected = ([ours.bos] if adds_bos else []) + ours.encode(text).tolist()
    assert theirs(text)["input_ids"] == expected
    assert theirs.eos_token_id == ours.eos
    assert theirs.decode(expected, skip_special_tokens=True) == ours.decode(expected) == text
    names = {"bos_token_id": 0 if adds_bos else 1, "eos_token_id": 1}
    assert not (tmp_path / "out" / "generation_config.json").exists()  # transformers reads config.json, as for the folder
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert names.items() <= config.items()
    assert config["max_position_embeddings"] == 4096

    model = GPT(ModelConfig(**storage.read_meta(saved)["config"]["model"]), ours.vocab_size)
    storage.load(saved, state_dict.model_state(model))
    tokens = torch.tensor(expected * 5)
    ours = logits(model, tokens)[:, : ours.vocab_size].double()
    torch.testing.assert_close(ours, transformers_logits(tmp_path / "out", tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("given", "rows"), [(None, 257), (300, 300), (320, 320)])
def test_export_has_as_many_rows_as_the_settings(given, rows, tmp_path):
    settings = SIZES | {"vocab_size": given}
    path = storage.save(
        tmp_path, 1, state_dict.model_state(GPT(ModelConfig(**settings), 257)), {"config": {"model": settings}}, keep=1
    )
    export.export(path, tmp_path / "out", torch.float32)
    assert len(read_tensors(tmp_path / "out")["model.embed_tokens.weight"]) == settings_of(tmp_path / "out").vocab_size == rows


def test_tokenizer_and_its_settings_are_copied_next_to_the_model(tmp_path):
    path = write_tokenizer(tmp_path, adds_bos=True)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|begin_of_text|>", "chat_template": "own"}')
    saved = save_checkpoint(tmp_path / "checkpoints", config={"data": {"tokenizer": str(path)}, "model": SIZES})
    export.export(saved, tmp_path / "out", torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / name).read_bytes()


def test_export_of_bytes_says_that_it_has_no_tokenizer(tmp_path, capsys):
    export.export(save_checkpoint(tmp_path / "checkpoints"), tmp_path / "out", torch.bfloat16)
    assert "no tokenizer: the token ids are the bytes" in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("tokenizer*"))


# For each change of a setting by a run: the folder, the entries that change in config.json, and their values.
CHANGES = {
    "data__seq_len": ({}, 5000, {"max_position_embeddings": 5000}),
    "data__eos_token": ({}, "!", {"eos_token_id": [2, 1, 7]}),
    "model__vocab_size": ({}, 270, {"vocab_size": 270}),
    "model__norm_eps": ({}, 1e-5, {"rms_norm_eps": 1e-5}),
    "model__rope_theta": (
        {"rope_parameters": LLAMA3},
        70.0,
        {"rope_parameters": None, "rope_theta": 70.0, "rope_scaling": LLAMA3_SCALING},
    ),
    "model__window": (
        {"num_key_value_heads": 2},
        9,
        {
            **{"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
            **{"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0},
        },
    ),
}


@pytest.mark.parametrize("setting", CHANGES)
def test_export_of_a_chat_model_differs_only_in_what_the_run_has_changed(setting, tmp_path, capsys):
    changes, value, expected = CHANGES[setting]
    folder, out = write_chat_folder(tmp_path / "hf", **changes), tmp_path / "out"
    export.export(import_folder(folder, tmp_path / "run", **{setting: value}), out, torch.bfloat16)
    before, after = (read_files(each, ".safetensors") for each in (folder, out))
    old, new = (json.loads(files.pop("config.json")) for files in (before, after))
    assert {name: new.get(name) for name in old | new if old.get(name) != new.get(name)} == expected
    changed = [name for name in after if before[name] != after[name]]
    assert changed == (["generation_config.json"] if setting == "data__eos_token" else [])
    assert f"All other files are those of {folder}, except {' and '.join(['config.json', *changed])}" in capsys.readouterr().out
    if changed:
        generation = json.loads(after["generation_config.json"])
        assert generation == json.loads(before["generation_config.json"]) | {"eos_token_id": [2, 1, 0, 7]}
    else:
        assert setting.startswith("data") or getattr(settings_of(out), setting.removeprefix("model__")) == value


def test_weights_that_contradict_the_declared_head_are_declared_as_they_are(tmp_path):
    folder = write_chat_folder(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    export.export(import_folder(folder, tmp_path / "run"), tmp_path / "out", torch.float32)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"tie_word_embeddings": False, "torch_dtype": "float32"}


@pytest.mark.parametrize(("has_model", "expected"), [(True, True), (False, False)])
def test_files_are_also_found_next_to_the_tokenizer(has_model, expected, tmp_path, capsys):
    """A run that starts from a checkpoint of another run names the published model only by its tokenizer."""
    folder, out = write_chat_folder(tmp_path / "hf"), tmp_path / "out"
    saved = import_folder(folder, tmp_path / "run", trainer__init_from=str(tmp_path / "deleted"))
    if not has_model:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    export.export(saved, out, torch.bfloat16)
    assert (out / "LICENSE").exists() == expected
    assert (f"No other files were copied, because {tmp_path}/deleted is not" in capsys.readouterr().out) != expected
    assert (out / "chat_template.jinja").exists()  # It belongs to the tokenizer.


def test_an_export_into_the_folder_of_the_model_is_an_error(tmp_path):
    folder = write_chat_folder(tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"hf/new/out is inside of .*hf, whose files are copied: choose another folder"):
        export.export(import_folder(folder, tmp_path / "run"), folder / "new" / "out", torch.bfloat16)
    assert not (folder / "new").exists()


def test_a_model_of_bytes_has_no_tokenizer_of_the_folder(tmp_path):
    folder = write_chat_folder(tmp_path / "hf")
    saved = import_folder(folder, tmp_path / "run", data__tokenizer="bytes")
    (folder / "tokenizer.json").unlink()  # The run would otherwise be an error.
    export.export(saved, tmp_path / "out", torch.bfloat16)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "LICENSE" in names
    assert not names & {"tokenizer.json", *export.TOKENIZER_FILES}
    for name in ("config.json", "generation_config.json"):
        before, after = (json.loads((each / name).read_text()) for each in (folder, tmp_path / "out"))
        assert after == before | SPECIAL


def test_another_tokenizer_than_in_training_is_rejected(tmp_path):
    saved = save_checkpoint(tmp_path / "checkpoints", tokenizer=7)
    with pytest.raises(ConfigError, match=r"data\.tokenizer=bytes, .*step_00000001 was trained with another tokenizer"):
        export.export(saved, tmp_path / "out", torch.bfloat16)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_weights_that_fp16_cannot_represent_are_an_error(tmp_path):
    folder = change_folder(write_chat_folder(tmp_path / "hf"), {"model.norm.weight": torch.full((32,), 7e4)})
    checkpoint = import_folder(folder, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"norm of .* contains numbers that torch.float16 cannot represent: use dtype=bf16"):
        export.export(checkpoint, tmp_path / "out", torch.float16)
    export.export(checkpoint, tmp_path / "out", torch.bfloat16)


def test_export_that_cannot_be_written_is_removed(tmp_path, monkeypatch):
    saved = save_checkpoint(tmp_path / "checkpoints")
    monkeypatch.setattr(export, "_as_json", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match=r"cannot write .*out: .*No space left on device; check the disk"):
        export.export(saved, tmp_path / "out", torch.bfloat16)
    assert not (tmp_path / "out").exists()


def test_an_interrupted_export_is_removed(tmp_path, monkeypatch):
    saved = save_checkpoint(tmp_path / "checkpoints")
    monkeypatch.setattr(export, "_as_json", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export.export(saved, tmp_path / "out", torch.bfloat16)
    assert not (tmp_path / "out").exists()


def test_two_exports_into_the_same_folder_are_an_error(tmp_path, monkeypatch):
    """The second export begins while the first export loads its weights. All users may read the exported files."""
    saved, exported_tensors = save_checkpoint(tmp_path / "checkpoints"), export.exported_tensors

    def start_another(*arguments: Any) -> dict[str, torch.Tensor]:
        with pytest.raises(ConfigError, match="out already exists and is not an empty folder"):
            export.export(saved, tmp_path / "out", torch.float32)
        return exported_tensors(*arguments)

    monkeypatch.setattr(export, "exported_tensors", start_another)
    export.export(saved, tmp_path / "out", torch.bfloat16)
    files = {path.name: path.stat().st_mode & 0o444 for path in (tmp_path / "out").iterdir()}
    assert files == dict.fromkeys(("config.json", "generation_config.json", "model.safetensors"), 0o444)


def test_a_killed_export_has_no_config(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "rmtree", Mock())
    folder = write_chat_folder(tmp_path / "hf")
    monkeypatch.setattr(export, "write_tokenizer", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        export.export(import_folder(folder, tmp_path / "run"), tmp_path / "out", torch.bfloat16)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "LICENSE"} <= names
    assert "config.json" not in names


@pytest.mark.parametrize("is_published", [False, True])
def test_an_export_that_is_killed_while_it_writes_the_config_has_none(is_published, tmp_path, monkeypatch):
    folder = import_folder(write_chat_folder(tmp_path / "hf"), tmp_path / "run") if is_published else None
    saved = folder or save_checkpoint(tmp_path / "checkpoints")
    monkeypatch.setattr(shutil, "rmtree", Mock())
    monkeypatch.setattr(os, "fsync", Mock(side_effect=[*[None] * (not is_published), KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        export.export(saved, tmp_path / "out", torch.bfloat16)
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert not (tmp_path / "out" / "config.json").exists()


def test_export_creates_its_folder_and_is_bf16_by_default(tmp_path, monkeypatch, caplog):
    """A long export is shown on the console."""
    saved = save_checkpoint(tmp_path / "checkpoints")
    monkeypatch.setattr(progress, "INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO)
    run_export(f"run={saved}", f"output={tmp_path}/a/b")
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "a" / "b").values()} == {torch.bfloat16}
    loaded, written = (text for text in caplog.messages if text.startswith(("loaded", "saved")))
    assert loaded.startswith(f"loaded      {saved}: ")
    assert written.startswith(f"saved       {tmp_path}/a/b: ")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file already exists and is not an empty folder"):
        run_export(f"run={saved}", f"output={tmp_path}/file")


def test_the_name_of_a_run_is_enough(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(Path("outputs/long/checkpoints"))
    run_export("run=long")
    assert settings_of(Path("outputs/long-huggingface")).layers == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "run=... is required"),
        ("run=none", "run=none must be the name of a run in outputs/ that has a checkpoint .the runs in outputs/ are long"),
        ("run=hf", "run=hf is already in Hugging Face's format: give the name of a run or a checkpoint"),
        ("run=long dtype=fp8", "unknown dtype=fp8: choose one of bf16, fp16, fp32"),
        ("run=long trainer.device=cpu", "trainer.device=cpu has no effect on an export"),
        ("run=long folder=x", "unknown option folder: choose one of run, output, dtype"),
    ],
)
def test_a_wrong_option_is_an_error(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint(Path("outputs/long/checkpoints"))
    write_chat_folder(Path("hf"))
    with pytest.raises(ConfigError, match=message):
        run_export(*arguments.split())


def test_several_ranks_are_an_error(monkeypatch):
    monkeypatch.setattr(export.dist, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="an export uses a single process: start it without torchrun"):
        export.run_command_line(["run=long"])


def test_config_json_contains_what_transformers_requires():
    written = export.config_json(ModelConfig(**SIZES, norm_eps=1e-6), 257, 61, SPECIAL, torch.bfloat16)
    expected = {"bos_token_id": 256, "eos_token_id": 256, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, **families.FIXED}
    assert expected.items() <= written.items()


def test_config_json_contains_the_scaling():
    model = ModelConfig(**SIZES, rope_factor=8.0, rope_trained_len=8192)
    written = export.config_json(model, 257, 61, SPECIAL, torch.bfloat16)["rope_scaling"]
    assert written == LLAMA3_SCALING | {"factor": 8.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"window": 9},
        {"qkv_bias": True},
        {"qk_norm": True},
        {"qkv_bias": True, "window": 9},
        {"qk_norm": True, "window": 9},
        {"rope_factor": 8.0, "rope_trained_len": 4096},
        {"rope_factor": 8.0, "rope_trained_len": 64, "rope_scaling": "yarn"},
        {"rope_factor": 8.0, "rope_trained_len": 64, "rope_scaling": "yarn-exact"},
        {"rope_factor": 8.0, "rope_scaling": "linear"},
        {"residual_scale": 0.5, "logit_scale": 0.3},
        {"qkv_bias": True, "output_bias": True},
    ],
    ids=str,
)
def test_settings_can_be_written_and_read_again(settings, tmp_path):
    model = ModelConfig(**SIZES, vocab_size=300, **settings)
    (tmp_path / "config.json").write_text(json.dumps(export.config_json(model, 300, 61, SPECIAL, torch.bfloat16)))
    assert settings_of(tmp_path) == model


def test_an_architecture_that_transformers_does_not_have_is_an_error():
    with pytest.raises(ConfigError, match=r"no model with all of model\.qkv_bias=True, model\.qk_norm=True: such a model"):
        export.config_json(ModelConfig(**SIZES, qkv_bias=True, qk_norm=True), 257, 61, SPECIAL, torch.bfloat16)
