"""Small models in Hugging Face's format, and their logits as computed by transformers and by our model."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from ringattn.train.checkpoint import huggingface, state_dict, storage
from ringattn.train.commands.options import folder_config
from ringattn.train.data.tokenizer import load_tokenizer
from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import ModelConfig, with_settings

# The settings of our model that determine the shapes of its weights.
SIZES = dict(layers=2, dim=32, heads=4, kv_heads=2, head_dim=16, ffn_dim=48)
# The config.json of a small Llama model of these sizes.
CONFIG = {
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
NULL = object()
# With rope_theta=50, some pairs of the 16 dimensions make more than four rotations within 40 tokens, some make less than one,
# and some are in between.
LLAMA3_SCALING = {"rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 40}
LLAMA3_SCALING |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = LLAMA3_SCALING | {"rope_theta": 50.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400, "rope_theta": 50.0}


def write_config(folder: Path, **changes: object) -> dict[str, Any]:
    """Write a folder that contains only config.json. Its settings are CONFIG with `changes`. None removes a setting.

    A setting with the value NULL is written as null.
    """
    config = {name: value for name, value in (CONFIG | changes).items() if value is not None}
    config |= {name: None for name, value in config.items() if value is NULL}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return config


def write_folder(folder: Path, **changes: object) -> Path:
    """Write a model with random weights in two safetensors files.

    Args:
        folder: a new folder.
        changes: settings of config.json. None removes a setting.
    """
    config = write_config(folder, **changes)
    generator = torch.Generator().manual_seed(0)
    rows = config["vocab_size"] if isinstance(config["vocab_size"], int) else 259
    names = {"model.embed_tokens.weight": (rows, 32), "model.norm.weight": (32,), "lm_head.weight": (rows, 32)}
    if config.get("tie_word_embeddings"):
        del names["lm_head.weight"]
    for layer in range(2):
        shapes = {"input_layernorm": (32,), "post_attention_layernorm": (32,)}
        shapes |= {f"self_attn.{x}_proj": (rows, 32) for x, rows in (("q", 64), ("k", 32), ("v", 32))}
        shapes |= {"self_attn.o_proj": (32, 64), "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
        if config.get("model_type") == "qwen3":
            shapes |= {"self_attn.q_norm": (16,), "self_attn.k_norm": (16,)}
        names |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        if config.get("model_type") == "qwen2":
            names |= {f"model.layers.{layer}.self_attn.{x}_proj.bias": (rows,) for x, rows in (("q", 64), ("k", 32), ("v", 32))}
    tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in names.items()}
    file_of = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: x for name, x in tensors.items() if file_of[name] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return folder


def write_tokenizer(folder: Path, adds_bos: bool) -> Path:
    """Write a byte-pair tokenizer of 259 tokens, trained on a few words. With `adds_bos`, it adds a token as Llama 3 does."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=259, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the ring of the ranks"] * 9, trainer)
    if adds_bos:
        bos = special[0]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


# The files of a chat model besides the weights, config.json and tokenizer.json, and entries of its config.json.
CHAT_FILES = {
    "generation_config.json": '{"eos_token_id": [1, 0, 7], "pad_token_id": 2, "temperature": 0.6, "top_p": 0.9}',
    "tokenizer_config.json": '{"eos_token": "<|end_of_text|>",\n\t"pad_token": "!", "model_max_length": 4096}',
    "special_tokens_map.json": '{"eos_token": {"content": "<|end_of_text|>"}}',
    "added_tokens.json": '{"<|end_of_text|>": 1}',
    "chat_template.jinja": "{% for message in messages %}é{{ message.content }}{% endfor %}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "vocab.json": "{}",
    "merges.txt": "#version: 0.2\r\n",
    "tokenizer.model": "\x00\x01",
    "README.md": "# A chat model",
    "LICENSE": "Apache-2.0",
    "original/params.json": '{"dim": 32}',
    "unknown": "",
}
CHAT_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "eos_token_id": [1, 7],
    "bos_token_id": 0,
    "pad_token_id": None,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "task_specific_params": {"unknown": "é"},
}
# Files that an export of a chat model leaves out.
OLD_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors", "original/consolidated.00.pth")
OLD_WEIGHTS += ("onnx/model.onnx", "onnx/model.onnx_data", "model-Q4.gguf", "optimizer.pt", ".gitattributes", ".git/HEAD")


def write_chat_folder(folder: Path, **changes: object) -> Path:
    """Write a chat model with weights in bf16, as `write_folder` does, and with all the files that published models have."""
    write_folder(folder, **CHAT_CONFIG | changes)
    for file in folder.glob("*.safetensors"):
        save_file({name: x.bfloat16() for name, x in load_file(file).items()}, file, {"format": "pt"})
    write_tokenizer(folder, adds_bos=False)
    for name, text in CHAT_FILES.items() | dict.fromkeys(OLD_WEIGHTS, "old").items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, newline="")
    return folder


def import_folder(folder: Path, directory: Path, **changes: object) -> Path:
    """Save a checkpoint of a run that started from a folder and trained nothing. `changes` are settings of the run."""
    values = {"trainer.init_from": str(folder)} | {name.replace("__", "."): value for name, value in changes.items()}
    config = with_settings(folder_config(folder), values)
    model = GPT(config.model, load_tokenizer(config.data.tokenizer).vocab_size)
    for parameter in model.parameters():
        parameter.data.zero_()  # the folder may lack rows of the embedding
    huggingface.load(folder, model)
    return storage.save(directory, 1, state_dict.model_state(model), {"config": asdict(config)}, keep=1)


def read_files(folder: Path, left_out: str | None = None) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != left_out)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def change_folder(folder: Path, tensors: dict[str, Tensor | None], **changes: object) -> Path:
    """Replace tensors of a model by others, and settings in its config.json. None removes a tensor or a setting."""
    tensors = {name: x for name, x in (read_tensors(folder) | tensors).items() if x is not None}
    config = json.loads((folder / "config.json").read_text()) | changes
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    kept = {name: value for name, value in config.items() if value is not None or name not in changes}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def read_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("model*.safetensors") for name, tensor in load_file(file).items()}


def transformers_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Return the logits (S, V) that transformers computes for tokens (S,) in fp64. Skip the test if it is not installed."""
    with torch.no_grad():
        return load_in_transformers(folder)(tokens[None]).logits[0]


def load_in_transformers(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Load a model with transformers. Skip the test if it is not installed."""
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info  # transformers uses every tensor of the folder, and misses none
    model.set_experts_implementation("eager")  # The others do not support float64.
    return model


@contextmanager
def in_float64() -> Iterator[None]:
    """A context in which models with float64 weights compute everything in float64, also their norms and rotary angles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        yield


def exact_logits_of_transformers(folder: Path, tokens: Tensor) -> Tensor:
    """Return the same as `transformers_logits`, without any rounding to float32."""
    model = exact_model(folder)
    with in_float64(), torch.no_grad():
        return model(tokens[None]).logits[0]


def exact_model(folder: Path) -> Any:
    """Load a model with transformers, for use within `in_float64`."""
    model = load_in_transformers(folder)
    rotary = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("RotaryEmbedding")]
    with in_float64():
        for name, module in rotary:
            model.set_submodule(name, type(module)(module.config))
    return model


def logits(model: GPT, tokens: Tensor) -> Tensor:
    """Return the logits (S, rows of the embedding) that our model computes for tokens (S,)."""
    positions = torch.arange(len(tokens))
    distance = positions[:, None] - positions[None]

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, sink_logits: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        allowed = (distance >= 0) & (distance < (window or len(tokens)))
        if sink_logits is not None:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, float("-inf"))
            sinks = sink_logits[None, :, None, None].expand(*scores.shape[:3], 1)
            return (torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True).transpose(1, 2)

    attends = [partial(attend, window=layer.window) for layer in model.layers]
    return model(tokens[None], positions, attends, lambda hidden, head: hidden @ head.T)[0]


def settings_of(folder: Path) -> ModelConfig:
    """Return the settings of the folder's model, as a user sets them."""
    settings = huggingface.read_settings(folder)
    return ModelConfig(**{name.removeprefix("resolved_"): value for name, value in settings.items()})
