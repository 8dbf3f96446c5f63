"""Export a checkpoint as a model in the format of Hugging Face's transformers.

    python -m scripts.tools.export_huggingface outputs/long/checkpoints/step_00010000 long-hf

The exported folder contains config.json, generation_config.json, safetensors files and the tokenizer. transformers has no
tokenizer like "bytes", so the folder contains no tokenizer if the model was trained on bytes.

The exported model usually has the Llama architecture. A model with a window becomes a Mistral model. A model with
model.qkv_bias or model.qk_norm becomes a Qwen model. The export needs enough memory for all parameters.
"""

import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from ringattn.train.checkpoint import huggingface, state_dict, storage
from ringattn.train.checkpoint.init import initial_weights_path
from ringattn.train.checkpoint.progress import bytes_on_disk, show_progress
from ringattn.train.checkpoint.resume import saved_config
from ringattn.train.config import ConfigError, ModelConfig
from ringattn.train.data.tokenizer import JsonTokenizer, check_tokenizer, load_tokenizer
from ringattn.train.model.gpt import GPT
from scripts import command

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Maps each model_type to the class of the model in transformers.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def export(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the model of a checkpoint to a folder.

    Args:
        path: the directory of the checkpoint.
        folder: a new or empty folder. If writing fails, the folder is removed.
        dtype: the dtype of the exported parameters.

    Raises:
        ConfigError: the checkpoint or the tokenizer does not exist, the tokenizer differs from the tokenizer of the training,
            transformers has no suitable architecture, the folder is not empty, or the folder cannot be written.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not an empty folder: choose a new folder")
    meta = storage.read_meta(path)
    saved = saved_config(meta)
    data, settings = saved.data, saved.model
    tokenizer = load_tokenizer(data.tokenizer, data.eos_token)
    check_tokenizer(data.tokenizer, tokenizer, meta.get("tokenizer"), f"{path} was trained with another tokenizer")
    special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    config = config_json(settings, tokenizer.vocab_size, max_positions(meta), special, dtype)
    tensors = exported_tensors(path, settings, tokenizer.vocab_size, dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with show_progress(("saving", "saved"), folder, size, lambda: bytes_on_disk(folder) / size):
            save_torch_state_dict(tensors, folder)
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", special)
        if isinstance(tokenizer, JsonTokenizer):
            write_tokenizer(Path(data.tokenizer).expanduser(), tokenizer, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"cannot write {folder}: {error}; check the disk, or choose another folder") from error
    print(f"{folder}: {sum(tensor.numel() for tensor in tensors.values()):,} parameters, {dtype}")
    if not isinstance(tokenizer, JsonTokenizer):
        print(f"The folder has no tokenizer: the token ids are the bytes of the text, and {tokenizer.eos} starts each document")


def exported_tensors(path: Path, settings: ModelConfig, vocab_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the parameters of a checkpoint under their names in transformers."""
    model = GPT(settings, vocab_size)
    storage.load(path, state_dict.model_state(model))
    tensors = {huggingface.hugging_face_name(name): tensor.to(dtype) for name, tensor in model.state_dict().items()}
    for name in {huggingface.hugging_face_name("embedding"), huggingface.hugging_face_name("head")} & tensors.keys():
        # The rows beyond the vocabulary are padding and were never trained.
        tensors[name] = tensors[name][:vocab_size].clone()
    return tensors


def max_positions(meta: dict[str, Any]) -> int:
    """Return the number of tokens of the longest sequences for which the model of a checkpoint was trained.

    If the run started from a Hugging Face model, the result is at least the `max_position_embeddings` of that model.

    Args:
        meta: the content of the checkpoint's meta.json.

    Raises:
        ConfigError: the config.json of the Hugging Face model cannot be read.
    """
    settings = saved_config(meta)
    folder = initial_weights_path(settings)
    if folder is None or not huggingface.is_model(folder):
        return settings.data.seq_len
    try:
        published = json.loads((folder / "config.json").read_text()).get("max_position_embeddings") or 0
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error}; download it again") from error
    return max(settings.data.seq_len, published)


def write_tokenizer(path: Path, tokenizer: JsonTokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json to a folder.

    Args:
        path: the tokenizer.json of the training. If a tokenizer_config.json is next to it, that file is copied.
        tokenizer: the tokenizer that was loaded from `path`.
        folder: the folder.
    """
    shutil.copy(path, folder / "tokenizer.json")
    config = path.with_name("tokenizer_config.json")
    if config.is_file():
        shutil.copy(config, folder / "tokenizer_config.json")
        return
    names = {"bos_token": tokenizer.token(tokenizer.bos), "eos_token": tokenizer.token(tokenizer.eos)}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def config_json(
    model: ModelConfig, vocab_size: int, max_positions: int, special: dict[str, int], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the content of config.json for a model.

    Args:
        model: the settings of the model.
        vocab_size: the number of rows of the embedding.
        max_positions: the number of tokens of the longest sequences for which the model was trained.
        special: the ids of the special tokens under their names in config.json.
        dtype: the dtype of the weights.

    Raises:
        ConfigError: transformers has no architecture with these settings.
    """
    model_type, optional = model_type_of(model), {}
    if model.window:
        optional = {"sliding_window": model.window, "use_sliding_window": True, "max_window_layers": 0}
    if model.rope_factor is not None:
        optional["rope_scaling"] = {
            "rope_type": model.rope_scaling,
            "factor": model.rope_factor,
            "original_max_position_embeddings": model.rope_trained_len,
            **huggingface.ROPE_FIXED[model.rope_scaling],
        }
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
        "max_position_embeddings": max_positions,
        **special,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **huggingface.FIXED,
        **optional,
    }


def model_type_of(model: ModelConfig) -> str:
    """Return the `model_type` of the model in transformers.

    Raises:
        ConfigError: transformers has no architecture with these settings.
    """
    if model.qkv_bias and model.qk_norm:
        raise ConfigError(
            "transformers has no model with both model.qkv_bias and model.qk_norm: only one of them can be exported"
        )
    if model.qkv_bias or model.qk_norm:
        return "qwen2" if model.qkv_bias else "qwen3"
    return "mistral" if model.window else "llama"


def main(argv: list[str]) -> int:
    parser = command.new_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="a step_... directory")
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the exported parameters (default: bf16)")
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ringattn.train").setLevel(logging.INFO)  # shows the progress of the load and of the save
    try:
        export(args.checkpoint, args.folder, DTYPES[args.dtype])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
