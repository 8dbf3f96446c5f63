import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import datasets
import pytest
import torch
import torch.distributed as dist

from ringattn.train import setup as run_setup
from ringattn.train import trainer as trainer_module
from ringattn.train.checkpoint import storage
from ringattn.train.config import Config, ConfigError, ModelConfig
from ringattn.train.model.gpt import GPT
from scripts.tools import export_huggingface
from tests.distributed import run_ranks
from tests.train.hub_models import SIZES, logits, read_tensors, settings_of, theirs, write_folder
from tests.train.jobs import job, one_rank
from tests.train.launch import write_corpus

MODEL = ModelConfig(**SIZES, tie_embeddings=False, qk_norm=True)


def of_folder(corpus: str, folder: Path, ranks: int) -> Config:
    config = job(corpus, 1, ring=ranks)
    config.model = MODEL
    config.trainer.init_from, config.trainer.steps, config.optim.lr = str(folder), 1, 1e-30
    return config


def begin_and_save(corpus: str, folder: Path, directory: Path) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    trainer_module.train(of_folder(corpus, folder, dist.get_world_size()), directory / "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """hf, a folder, and run, of three ranks that began with it and changed nothing.

    259 tokens in rows for 320, 107 a rank: the last rank holds the last 45 of them, and rows that only fill up.
    """
    directory = tmp_path_factory.mktemp("trained")
    folder, corpus = write_folder(directory / "hf", model_type="qwen3"), write_corpus(directory / "corpus")
    run_ranks(begin_and_save, 3, directory / "store", corpus, folder, directory)
    return directory


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_on_three_ranks_begins_with_a_folder_and_leaves_one(dtype, trained, tmp_path, monkeypatch, capsys):
    out, path = tmp_path / "out", trained / "run" / "checkpoints" / "step_00000001"
    monkeypatch.setattr(sys, "argv", ["export", str(path), str(out), "--dtype", dtype])
    assert export_huggingface.main() == 0
    before, after = read_tensors(trained / "hf"), read_tensors(out)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        expected = tensor.to(export_huggingface.DTYPES[dtype])
        torch.testing.assert_close(after[name], expected[:257] if len(tensor) == 259 else expected, rtol=0, atol=0)
    described = json.loads((out / "config.json").read_text())
    assert described["vocab_size"] == 257 and described["rope_theta"] == 10_000 and described["max_position_embeddings"] == 61
    assert settings_of(out) == replace(MODEL, vocab_size=257)
    assert export_huggingface.main() == 1
    assert "out is there already, with something in it: give a new folder" in capsys.readouterr().err


def test_a_window_is_mistrals(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    config, out = job(write_corpus(tmp_path / "corpus"), 1), tmp_path / "out"
    config.trainer.steps, config.optim.lr = 3, 0.03
    with one_rank():
        trainer_module.train(config, tmp_path / "run")
        run = run_setup.build(config)
        path = storage.latest(tmp_path / "run" / "checkpoints")
        storage.load(path, storage.model_state(run.model))
        export_huggingface.export(path, out, torch.float32)
        tokens = torch.randint(257, (50,), generator=torch.Generator().manual_seed(1))
        ours = logits(run.model, tokens)[:, :257].double()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    torch.testing.assert_close(ours, theirs(out, tokens), rtol=1e-4, atol=1e-4)
    assert settings_of(out).window == config.model.window == 40


def test_a_tokenizer_goes_with_the_model(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    monkeypatch.setattr(export_huggingface, "load_tokenizer", lambda name: run_setup.load_tokenizer("bytes"))
    meta = {"config": {"data": {"tokenizer": str(path)}, "model": SIZES}}
    tensors = storage.model_state(GPT(ModelConfig(**SIZES), 257))
    saved = storage.save(tmp_path / "checkpoints", 1, tensors, meta, keep=1)
    export_huggingface.export(saved, tmp_path / "out", torch.bfloat16)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_an_export_takes_the_tokenizer_of_the_training(tmp_path, monkeypatch):
    meta = {"config": {"data": {"tokenizer": "bytes"}, "model": SIZES}, "tokenizer": 7}
    saved = storage.save(tmp_path / "checkpoints", 1, storage.model_state(GPT(ModelConfig(**SIZES), 257)), meta, keep=1)
    with pytest.raises(ConfigError, match="data.tokenizer=bytes, but .*step_00000001 was trained with what was in its place"):
        export_huggingface.export(saved, tmp_path / "out", torch.bfloat16)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    meta = {"config": {"data": {"tokenizer": "bytes"}, "model": SIZES}}
    saved = storage.save(tmp_path / "checkpoints", 1, storage.model_state(GPT(ModelConfig(**SIZES), 257)), meta, keep=1)
    monkeypatch.setattr(export_huggingface.json, "dumps", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="out cannot be written: .*No space left on device; check the disk, or give another"):
        export_huggingface.export(saved, tmp_path / "out", torch.bfloat16)
    assert not (tmp_path / "out").exists()


def test_an_export_is_bf16_in_a_folder_that_is_made(tmp_path, monkeypatch, capsys):
    meta = {"config": {"data": {"tokenizer": "bytes"}, "model": SIZES}}
    saved = storage.save(tmp_path / "checkpoints", 1, storage.model_state(GPT(ModelConfig(**SIZES), 257)), meta, keep=1)
    monkeypatch.setattr(sys, "argv", ["export", str(saved), str(tmp_path / "a" / "b")])
    assert export_huggingface.main() == 0
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "a" / "b").values()} == {torch.bfloat16}
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["export", str(saved), str(tmp_path / "file")])
    assert export_huggingface.main() == 1
    assert "file is there already" in capsys.readouterr().err
