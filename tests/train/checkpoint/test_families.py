"""A small random model of every family has the same logits, exports, gradients and samples as in transformers."""

import json
from pathlib import Path

import datasets
import pytest
import torch
import torch.distributed as dist

from ringattn.train import setup as run_setup
from ringattn.train import trainer as trainer_module
from ringattn.train.checkpoint import huggingface, storage
from ringattn.train.checkpoint.families import Family
from ringattn.train.commands import export
from ringattn.train.inference.generation import generate
from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import Config, ConfigError, TrainerConfig, with_settings
from tests.distributed import run_ranks
from tests.train.checkpoint.test_huggingface import load_on_a_rank
from tests.train.hub_models import (
    change_folder,
    exact_logits_of_transformers,
    exact_model,
    import_folder,
    in_float64,
    load_in_transformers,
    logits,
    read_tensors,
    settings_of,
    write_config,
    write_tokenizer,
)
from tests.train.jobs import job, one_rank
from tests.train.launch import write_corpus

TOKENS = torch.randint(257, (40,), generator=torch.Generator().manual_seed(1))
# Entries of config.json of all models, unless a family has its own.
SIZES = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400, "rope_theta": 50.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 50.0, "partial_rotary_factor": 0.75}
LONGROPE |= {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7], "long_factor": [1.0, 1.5, 2.0, 3.0, 7.0, 31.0]}
YARN_EXACT = YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
QUARTER = {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 50.0}
# The class of the settings in transformers and further entries of config.json, for each kind of model.
MODELS = {
    "ministral": (
        "MinistralConfig",
        dict(head_dim=16, sliding_window=7, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
    "ministral with windows": ("MinistralConfig", dict(sliding_window=7, head_dim=8)),
    "olmo3": ("Olmo3Config", dict(sliding_window=7, rope_parameters={"full_attention": YARN})),
    "olmo3 with an ignored length": (
        "Olmo3Config",
        dict(sliding_window=7, rope_parameters={"full_attention": YARN}, original_max_position_embeddings=77),
    ),
    "olmo3 without a scaling": ("Olmo3Config", dict(sliding_window=7)),
    "olmo3 with full layers": ("Olmo3Config", dict(num_key_value_heads=4, layer_types=["full_attention"] * 4)),
    "gemma3_text": (
        "Gemma3TextConfig",
        dict(
            num_hidden_layers=7,
            head_dim=16,
            query_pre_attn_scalar=20,
            sliding_window=7,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 70.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        ),
    ),
    "gemma3_text with windows": (
        "Gemma3TextConfig",
        dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=7, layer_types=["sliding_attention"] * 4),
    ),
    "smollm3": ("SmolLM3Config", dict(tie_word_embeddings=False)),
    "smollm3 with a window": (
        "SmolLM3Config",
        dict(no_rope_layers=[1, 0, 0, 1], use_sliding_window=True, sliding_window=7),
    ),
    "cohere2": ("Cohere2Config", dict(sliding_window=7, logit_scale=0.3)),
    "cohere2 with listed layers": (
        "Cohere2Config",
        dict(sliding_window=7, layer_types=["full_attention", "sliding_attention"] * 2, tie_word_embeddings=False),
    ),
    "glm4": ("Glm4Config", dict(head_dim=16)),
    "glm4 without biases": ("Glm4Config", dict(head_dim=32, attention_bias=False, rope_parameters=QUARTER)),
    "exaone4": ("Exaone4Config", dict(sliding_window=7)),
    "exaone4 without a window": ("Exaone4Config", dict(sliding_window=None, layer_types=["full_attention"] * 4)),
    "phi3": ("Phi3Config", dict(rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.75})),
    "phi3 with longrope": ("Phi3Config", dict(rope_parameters=LONGROPE, original_max_position_embeddings=30)),
    "phi3 with longrope for short sequences": (
        "Phi3Config",
        dict(rope_parameters=LONGROPE, original_max_position_embeddings=400),
    ),
    "phi3 with a window": ("Phi3Config", dict(num_key_value_heads=4, sliding_window=7, tie_word_embeddings=True)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=5, num_experts_per_tok=3)),
    "mixtral with a window": ("MixtralConfig", dict(num_local_experts=3, sliding_window=7, head_dim=8)),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(num_local_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, norm_topk_prob=True, head_dim=32),
    ),
    "qwen3_moe with a window": (
        "Qwen3MoeConfig",
        dict(num_experts=4, num_experts_per_tok=3, moe_intermediate_size=8, use_sliding_window=True, sliding_window=7),
    ),
    "gpt_oss": (
        "GptOssConfig",
        dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=7, rope_parameters=YARN_EXACT),
    ),
    "gpt_oss without a scaling": (
        "GptOssConfig",
        dict(
            **dict(head_dim=16, num_local_experts=3, num_experts_per_tok=3, sliding_window=7),
            layer_types=["full_attention", "sliding_attention"] * 2,
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        ),
    ),
    "granite": (
        "GraniteConfig",
        dict(attention_multiplier=0.3, embedding_multiplier=7.0, residual_multiplier=0.22, logits_scaling=3.0),
    ),
    "seed_oss": ("SeedOssConfig", dict(head_dim=32, attention_bias=True, attention_out_bias=True)),
    "seed_oss without biases": ("SeedOssConfig", dict(head_dim=8, attention_bias=False, attention_out_bias=False)),
}


# The gradients of these models contain all kinds of blocks.
QUICK = ("gemma3_text", "cohere2", "olmo3")


def write_model(folder: Path, kind: str, **changes: object) -> Path:
    """Write a model of transformers with random weights in bf16, and a tokenizer."""
    transformers = pytest.importorskip("transformers")
    name, entries = MODELS[kind]
    config = getattr(transformers, name)(**SIZES | entries | changes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    model.bfloat16().save_pretrained(folder)
    write_tokenizer(folder, adds_bos=False)
    return folder


def load_model(folder: Path) -> GPT:
    model = GPT(settings_of(folder).for_length(len(TOKENS)), 257).double()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # The padding of the vocabulary is not in the folder.
    huggingface.load(folder, model)
    return model


def our_logits(folder: Path) -> torch.Tensor:
    model = load_model(folder)
    with in_float64(), torch.no_grad():
        return logits(model, TOKENS)[:, :259]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (" " in kind)) for kind in MODELS])
def test_a_model_has_the_logits_of_transformers_and_is_exported(kind, tmp_path):
    folder, copy, rewritten = write_model(tmp_path / "hf", kind), tmp_path / "copy", tmp_path / "rewritten"
    expected = exact_logits_of_transformers(folder, TOKENS)
    torch.testing.assert_close(our_logits(folder), expected, rtol=0, atol=1e-9)
    export.export(import_folder(folder, tmp_path / "a"), copy, torch.bfloat16)
    # Without the folder, the export derives all files from the settings of the run.
    export.export(
        import_folder(folder, tmp_path / "b", trainer__init_from=None, data__tokenizer="bytes"), rewritten, torch.bfloat16
    )
    assert json.loads((copy / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    before, after = read_tensors(folder), read_tensors(copy)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    torch.testing.assert_close(exact_logits_of_transformers(rewritten, TOKENS), expected, rtol=0, atol=1e-9)
    assert settings_of(rewritten) == settings_of(folder)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in MODELS])
def test_a_model_has_the_gradients_of_transformers(kind, tmp_path):
    folder = write_model(tmp_path / "hf", kind)
    model, expected = load_model(folder), exact_model(folder)
    with in_float64():
        logits(model, TOKENS)[:, :259].square().mean().backward()
        expected(TOKENS[None]).logits.square().mean().backward()
    family, found = huggingface.family_of(folder), dict[str, list[torch.Tensor]]()
    for name, parameter in model.named_parameters():
        found.setdefault(huggingface.hugging_face_name(name, family), []).append(parameter.grad)
    for name, parameter in expected.named_parameters():
        for each, want in stored_gradients(name, parameter.grad, family).items():
            gradient = torch.cat(found.pop(each))[: len(want)]
            torch.testing.assert_close(gradient, want, rtol=1e-9, atol=1e-9 * want.abs().max().item())
    assert not found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_local_experts=5), "num_experts is 4, but num_local_experts is 5"),
        (dict(num_experts=4.5), "4.5 is not an integer"),
        (dict(mlp_only_layers=[0]), r"mlp_only_layers is \[0\], but only \[\] is supported"),
        (dict(decoder_sparse_step=2), "decoder_sparse_step is 2, but only 1 is supported"),
    ],
)
def test_experts_that_are_not_supported_are_an_error(changes, message, tmp_path):
    write_config(tmp_path / "hf", **dict(model_type="qwen3_moe", num_experts=4, moe_intermediate_size=8) | changes)
    with pytest.raises(ConfigError, match=message):
        huggingface.declared_settings(tmp_path / "hf")


def test_experts_of_different_shapes_are_an_error(tmp_path):
    """The tensor of one expert could otherwise be broadcast."""
    folder = write_model(tmp_path / "hf", "qwen3_moe")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    change_folder(folder, {name: read_tensors(folder)[name][:1]})
    with pytest.raises(ConfigError, match=r"layers.1.mlp.experts.0.up_proj.weight .* different shapes"):
        load_model(folder)
    change_folder(folder, {name: None})
    with pytest.raises(ConfigError, match=f"has no {name}"):
        load_model(folder)


def write_mxfp4(folder: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of a gpt-oss model by random weights in MXFP4. Return them as transformers dequantizes them."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    generator, quantized, exact = torch.Generator().manual_seed(3), dict[str, torch.Tensor | None](), {}
    for name, tensor in read_tensors(folder).items():
        if name.endswith(("gate_up_proj", "down_proj")):
            shape = tensor.shape[0], tensor.shape[2], tensor.shape[1] // 32
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(118, 126, shape, dtype=torch.uint8, generator=generator)
            quantized |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
            exact[name] = mxfp4.convert_moe_packed_tensors(blocks, scales)
    change_folder(folder, quantized, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    return exact


def test_mxfp4_is_dequantized_and_exported_in_bf16(tmp_path):
    folder, out = write_model(tmp_path / "hf", "gpt_oss", intermediate_size=96), tmp_path / "out"
    exact = write_mxfp4(folder)
    assert exact
    config = json.loads((folder / "config.json").read_text())
    export.export(import_folder(folder, tmp_path / "run"), out, torch.bfloat16)
    tensors = read_tensors(out)
    for name, tensor in exact.items():
        assert torch.equal(tensors[name], tensor), name
    del config["quantization_config"]
    assert json.loads((out / "config.json").read_text()) == config
    torch.testing.assert_close(our_logits(folder), exact_logits_of_transformers(out, TOKENS), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("scales", lambda x: x[:, :1].contiguous(), "has shape"),
        ("blocks", lambda x: x.float(), "is F32 and U8"),
        ("blocks", lambda x: x[..., :8].contiguous(), "has shape"),
    ],
)
def test_damaged_mxfp4_is_an_error(suffix, change, message, tmp_path):
    folder = write_model(tmp_path / "hf", "gpt_oss", intermediate_size=96)
    write_mxfp4(folder)
    name = f"model.layers.2.mlp.experts.down_proj_{suffix}"
    change_folder(folder, {name: change(read_tensors(folder)[name])})
    with pytest.raises(ConfigError, match=message):
        load_model(folder)


def stored_gradients(name: str, gradient: torch.Tensor, family: Family) -> dict[str, torch.Tensor]:
    """The gradients of the tensors in a folder that transformers joins in one parameter."""
    layer, _, weight = name.partition(".mlp.")
    if name.endswith("self_attn.sinks"):
        return {f"{name}:": gradient}
    if "sinks" in family.names and weight.startswith("experts."):
        gradient = gradient.mT if gradient.ndim == 3 else gradient
        if "gate_up" not in name:
            return {f"{name}:": gradient}
        return {f"{name}:{part}": gradient[:, part::2] for part in range(2)}
    if weight == "gate.weight":
        return {f"{layer}.{family.names['experts.router']}.weight": gradient}
    if not weight.startswith("experts."):
        return {name: gradient}
    parts = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}[weight.removeprefix("experts.")]
    return {
        f"{layer}.{family.names[f'experts.{part}']}.weight": each
        for part, each in zip(parts, gradient.chunk(len(parts), 1), strict=True)
    }


@pytest.mark.slow
def test_every_rank_loads_its_own_rows_of_weights_in_one_tensor(tmp_path):
    """Three ranks do not divide the rows of queries, keys and values evenly."""
    folder = write_model(tmp_path / "hf", "phi3 with longrope")
    torch.save(load_model(folder).float().state_dict(), tmp_path / "expected.pt")
    run_ranks(load_on_a_rank, 3, tmp_path / "ranks", folder, tmp_path / "expected.pt")


# Entries that earlier versions of transformers wrote. They replace those of a model.
OLDER = {
    "gemma3_text": {
        "rope_parameters": None,
        **{"rope_theta": 70.0, "rope_local_base_freq": 30.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        **{"layer_types": None, "sliding_window_pattern": 6},
    },
    "olmo3": {
        **{"rope_parameters": None, "rope_theta": 500_000, "layer_types": None},
        "rope_scaling": {name: value for name, value in YARN.items() if name != "rope_theta"},
    },
    "phi3 with longrope": {
        "rope_parameters": None,
        **{"rope_theta": 50.0, "partial_rotary_factor": 0.75},
        "rope_scaling": {"type": "longrope", **{name: LONGROPE[name] for name in ("short_factor", "long_factor")}},
    },
    "cohere2": {"rope_parameters": None, "rope_theta": 50.0, "layer_types": None, "sliding_window_pattern": 2},
    "glm4": {"rope_parameters": None, "rope_theta": 50.0, "partial_rotary_factor": 0.25},
    "smollm3": {"rope_parameters": None, "rope_theta": 50.0, "no_rope_layers": None, "no_rope_layer_interval": 3},
    "exaone4": {"rope_parameters": None, "rope_theta": 50.0, "sliding_window_pattern": "LLLG"},
    "gpt_oss": {"rope_parameters": None, "rope_scaling": None, "rope_theta": 50.0},
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in OLDER])
def test_entries_of_earlier_versions_have_the_same_meaning_as_in_transformers(kind, tmp_path):
    folder = change_folder(write_model(tmp_path / "hf", kind), {}, **OLDER[kind])
    if kind == "gpt_oss":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": None}))
    torch.testing.assert_close(our_logits(folder), exact_logits_of_transformers(folder, TOKENS), rtol=0, atol=1e-9)


# One model for each kind of block. Its window is shorter than the sequences of the runs.
TRAINED = (
    "olmo3",
    "gemma3_text",
    "smollm3",
    "granite",
    "cohere2",
    "glm4",
    "seed_oss",
    "exaone4",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
)


def run_settings(folder: Path, corpus: str, ranks: int) -> Config:
    values = {"model": settings_of(folder), "trainer.init_from": str(folder), "trainer.steps": 4, "optim.lr": 1e-2}
    values |= {"data.split": "train", "data.eval_split": None, "data.eval_fraction": 0.0}
    values |= {"trainer.eval_every": TrainerConfig.eval_every, "trainer.eval_tokens": TrainerConfig.eval_tokens}
    return with_settings(job(corpus, 1, ring=ranks), values)


def train_all(corpus: str, directory: Path) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    for kind in TRAINED:
        trainer_module.train(run_settings(directory / kind, corpus, dist.get_world_size()), directory / f"{kind}-run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a directory with a folder for each family in TRAINED, and a run of two ranks that started from it."""
    directory = tmp_path_factory.mktemp("trained")
    for kind in TRAINED:
        (write_model(directory / kind, kind) / "tokenizer.json").unlink()
    run_ranks(train_all, 2, directory / "store", write_corpus(directory / "corpus"), directory)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_a_trained_model_generates_the_same_text_in_transformers(kind, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder, out, path = trained / kind, tmp_path / "out", storage.latest(trained / f"{kind}-run" / "checkpoints")
    export.export(path, out, torch.float32)
    before, after = read_tensors(folder), read_tensors(out)
    assert not any(torch.equal(after[name], tensor.float()) for name, tensor in before.items())
    torch.testing.assert_close(our_logits(out), exact_logits_of_transformers(out, TOKENS), rtol=0, atol=1e-9)
    prompt = TOKENS.tolist()[:20]
    with one_rank():
        run = run_setup.build_for_inference(run_settings(folder, str(trained / "corpus"), 1), path)
        text = generate(run, prompt, 16, temperature=0.0)
    model = load_in_transformers(out, torch.float32)
    # The last two rows of the embedding are not tokens.
    options = dict(do_sample=False, max_new_tokens=16, suppress_tokens=[257, 258], eos_token_id=256, pad_token_id=256)
    expected = model.generate(torch.tensor([[256, *prompt]]), **options)[0].tolist()[1:]
    assert text == expected[: expected.index(256) if 256 in expected else None]
    assert len(text) > len(prompt)
