"""Export a checkpoint as a model of Hugging Face's transformers: config.json, safetensors files and the tokenizer.

    python -m scripts.tools.export_huggingface outputs/long/checkpoints/step_00010000 long-hf

The exported model has the Llama architecture. A model with a window becomes a Mistral model, and a model with model.qkv_bias or
model.qk_norm becomes a Qwen model. The export needs enough memory for all parameters.
"""

import json
import shutil
import sys
from pathlib import Path

import torch

from ringattn.train.checkpoint import huggingface, state_dict, storage
from ringattn.train.config import ConfigError, DataConfig, ModelConfig
from ringattn.train.data.tokenizer import check_tokenizer, load_tokenizer
from ringattn.train.model.gpt import GPT
from scripts import command

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def export(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the model of a checkpoint to a folder.

    Args:
        path: the directory of the checkpoint.
        folder: a new or empty folder. If writing fails, it is removed.
        dtype: the dtype of the exported parameters.

    Raises:
        ConfigError: there is no checkpoint or no tokenizer, the tokenizer differs from the tokenizer of the training,
            transformers lacks a suitable architecture, the folder is not empty, or the folder cannot be written.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not an empty folder: choose a new folder")
    meta = storage.read_meta(path)
    data, settings = DataConfig(**meta["config"]["data"]), ModelConfig(**meta["config"]["model"])
    tokenizer = load_tokenizer(data.tokenizer)
    check_tokenizer(data.tokenizer, tokenizer, meta.get("tokenizer"), f"{path} was trained with another tokenizer")
    config = huggingface.config_json(settings, tokenizer.vocab_size, data.seq_len, tokenizer.eos, dtype)
    tensors = exported_tensors(path, settings, tokenizer.vocab_size, dtype)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(tensors, folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if data.tokenizer != "bytes":
            shutil.copy(Path(data.tokenizer).expanduser(), folder / huggingface.TOKENIZER)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"cannot write {folder}: {error}; check the disk, or choose another folder") from error
    print(f"{folder}: {sum(tensor.numel() for tensor in tensors.values()):,} parameters, {dtype}")


def exported_tensors(path: Path, settings: ModelConfig, vocab_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the parameters of a checkpoint under the names that transformers gives them."""
    model = GPT(settings, vocab_size)
    storage.load(path, state_dict.model_state(model))
    tensors = {huggingface.hugging_face_name(name): tensor.to(dtype) for name, tensor in model.state_dict().items()}
    for name in {huggingface.NAMES["embedding"], huggingface.NAMES["head"]} & tensors.keys():
        # The rows beyond the vocabulary are padding and were never trained.
        tensors[name] = tensors[name][:vocab_size].clone()
    return tensors


def main(argv: list[str]) -> int:
    parser = command.new_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="a step_... directory")
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the exported parameters (default: bf16)")
    args = parser.parse_args(argv)
    try:
        export(args.checkpoint, args.folder, DTYPES[args.dtype])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
