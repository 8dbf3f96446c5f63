"""Against the Llama forward written out under transformers' names; transformers itself gives the same logits."""

import json
import math
import sys
from pathlib import Path

import datasets
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts import export_huggingface
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank
from tests.train.launch import write_corpus
from train import build, checkpoint, huggingface, loop
from train.config import Config, ConfigError, ModelConfig
from train.model import GPT

SIZES = dict(layers=2, dim=32, heads=4, kv_heads=2, head_dim=16, ffn_dim=48)
FOLDER = {
    "model_type": "llama",
    "vocab_size": 259,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
# of 16 features, in 40 tokens: some turn more than four times, some less than once, some between
STRETCH = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 40}
STRETCH |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = STRETCH | {"rope_theta": 50.0}


def write_folder(folder: Path, **changes) -> Path:
    """A model of random parameters, in two files; of `changes`, None leaves something out."""
    config = {name: value for name, value in (FOLDER | changes).items() if value is not None}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    theirs = {"model.embed_tokens.weight": (259, 32), "model.norm.weight": (32,), "lm_head.weight": (259, 32)}
    if config.get("tie_word_embeddings"):
        del theirs["lm_head.weight"]
    for layer in range(2):
        shapes = {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
        shapes |= {f"self_attn.{x}_proj": (rows, 32) for x, rows in (("q", 64), ("k", 32), ("v", 32))}
        shapes |= {"self_attn.o_proj": (32, 64), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
        theirs |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in theirs.items()}
    names = list(tensors)
    for part, chosen in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in chosen}, folder / f"model-{part}.safetensors")
    return folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def llama3(wavelength: float, rope: dict[str, float]) -> float:
    """As in Llama 3.1's own code."""
    length, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    if wavelength < length / high:
        return wavelength
    if wavelength > length / low:
        return wavelength * rope["factor"]
    smooth = (length / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / (wavelength * rope["factor"]) + smooth / wavelength)


def llama(folder: Path, tokens: Tensor) -> Tensor:
    """Logits (S, V) of tokens (S,), in float64."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: tensor.double() for name, tensor in read_tensors(folder).items()}
    eps, dim, window = config["rms_norm_eps"], config["head_dim"], config.get("sliding_window") or len(tokens)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    place = torch.arange(len(tokens), dtype=torch.float64)
    wavelengths = 2 * math.pi * config.get("rope_theta", rope.get("rope_theta")) ** (torch.arange(0, dim, 2).double() / dim)
    if rope.get("rope_type") == "llama3":
        wavelengths = torch.tensor([llama3(wavelength, rope) for wavelength in wavelengths.tolist()])
    angles = 2 * math.pi * place[:, None] / wavelengths
    cos, sin = (torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))
    seen = (place[None] <= place[:, None]) & (place[None] > place[:, None] - window)

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[name]

    def heads(x, name, turned):
        x = (x @ weights[name].T).view(len(tokens), -1, dim).transpose(0, 1)
        return x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin if turned else x

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = (heads(h, f"{at}self_attn.{name}_proj.weight", name != "v") for name in "qkv")
        k, v = (y.repeat_interleave(len(q) // len(k), 0) for y in (k, v))
        probabilities = (q @ k.mT / dim**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + (probabilities @ v).transpose(0, 1).flatten(1) @ weights[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate, up = (h @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights[at + "mlp.down_proj.weight"].T
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    return norm(x, "model.norm.weight") @ head.T


def logits(model: GPT, tokens: Tensor) -> Tensor:
    """The same of our model, (S, rows of its embedding)."""
    place = torch.arange(len(tokens))
    seen = (place[None] <= place[:, None]) & (place[None] > place[:, None] - (model.config.window or len(tokens)))

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(1, 2)

    with torch.no_grad():
        return model(tokens[None], place, attend, lambda hidden, head: hidden @ head.T)[0]


def settings_of(folder: Path) -> ModelConfig:
    """The folder's model as a user sets it."""
    read = huggingface.read_settings(folder)
    named = {"head_features": "head_dim", "ffn_features": "ffn_dim"}
    return ModelConfig(**{named.get(name, name): value for name, value in read.items()})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"model_type": "mistral", "sliding_window": 7},
        {"rope_parameters": None, "rope_scaling": None, "rope_theta": 3e4},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": None, "rope_scaling": STRETCH, "rope_theta": 50.0},
    ],
    ids=["Llama", "tied", "Mistral", "older names", "Llama 3.1", "Llama 3.1, older names"],
)
def test_a_folder_is_the_same_model_here(changes, tmp_path):
    folder = write_folder(tmp_path / "hf", **changes)
    settings = settings_of(folder)
    assert huggingface.differences(folder, settings, 257) == ""
    model = GPT(settings, 257)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    huggingface.load(folder, model)
    assert model.embedding[259:].eq(1).all()  # rows that only fill up
    tokens = torch.randint(257, (40,), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(logits(model, tokens)[:, :259].double(), llama(folder, tokens), rtol=1e-4, atol=1e-4)


REFUSED = {
    "of another kind": ({"model_type": "gpt2"}, "model_type is gpt2, and the model here has only llama or mistral"),
    "biases": ({"attention_bias": True}, "attention_bias is True, and the model here has only False"),
    "scaled angles": ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type is yarn, .*default or llama3"),
    "angles scaled otherwise": ({"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor is 8.0, .*only 4.0"),
    "scaled angles without a length": ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "KeyError: 'original_max"),
    "scaled angles, older names": ({"rope_scaling": {"type": "linear"}, "rope_parameters": None}, "rope_type is linear"),
    "no sizes": ({"hidden_size": None}, "config.json is none of a Llama model: KeyError: 'hidden_size'"),
    "too few tokens": ({"vocab_size": 250}, "has 250 tokens, fewer than the tokenizer's 257: set data.tokenizer"),
    "too many tokens": ({"vocab_size": 1000}, "has 1000 tokens, more than the model here: set model.vocab_size=1000"),
    "other sizes": ({"intermediate_size": 40}, r"is a model of model.ffn_dim=40 \(now 48\), .*: set the same"),
    "other heads": ({"num_key_value_heads": None}, r"is a model of model.kv_heads=4 \(now 2\)"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_refused(changes, message, tmp_path):
    folder = write_folder(tmp_path / "hf", **changes)
    with pytest.raises(ConfigError, match=message):
        huggingface.differences(folder, ModelConfig(**SIZES, tie_embeddings=False), 257)


def test_what_may_change_is_told(tmp_path):
    changed = huggingface.differences(write_folder(tmp_path / "hf"), ModelConfig(**SIZES, tie_embeddings=False, window=9), 257)
    assert changed == "model.rope_theta=500.0 (now 10000.0), model.norm_eps=1e-06 (now 1e-05), model.window=None (now 9)"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"model.norm.weight": torch.ones(31)}, r"model.norm.weight has shape \(31,\), in this run \(32,\)"),
        ({}, "has no model.norm.weight in its"),
        (b"junk", "cannot be read: "),
    ],
    ids=["shape", "missing", "broken"],
)
def test_files_that_are_not_as_config_says(file, message, tmp_path):
    folder = write_folder(tmp_path / "hf")
    (path,) = (path for path in folder.glob("*.safetensors") if "model.norm.weight" in load_file(path))
    if isinstance(file, bytes):
        path.write_bytes(file)
    else:
        save_file({name: x for name, x in load_file(path).items() if name != "model.norm.weight"} | file, path)
    with pytest.raises(ConfigError, match=message):
        huggingface.load(folder, GPT(settings_of(folder), 257))


def of_folder(corpus: str, folder: Path, ranks: int) -> Config:
    config = job(corpus, 1, ring=ranks)
    config.model = ModelConfig(**SIZES, tie_embeddings=False)
    config.trainer.init_from, config.trainer.steps, config.optim.lr = str(folder), 1, 1e-30
    return config


def begin_and_save(corpus: str, folder: Path, directory: Path) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    loop.train(of_folder(corpus, folder, dist.get_world_size()), directory / "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """hf, a folder, and run, of three ranks that began with it and changed nothing.

    259 tokens in rows for 320, 107 a rank: the last rank holds the last 45 of them, and rows that only fill up.
    """
    directory = tmp_path_factory.mktemp("trained")
    folder, corpus = write_folder(directory / "hf"), write_corpus(directory / "corpus")
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
    assert settings_of(out) == ModelConfig(**SIZES, tie_embeddings=False, vocab_size=257)
    assert export_huggingface.main() == 1
    assert "out is there already, with something in it: give a new folder" in capsys.readouterr().err


def test_a_window_is_mistrals(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    config, out = job(write_corpus(tmp_path / "corpus"), 1), tmp_path / "out"
    config.trainer.steps, config.optim.lr = 3, 0.03
    with one_rank():
        loop.train(config, tmp_path / "run")
        run = build.build(config)
        path = checkpoint.latest(tmp_path / "run" / "checkpoints")
        checkpoint.load(path, checkpoint.model_state(run.model))
        export_huggingface.export(path, out, torch.float32)
        tokens = torch.randint(257, (50,), generator=torch.Generator().manual_seed(1))
        ours = logits(run.model, tokens)[:, :257].double()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["MistralForCausalLM"]
    torch.testing.assert_close(ours, llama(out, tokens), rtol=1e-4, atol=1e-4)
    assert settings_of(out).window == config.model.window == 40


@pytest.mark.parametrize("settings", [{}, {"window": 9}, {"rope_factor": 8.0, "rope_trained_len": 4096}], ids=str)
def test_settings_survive_a_folder(settings, tmp_path):
    model = ModelConfig(**SIZES, vocab_size=300, **settings)
    described = huggingface.config_of(model, 300, 61, 256, torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert settings_of(tmp_path) == model


def test_a_tokenizer_goes_with_the_model(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    monkeypatch.setattr(export_huggingface, "load_tokenizer", lambda name: build.load_tokenizer("bytes"))
    meta = {"config": {"data": {"tokenizer": str(path)}, "model": SIZES}}
    tensors = checkpoint.model_state(GPT(ModelConfig(**SIZES), 257))
    saved = checkpoint.save(tmp_path / "checkpoints", 1, tensors, meta, keep=1)
    export_huggingface.export(saved, tmp_path / "out", torch.bfloat16)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
