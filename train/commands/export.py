"""Export a trained model as a folder in the format of Hugging Face's transformers.

    python train/export.py run=NAME                                the newest checkpoint of a run, in bf16
    python train/export.py run=NAME output=FOLDER dtype=fp32       to another folder, in fp32

The exported folder contains config.json, generation_config.json, safetensors files and the tokenizer. A model that was trained
on bytes is exported without a tokenizer, because transformers has none for bytes.

By default, the command chooses the first architecture in `ringattn.train.checkpoint.families` that supports the model, usually
Llama. If the run started from a Hugging Face folder, the export contains all files of the folder except its weights. The
command changes config.json and generation_config.json only where the run differs.

The exporting process holds all parameters in memory at once.
"""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from glob import escape
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ringattn.train.checkpoint import expert_weights, huggingface, state_dict, storage
from ringattn.train.checkpoint.families import FAMILIES, Family, fixed_entries
from ringattn.train.checkpoint.init import initial_weights_path
from ringattn.train.checkpoint.progress import bytes_on_disk, show_progress
from ringattn.train.checkpoint.resume import saved_config
from ringattn.train.commands.arguments import option, parse
from ringattn.train.commands.messages import exit_process
from ringattn.train.commands.options import find_model, run_command
from ringattn.train.data.tokenizer import JsonTokenizer, Tokenizer, check_tokenizer, load_tokenizer, read_config
from ringattn.train.files import write_atomically
from ringattn.train.model.gpt import GPT
from ringattn.train.model.rope import longrope_scale
from ringattn.train.settings.config import Config, ConfigError, ModelConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# The files next to tokenizer.json that the tokenizer may also need
TOKENIZER_FILES = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
# An export does not copy hidden files, weights, or the index files of weights.
LEFT_OUT = (
    ".*",
    "*.safetensors",
    "*.index.json",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.msgpack",
    "*.onnx*",
    "*.ot",
    "*.tflite",
    "*.npz",
)
# For each setting that a run may change, the entries of config.json that contain its value
ENTRIES = {
    "vocab_size": ("vocab_size",),
    "tie_embeddings": ("tie_word_embeddings",),
    "norm_eps": ("rms_norm_eps", "layer_norm_eps"),
    **dict.fromkeys(
        ("window", "layer_types"),
        (
            # The default of num_key_value_heads depends on the model_type.
            *("model_type", "architectures", "num_key_value_heads", "sliding_window", "use_sliding_window"),
            *("max_window_layers", "layer_types", "sliding_window_pattern", "no_rope_layers", "no_rope_layer_interval"),
        ),
    ),
    **dict.fromkeys(
        ("rope_theta", "local_rope_theta", "rope_factor", "rope_trained_len", "rope_scaling", "rope_factors"),
        ("rope_theta", "rope_local_base_freq", "rope_parameters", "rope_scaling", "original_max_position_embeddings"),
    ),
}


@dataclass
class Options:
    """The options of this command."""

    run: str = option(
        "The model: the name of a run in outputs/, the path of the directory of a run, or the path of a checkpoint. The newest "
        "checkpoint of a run is used."
    )
    output: str = option(
        "A new or empty folder. By default, this folder is next to the run, and its name is the name of the run followed by "
        "-huggingface.",
        default="",
    )
    dtype: str = option("The dtype of the exported parameters: bf16, fp16 or fp32.", default="bf16")


def main() -> NoReturn:
    exit_process(run_command(run_command_line, Options, __doc__))


def run_command_line(arguments: list[str]) -> None:
    options, overrides = parse(arguments, Options)
    if dist.get_world_size() > 1:
        raise ConfigError("an export uses a single process: start it without torchrun")
    for name, value in overrides.items():
        raise ConfigError(f"{name}={value} has no effect on an export: leave it out")
    if options.dtype not in DTYPES:
        raise ConfigError(f"unknown dtype={options.dtype}: choose one of {', '.join(DTYPES)}")
    model = find_model(options.run)
    if huggingface.is_model(model.path):
        raise ConfigError(f"run={options.run} is already in Hugging Face's format: give the name of a run or a checkpoint")
    folder = model.directory.with_name(f"{model.directory.name}-huggingface")
    export(model.path, Path(options.output).expanduser() if options.output else folder, DTYPES[options.dtype])


def export(path: Path, folder: Path, dtype: torch.dtype) -> None:
    """Write the model of a checkpoint to a folder.

    Args:
        folder: a new or empty folder, which is removed after an error or Ctrl-C.
        dtype: the dtype of the exported parameters.

    Raises:
        ConfigError: the checkpoint or its tokenizer is missing, or the tokenizer has changed. The error is also raised if
            transformers has no suitable architecture. The folder must be empty and writable.
    """
    from safetensors import SafetensorError

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not an empty folder: choose a new folder")
    meta = storage.read_meta(path)
    saved = saved_config(meta)
    data, settings = saved.data, saved.model
    tokenizer = load_tokenizer(data.tokenizer, data.eos_token)
    check_tokenizer(data.tokenizer, tokenizer, meta.get("tokenizer"), f"{path} was trained with another tokenizer")
    published, rows = published_folder(saved, tokenizer), max(tokenizer.vocab_size, settings.vocab_size or 0)
    if published is not None:
        rows = max(rows, huggingface.declared_settings(published)["vocab_size"])
    special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
    config = config_json(settings, rows, data.seq_len, special, dtype, published)
    written = {"config.json": config, "generation_config.json": special}
    if published is not None:
        if published.resolve() in folder.resolve().parents:
            raise ConfigError(f"{folder} is inside of {published}, whose files are copied: choose another folder")
        written = changed_files(published, saved, config, tokenizer)
    try:
        with _reserve(folder):
            tensors = exported_tensors(path, settings, rows, dtype, FAMILIES[config["model_type"]])
            _write_weights(tensors, folder)
            if published is not None:
                left_out = LEFT_OUT if isinstance(tokenizer, JsonTokenizer) else LEFT_OUT + TOKENIZER_FILES
                copy_files(published, folder, (*left_out, escape(str(published / "config.json"))))
            if isinstance(tokenizer, JsonTokenizer):
                write_tokenizer(Path(data.tokenizer).expanduser(), tokenizer, folder)
            contents = {} if published is None else {"config.json": (published / "config.json").read_bytes()}
            contents |= {name: _as_json(content) for name, content in written.items()}
            # Write config.json last and atomically, so that programs never load an incomplete export.
            for name in sorted(contents, key=lambda name: name == "config.json"):
                write_atomically(folder / name, contents[name])
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {folder}: {error}; check the disk, or choose another folder") from error
    print(f"{folder}: {sum(tensor.numel() for tensor in tensors.values()):,} parameters, {dtype}")
    if published is not None:
        print(f"All other files are those of {published}" + (f", except {' and '.join(written)}" if written else ""))
    elif saved.trainer.init_from is not None:
        print(f"No other files were copied, because {saved.trainer.init_from} is not (or no longer) the folder of this model")
    if not isinstance(tokenizer, JsonTokenizer):
        print(f"The folder has no tokenizer: the token ids are the bytes of the text, and {tokenizer.eos} starts each document")


@contextmanager
def _reserve(folder: Path) -> Generator[None]:
    """Make any other export to this new or empty folder fail. After an error or Ctrl-C, remove the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # At the end, `write_atomically` renames this file to config.json.
    (folder / "config.tmp").touch(exist_ok=False)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def published_folder(saved: Config, tokenizer: Tokenizer) -> Path | None:
    """Return the Hugging Face folder that belongs to a run's model, or None.

    The candidates are `trainer.init_from` and the folder of the tokenizer. The config.json in the folder must describe weights
    with the shapes of the run's model.
    """
    tokenizer_folder = Path(saved.data.tokenizer).expanduser().parent if isinstance(tokenizer, JsonTokenizer) else None
    for folder in (initial_weights_path(saved), tokenizer_folder):
        if folder is not None and huggingface.is_model(folder):
            with suppress(ConfigError):
                settings = huggingface.declared_settings(folder).items()
                if all(name in ENTRIES or getattr(saved.model, name) == value for name, value in settings):
                    return folder
    return None


def changed_files(published: Path, saved: Config, current: dict[str, Any], tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Return the new content of every configuration file that the run changes, by file name.

    `current` is the result of `config_json` for the run.
    """
    files = {name: read_config(published, name) for name in ("config.json", "generation_config.json")}
    special = {name: current[name] for name in ("bos_token_id", "eos_token_id")}
    config = special | files["config.json"]
    config.pop("quantization_config", None)  # The exported weights are not quantized.
    length, trained = config.get("max_position_embeddings"), current["max_position_embeddings"]
    config["max_position_embeddings"] = max(length, trained) if isinstance(length, int) else trained
    config |= {name: current["torch_dtype"] for name in ("torch_dtype", "dtype") if name in config}
    model = replace(saved.model, vocab_size=current["vocab_size"])
    for name, value in huggingface.declared_settings(published, config).items():
        if value != getattr(model, name):
            config = {entry: value for entry, value in config.items() if entry not in ENTRIES[name]}
            config |= {entry: current[entry] for entry in ENTRIES[name] if entry in current}
    written = files | {"config.json": config}
    for name, content in written.items():
        if not isinstance(tokenizer, JsonTokenizer):
            written[name] = content | special  # The published config.json contains token ids of another tokenizer.
        elif saved.data.eos_token is not None and content:
            written[name] = _with_stop_token(content, tokenizer.eos)
    return {name: content for name, content in written.items() if content != files[name]}


def _with_stop_token(config: dict[str, Any], token: int) -> dict[str, Any]:
    known = config.get("eos_token_id")
    known = known if isinstance(known, list) else [] if known is None else [known]
    return config if token in known else config | {"eos_token_id": [token, *known] if known else token}


def copy_files(source: Path, folder: Path, left_out: tuple[str, ...]) -> None:
    """Copy a folder, except for the names that match a pattern in `left_out`."""
    for path in source.iterdir():
        if any(path.match(pattern) for pattern in left_out):
            continue
        if path.is_dir():
            copy_files(path, folder / path.name, left_out)
        elif path.is_file():
            folder.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / path.name)  # Permissions are not copied, because the source may be read-only.


def exported_tensors(
    path: Path, settings: ModelConfig, rows: int, dtype: torch.dtype, family: Family
) -> dict[str, torch.Tensor]:
    """Return the parameters of a checkpoint under the names that transformers uses. The embedding has `rows` rows."""
    model = GPT(settings, rows)
    storage.load(path, state_dict.model_state(model))
    parts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor[:rows] if name in ("embedding", "head") else tensor
        part = tensor.to(dtype)
        if (part.isinf() & tensor.isfinite()).any():
            raise ConfigError(f"{name} of {path} contains numbers that {dtype} cannot represent: use dtype=bf16 or dtype=fp32")
        parts.setdefault(huggingface.hugging_face_name(name, family), []).append(part)
    return expert_weights.exported_tensors(parts)


def _write_weights(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    from huggingface_hub import save_torch_state_dict

    size = sum(tensor.nbytes for tensor in tensors.values())
    with show_progress(("saving", "saved"), folder, size, lambda: bytes_on_disk(folder) / size):
        save_torch_state_dict(tensors, folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(folder.stat().st_mode & 0o644)  # safetensors lets only the owner read its files.


def write_tokenizer(path: Path, tokenizer: JsonTokenizer, folder: Path) -> None:
    """Copy the tokenizer.json at `path`, and further files of the tokenizer that `folder` lacks."""
    shutil.copyfile(path, folder / "tokenizer.json")
    for name in TOKENIZER_FILES:
        if path.with_name(name).is_file() and not (folder / name).exists():
            shutil.copyfile(path.with_name(name), folder / name)
    if not (folder / "tokenizer_config.json").exists():
        names = {"bos_token": tokenizer.token(tokenizer.bos), "eos_token": tokenizer.token(tokenizer.eos)}
        (folder / "tokenizer_config.json").write_bytes(_as_json({"tokenizer_class": "PreTrainedTokenizerFast", **names}))


def _as_json(content: dict[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=2)}\n".encode()


def config_json(
    model: ModelConfig,
    vocab_size: int,
    max_positions: int,
    special: dict[str, int],
    dtype: torch.dtype,
    published: Path | None = None,
) -> dict[str, Any]:
    """Return the content of config.json for a model.

    Args:
        model: the settings of the model.
        vocab_size: the number of rows of the embedding.
        max_positions: the number of tokens of the longest sequences of the training.
        special: the ids of the special tokens by their names in config.json.
        dtype: the dtype of the weights.
        published: a Hugging Face folder. If possible, the export has the same model family.

    Raises:
        ConfigError: transformers has no architecture with these settings.
    """
    model = replace(model, vocab_size=vocab_size)
    preferred = [] if published is None else [read_config(published, "config.json")["model_type"]]
    for model_type in (*preferred, *FAMILIES):
        entries = _model_entries(model_type, model) | {"max_position_embeddings": max_positions, "pad_token_id": None}
        # Some architectures require sliding_window=null for a model without a window.
        for choice in (entries, entries | {"sliding_window": model.window}):
            if huggingface.describes(choice, model):
                return choice | special | {"torch_dtype": str(dtype).removeprefix("torch.")}
    others = ("window", "layer_types", "rotary_fraction", "rope_scaling")
    values = {name: getattr(model, name) for name in (*huggingface.ARCHITECTURE, *others)}
    changed = (f"model.{name}={value}" for name, value in values.items() if value != getattr(ModelConfig, name))
    raise ConfigError(f"transformers has no model with all of {', '.join(changed)}: such a model cannot be exported")


def _model_entries(model_type: str, model: ModelConfig) -> dict[str, Any]:
    family = FAMILIES[model_type]
    layers = [model.layer(index) for index in range(model.layers)]
    types = [f"{'full' if layer.window is None else 'sliding'}_attention" for layer in layers]
    optional: dict[str, Any] = {}
    if model.window:
        optional = {"sliding_window": model.window, "use_sliding_window": True, "max_window_layers": 0}
    if family.lists_layers:
        optional["layer_types"] = types
    if "no_rope_layers" in family.reads:
        optional["no_rope_layers"] = [int(layer.rope.dim > 0) for layer in layers]
    if family.rotary_fraction is not None:
        optional["partial_rotary_factor"] = model.rotary_fraction
    if model.rope_factor is not None:
        kind, factor, trained_len = model.rope_scaling, model.rope_factor, model.rope_trained_len
        optional["rope_scaling"] = {"rope_type": kind.removesuffix("-exact"), "factor": factor, **huggingface.ROPE_FIXED[kind]}
        if kind == "longrope" and model.rope_factors is not None:
            pairs = model.rotary_dim // 2
            lists = {"short_factor": model.rope_factors[:pairs], "long_factor": model.rope_factors[pairs:]}
            optional["original_max_position_embeddings"] = trained_len
            optional["rope_scaling"] |= lists | {"attention_factor": longrope_scale(factor, trained_len)}
        if trained_len is not None:
            optional["rope_scaling"]["original_max_position_embeddings"] = trained_len
    elif "rope_scaling" in family.defaults:
        optional["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if family.local_rope_theta is not None:
        full = {"rope_type": "default", "rope_theta": model.rope_theta, **optional.get("rope_scaling", {})}
        local = full if model.local_rope_theta is None else {"rope_type": "default", "rope_theta": model.local_rope_theta}
        optional["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    if model.attention_scale is None:
        model = replace(model, attention_scale=model.resolved_head_dim**-0.5)
    return {
        "architectures": [family.architecture],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.layers,
        "hidden_size": model.dim,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.resolved_head_dim,
        "intermediate_size": model.resolved_ffn_dim,
        "rope_theta": model.rope_theta,
        family.norm_eps: model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        **{name: entry.encode(getattr(model, entry.setting)) for name, entry in family.entries.items()},
        **fixed_entries(family),
        **optional,
    }
