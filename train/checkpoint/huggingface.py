"""Models in the format of Hugging Face's transformers: a folder of config.json and safetensors.

Llama's architecture is that of `ringattn.train.model.gpt` under other names; so are Mistral's, which has a window, and those of
Qwen 2 (`model.qkv_bias`) and 3 (`model.qk_norm`). A run may begin with such a model (`trainer.init_from`), and what was trained
can be written as one (`scripts/tools/export_huggingface.py`).
"""

import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringattn.train.config import ConfigError, ModelConfig
from ringattn.train.model.gpt import padded_vocabulary
from ringattn.train.model.rope import MAX_ROTATIONS, yarn_scale

NAMES = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}  # ours: theirs
BLOCK_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "query.weight": "self_attn.q_proj.weight",
    "key.weight": "self_attn.k_proj.weight",
    "value.weight": "self_attn.v_proj.weight",
    "query.bias": "self_attn.q_proj.bias",
    "key.bias": "self_attn.k_proj.bias",
    "value.bias": "self_attn.v_proj.bias",
    "query_norm": "self_attn.q_norm.weight",
    "key_norm": "self_attn.k_norm.weight",
    "output.weight": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "gate.weight": "mlp.gate_proj.weight",
    "up.weight": "mlp.up_proj.weight",
    "down.weight": "mlp.down_proj.weight",
}
# what else a config.json may ask for, and the only value that the model has
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
TURNS = {  # the same of scaled rotary angles
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": MAX_ROTATIONS["llama3"]},
    "yarn": {"beta_slow": 1.0, "beta_fast": MAX_ROTATIONS["yarn"], "truncate": True},
}
TOKENIZER = "tokenizer.json"
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# what transformers takes where config.json says nothing, and other types do otherwise
LEFT_OUT = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
}


def is_model(path: Path) -> bool:
    """Whether `path` is a folder of this format, rather than a checkpoint of ours."""
    return (path / "config.json").is_file()


def their_name(name: str) -> str:
    """Of a parameter of `ringattn.train.model.gpt.GPT`."""
    if match := re.fullmatch(r"blocks\.(\d+)\.(.*)", name):
        return f"model.layers.{match[1]}.{BLOCK_NAMES[match[2]]}"
    return NAMES[name]


def read_settings(path: Path) -> dict[str, Any]:
    """The model of the folder `path` in the terms of ModelConfig.

    Raises:
        ConfigError: config.json cannot be read, or asks for what the model here has not.
    """
    try:
        config = json.loads((path / "config.json").read_text())
        config = LEFT_OUT.get(config["model_type"], {}) | config
        unknown = _unknown(config)
        settings = {} if unknown else _settings(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{path}/config.json is of no model that is known here: {type(error).__name__}: {error}") from error
    if unknown:
        raise ConfigError(f"{path}/config.json: {unknown}: choose another model")
    return settings


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    rope, kind = _rope(config)
    scaled = kind != "default"
    settings = {
        "vocab_size": config["vocab_size"],
        "layers": config["num_hidden_layers"],
        "dim": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "resolved_head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "resolved_ffn_dim": config["intermediate_size"],
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000),
        "rope_factor": float(rope["factor"]) if scaled else None,
        "rope_trained_len": _trained_len(config, rope) if scaled else None,
        "rope_scaling": kind if scaled else ModelConfig.rope_scaling,
        "qkv_bias": config["model_type"] == "qwen2",
        "qk_norm": config["model_type"] == "qwen3",
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_embeddings": bool(config.get("tie_word_embeddings")),
        "window": config.get("sliding_window") if _layer_types(config) == {"sliding_attention"} else None,
    }
    for name in ("vocab_size", "layers", "dim", "heads", "kv_heads", "resolved_ffn_dim"):
        operator.index(settings[name])
    return settings


def _unknown(config: dict[str, Any]) -> str:
    """What `config` asks for and the model here has not; "" if there is nothing."""
    rope, kind = _rope(config)
    asked = {"model_type": (config["model_type"], tuple(ARCHITECTURES)), "rope_type": (kind, ("default", *TURNS))}
    asked |= {name: (value if config.get(name) is None else config[name], (value,)) for name, value in FIXED.items()}
    asked |= {name: (rope.get(name, value), (value,)) for name, value in TURNS.get(kind, {}).items()}
    asked["partial_rotary_factor"] = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")), (None, 1.0)
    if kind == "yarn":
        asked["attention_factor"] = rope.get("attention_factor"), (None, yarn_scale(rope["factor"]))
        asked |= {name: (rope.get(name), (None,)) for name in ("mscale", "mscale_all_dim")}
    if len(types := _layer_types(config)) > 1:
        asked["layer_types"] = " and ".join(sorted(types)), ("one of them",)
    for name, (value, known) in asked.items():
        if value not in known:
            return f"{name} is {value}, and the model here has only {' or '.join(map(str, known))}"
    return ""


def _rope(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What is said of rotary angles, and how they are scaled."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope, rope.get("rope_type") or rope.get("type") or "default"


def _trained_len(config: dict[str, Any], rope: dict[str, Any]) -> int:
    """As transformers looks for it."""
    name = "original_max_position_embeddings"
    return config.get(name) or rope.get(name) or config["max_position_embeddings"]


def _layer_types(config: dict[str, Any]) -> set[str]:
    """Of layers with a window, "sliding_attention", and without one, "full_attention": which there are."""
    if config["model_type"] not in ("qwen2", "qwen3"):
        return {"sliding_attention" if config["model_type"] == "mistral" else "full_attention"}
    if not config.get("use_sliding_window"):
        return {"full_attention"}
    first, layers = config["max_window_layers"], range(config["num_hidden_layers"])
    return set(config.get("layer_types") or ("sliding_attention" if layer >= first else "full_attention" for layer in layers))


def differences(path: Path, model: ModelConfig, vocab_size: int) -> str:
    """Of the folder's model, what may be otherwise in the settings and is, as rope_theta; "" if all is the same.

    Args:
        vocab_size: of the run's tokenizer.

    Raises:
        ConfigError: what may not, since it gives parameters their shapes; or fewer tokens than the tokenizer has.
    """
    theirs = read_settings(path)
    rows = theirs.pop("vocab_size")
    if rows < vocab_size:
        raise ConfigError(f"{path} has {rows} tokens, fewer than the tokenizer's {vocab_size}: set data.tokenizer to its own")
    if rows > padded_vocabulary(model, vocab_size):
        raise ConfigError(f"{path} has {rows} tokens, more than the model here: set model.vocab_size={rows}")
    if theirs["rope_factor"] is None:  # nothing to compare these with
        del theirs["rope_trained_len"], theirs["rope_scaling"]
    changed = {name: value for name, value in theirs.items() if getattr(model, name) != value}
    named = {"resolved_head_dim": "head_dim", "resolved_ffn_dim": "ffn_dim"}
    listed = ", ".join(f"model.{named.get(name, name)}={value} (now {getattr(model, name)})" for name, value in changed.items())
    if not changed.keys() <= {"rope_theta", "rope_factor", "rope_trained_len", "rope_scaling", "norm_eps", "window"}:
        raise ConfigError(f"{path} is a model of {listed}: set the same")
    return listed


def load(path: Path, model: nn.Module) -> None:
    """Fill the parameters of `model`, of which each rank reads the rows that it holds. Further rows of a vocabulary stay.

    Raises:
        ConfigError: a tensor is missing or of another shape, or a file cannot be read.
    """
    find = _finder(path)
    for name, parameter in model.state_dict().items():
        stored = find(their_name(name))
        if (dtype := stored.get_dtype()) not in ("F64", "F32", "F16", "BF16"):
            raise ConfigError(
                f"{path}: {their_name(name)} is {dtype}, a model that was quantized: choose the one it was made of"
            )
        shape = tuple(stored.get_shape())
        num_rows = min(shape[0], len(parameter)) if name in ("embedding", "head") else len(parameter)
        if shape != (num_rows, *parameter.shape[1:]):
            raise ConfigError(f"{path}: {their_name(name)} has shape {shape}, in this run {tuple(parameter.shape)}")
        own, first = _own_rows(parameter)
        last = min(first + len(own), num_rows)
        if first < last:
            own[: last - first].copy_(stored[first:last])


def _own_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """What this rank holds of a parameter that is cut as `torch.chunk` does, and which row of it comes first."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    return parameter.to_local(), parameter.device_mesh.get_local_rank() * -(-len(parameter) // parameter.device_mesh.size())


def _finder(path: Path) -> Callable[[str], Any]:
    """A function that finds a tensor of the folder by name, as something to cut rows from."""
    from safetensors import SafetensorError, safe_open

    try:
        index = path / "model.safetensors.index.json"
        whole = path / "model.safetensors"
        if whole.is_file():  # an index beside it may be of files before
            known = [whole]
        elif index.is_file():
            known = {path / name for name in json.loads(index.read_text())["weight_map"].values()}
        else:
            known = path.glob("*.safetensors")
        files = [safe_open(file, "pt") for file in sorted(known)]
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; download it again") from error
    where = {name: file for file in files for name in file.keys()}

    def find(name: str) -> Any:
        if name not in where:
            raise ConfigError(f"{path} has no {name} in its *.safetensors: give the whole folder of a model")
        return where[name].get_slice(name)

    return find


def config_of(model: ModelConfig, vocab_size: int, seq_len: int, eos: int, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a model.

    Args:
        vocab_size: rows of its embedding.
        seq_len: tokens of the sequences it was trained on.

    Raises:
        ConfigError: transformers has no such model.
    """
    model_type, more = _model_type(model), {}
    if model.window:
        more = {"sliding_window": model.window, "use_sliding_window": True, "max_window_layers": 0}
    if model.rope_factor is not None:
        stretch = {"factor": model.rope_factor, "original_max_position_embeddings": model.rope_trained_len}
        more["rope_scaling"] = {"rope_type": model.rope_scaling, **stretch, **TURNS[model.rope_scaling]}
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "num_hidden_layers": model.layers,
        "hidden_size": model.dim,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.resolved_head_dim,
        "intermediate_size": model.resolved_ffn_dim,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": seq_len,
        "bos_token_id": eos,
        "eos_token_id": eos,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **FIXED,
        **more,
    }


def _model_type(model: ModelConfig) -> str:
    if model.qkv_bias and model.qk_norm:
        raise ConfigError("transformers has no model with both model.qkv_bias and model.qk_norm: export one with either")
    if model.qkv_bias or model.qk_norm:
        return "qwen2" if model.qkv_bias else "qwen3"
    return "mistral" if model.window else "llama"
