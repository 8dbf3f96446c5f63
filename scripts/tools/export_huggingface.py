"""Write what was trained as a model of Hugging Face's transformers: config.json, safetensors, and the tokenizer.

    python -m scripts.tools.export_huggingface outputs/long/checkpoints/step_00010000 long-hf

It loads as any model of the Llama architecture does; with a window as one of Mistral's, with model.qkv_bias or model.qk_norm as
one of Qwen's. Needs memory for all parameters.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch

from ringattn.train.checkpoint import huggingface, storage
from ringattn.train.config import ConfigError, DataConfig, ModelConfig
from ringattn.train.data.tokenizer import check_tokenizer, load_tokenizer
from ringattn.train.model.gpt import GPT

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a step_... directory")
    parser.add_argument("folder", type=Path, help="a new or empty one")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    arguments = parser.parse_args()
    try:
        export(arguments.checkpoint, arguments.folder, DTYPES[arguments.dtype])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def export(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the checkpoint at `path` to `folder`.

    Raises:
        ConfigError: no checkpoint, no tokenizer or another than in training, a model that transformers has not, a folder with
            something in it, or one that cannot be written, of which nothing is left.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already, with something in it: give a new folder")
    meta = storage.read_meta(path)
    data, settings = DataConfig(**meta["config"]["data"]), ModelConfig(**meta["config"]["model"])
    tokenizer = load_tokenizer(data.tokenizer)
    check_tokenizer(data.tokenizer, tokenizer, meta.get("tokenizer"), f"{path} was trained with what was in its place then")
    described = huggingface.config_of(settings, tokenizer.vocab_size, data.seq_len, tokenizer.eos, dtype)
    model = GPT(settings, tokenizer.vocab_size)
    storage.load(path, storage.model_state(model))
    tensors = {huggingface.their_name(name): tensor.to(dtype) for name, tensor in model.state_dict().items()}
    for name in {huggingface.NAMES["embedding"], huggingface.NAMES["head"]} & tensors.keys():
        # the rows behind only fill up, and were never trained
        tensors[name] = tensors[name][: tokenizer.vocab_size].clone()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_torch_state_dict(tensors, folder)
        (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        if data.tokenizer != "bytes":
            shutil.copy(Path(data.tokenizer).expanduser(), folder / huggingface.TOKENIZER)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"{folder} cannot be written: {error}; check the disk, or give another folder") from error
    print(f"{folder}: {sum(tensor.numel() for tensor in tensors.values()):,} parameters, {dtype}")


if __name__ == "__main__":
    sys.exit(main())
