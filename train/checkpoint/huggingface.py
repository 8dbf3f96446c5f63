"""Load models in the format of Hugging Face's transformers: a folder with config.json and safetensors files.

`families.py` lists the supported families. `train/export.py` writes this format.
"""

import json
import logging
import math
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ringattn.train.checkpoint import expert_weights
from ringattn.train.checkpoint.families import (
    FAMILIES,
    NAMES,
    OFF,
    Family,
    fixed_entries,
    renamed,
    unknown_entries,
    weight_name,
)
from ringattn.train.checkpoint.progress import bytes_on_disk, local_bytes, show_progress
from ringattn.train.model.gpt import GPT, padded_vocabulary
from ringattn.train.model.rope import MAX_ROTATIONS, longrope_scale, yarn_scale
from ringattn.train.settings.config import MAY_DIFFER, RANGES, ConfigError, ModelConfig

log = logging.getLogger(__name__)

YARN = {"beta_slow": 1.0, "beta_fast": MAX_ROTATIONS["yarn"]}
ROPE_FIXED: dict[str, dict[str, Any]] = {
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": MAX_ROTATIONS["llama3"]},
    "yarn": {**YARN, "truncate": True},
    "yarn-exact": {**YARN, "truncate": False},
    "longrope": {},
}
# The rope types in which a null "factor" means the extended length divided by the trained length
HAS_DEFAULT_FACTOR = ("yarn", "yarn-exact", "longrope")
# When weights are loaded, constants and masks that other programs store as tensors are ignored.
HARMLESS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|attn\.(masked_)?bias)")
# The settings that distinguish the families. A setting that config.json does not contain has its default.
ARCHITECTURE = (
    *("rope_interleaved", "qkv_bias", "output_bias", "qk_norm", "qk_norm_all_heads", "attention_scale", "norm"),
    *("norm_position", "parallel", "activation", "embedding_scale", "residual_scale", "logit_scale"),
    *("experts", "experts_per_token", "normalise_top_k", "expert_bias", "sinks"),
)
# Settings whose effect `ModelConfig.layer` describes.
OF_LAYERS = {
    *("window", "layer_types", "rope_theta", "local_rope_theta", "rotary_fraction"),
    *("rope_factor", "rope_trained_len", "rope_scaling"),
}
OTHER_MODELS = "choose another model, or train it in your own loop: docs/how-to/your-own-loop.md lists the exact models"


def is_model(path: Path) -> bool:
    """Return True for a folder in Hugging Face's format, and False for a checkpoint of this package."""
    return (path / "config.json").is_file()


def hugging_face_name(name: str, family: Family) -> str:
    """Return Hugging Face's name of a parameter of `ringattn.train.model.gpt.GPT`.

    `expert_weights.py` explains names with {} and with a colon.
    """
    match = re.fullmatch(r"(blocks\.\d+\.)?((?:experts\.)?\w+)\.?(\w*)", name)
    assert match is not None
    block, module, kind = match.groups(default="")
    found = block.replace("blocks", "model.layers") + weight_name(module, family)
    # Our norms, embedding and head are parameters, not modules, so their names have no ".weight".
    return found if ":" in found else f"{found}.{kind or 'weight'}"


def family_of(path: Path) -> Family:
    return FAMILIES[json.loads((path / "config.json").read_text())["model_type"]]


def read_settings(path: Path) -> dict[str, Any]:
    """Read config.json, and return the values of the fields of ModelConfig.

    Without a `rope_factor`, the result lacks `rope_trained_len` and `rope_scaling`. If the weights contradict
    `tie_word_embeddings`, the weights take precedence.

    Raises:
        ConfigError: a file cannot be read, or describes a model that is not supported.
    """
    settings, files = declared_settings(path), _open_tensors(path)
    if (adapter := path / "adapter_config.json").exists():
        raise ConfigError(f"{adapter} belongs to an adapter, which is not supported: merge it into the weights, or remove it")
    if unused := _unused_tensors(files, settings, family_of(path)):
        others = f" and {len(unused) - 1} other tensors" * (len(unused) > 1)
        raise ConfigError(f"{path} contains {unused[0]:.120}{others}, which its config.json does not describe: {OTHER_MODELS}")
    return settings | {"tie_embeddings": _has_tied_embeddings(files, settings["tie_embeddings"])}


def declared_settings(path: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the settings that config.json declares, without reading the weights. The dict `changes` replaces entries of
    config.json.
    """
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}/config.json cannot be read: {error}; download it again") from error
    try:
        return settings_from_config(config | (changes or {}))
    except ConfigError as error:
        reason = f"{error}"
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        reason = f"an entry has a value that is not possible ({error})"
    raise ConfigError(f"{path}/config.json does not describe a supported model: {reason}; {OTHER_MODELS}")


def model_config(path: Path) -> ModelConfig:
    """Return `read_settings` as a ModelConfig. The errors are the same."""
    return _model_of(read_settings(path))


def _model_of(settings: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**{name.removeprefix("resolved_"): value for name, value in settings.items()})


def settings_from_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a model with the given config.json.

    Raises:
        ConfigError: an entry has a wrong type, or the model is not supported.
        LookupError, ValueError, TypeError, AttributeError, ArithmeticError: an entry has a value that is not possible.
    """
    if (model_type := config.get("model_type")) not in FAMILIES:
        raise ConfigError(f"model_type is {model_type}, but only {' or '.join(FAMILIES)} is supported")
    if unknown := unknown_entries(config):
        raise ConfigError(f"it contains the unknown entries {', '.join(unknown)}, which may change the results of the model")
    family = FAMILIES[model_type]
    older, newer = config.get("rope_scaling"), config.get("rope_parameters")
    if older and newer and older != newer and family.local_rope_theta is None:
        raise ConfigError("rope_scaling and rope_parameters differ: remove one of them")
    config = {**family.defaults, **renamed(config, family)}
    if text := [name for name, value in config.items() if isinstance(value, str) and value.lower() in ("true", "false")]:
        raise ConfigError(f"{text[0]} is text, but true or false without quotes is required")
    rope, local_theta = _rope_entries(config, family)
    if family.local_rope_theta is not None:
        config.pop("original_max_position_embeddings", None)  # transformers ignores this entry
    kind = _rope_type(rope)
    _check_supported(config, rope, kind, family)
    dim, heads = _number("hidden_size", config), _number("num_attention_heads", config)
    layers, most = _number("num_hidden_layers", config), RANGES["model.layers"][1]
    if not 1 <= layers <= most:
        raise ConfigError(f"num_hidden_layers is {layers}, but only 1 to {most} is supported")
    types = family.layers(config)
    is_sliding = any(kind.startswith("sliding") for kind in types)
    settings: dict[str, Any] = {
        "vocab_size": _number("vocab_size", config),
        "layers": layers,
        "dim": dim,
        "heads": heads,
        "kv_heads": _number("num_key_value_heads", config, default=heads),
        "resolved_head_dim": _number("head_dim", config, default=dim // heads),
        "resolved_ffn_dim": _number("intermediate_size", config),
        "rope_theta": _number("rope_theta", rope, config, kind=float, default=10_000.0),
        "local_rope_theta": local_theta if is_sliding else None,
        "rotary_fraction": _number("partial_rotary_factor", rope, config, kind=float, default=family.rotary_fraction or 1.0),
        "rope_factor": None,
        "rope_factors": None,
        "norm_eps": _number(family.norm_eps, config, kind=float, default=1e-6),
        "tie_embeddings": bool(config.get("tie_word_embeddings")),
        "window": _number("sliding_window", config) if is_sliding else None,
        "layer_types": None if {*types} == {"full"} or ({*types} == {"sliding"} and local_theta is None) else _period(types),
    }
    settings |= {name: getattr(ModelConfig, name) for name in ARCHITECTURE} | family.settings
    for name, entry in family.entries.items():
        is_bool = isinstance(entry.default, bool)
        value = bool(config.get(name, entry.default)) if is_bool else _number(name, config, kind=float, default=entry.default)
        settings[entry.setting] = entry.decode(value)
    if settings["attention_scale"] == settings["resolved_head_dim"] ** -0.5:
        settings["attention_scale"] = None
    return settings | _rope_scaling(config, rope, kind)


def describes(config: dict[str, Any], model: ModelConfig) -> bool:
    """Return whether config.json and `model` have equal settings, except for rounding."""
    try:
        settings = settings_from_config(config)
    except ConfigError:
        return False
    other = _model_of(settings)

    def is_equal(value: Any, other: Any) -> bool:
        return math.isclose(value, other) if isinstance(value, float) and isinstance(other, float) else value == other

    return all(model.layer(i) == other.layer(i) for i in range(model.layers)) and all(
        is_equal(value, getattr(model, name)) for name, value in settings.items() if name not in OF_LAYERS
    )


def _number(name: str, *sources: dict[str, Any], kind: type = int, default: Any = None) -> Any:
    """Return the value of `name` in the first source with this entry. Raise ConfigError if the value has an invalid type."""
    value = next((entries[name] for entries in sources if entries.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise ConfigError(f"{name} is {value!r:.60}, but {'an integer' if kind is int else 'a number'} is required")
    return kind(value)


def _unused_tensors(files: Collection[str], settings: dict[str, Any], family: Family) -> list[str]:
    model = ModelConfig(layers=1, tie_embeddings=False, **{name: settings[name] for name in ARCHITECTURE})
    with torch.device("meta"):
        named = {hugging_face_name(name, family): parameter for name, parameter in GPT(model, 1).named_parameters()}
    weights = {each for name, parameter in named.items() for each in expert_weights.tensor_names(name, len(parameter), files)}

    def is_used(name: str) -> bool:
        block = re.fullmatch(r"model\.layers\.([0-9]{1,9})\.(.+)", name)
        if block is None:
            return name in weights
        return f"model.layers.0.{block[2]}" in weights and int(block[1]) < settings["layers"]

    return sorted(name for name in files if not is_used(name) and not HARMLESS.fullmatch(name))


def _rope_trained_len(config: dict[str, Any], rope: dict[str, Any]) -> int:
    return _number("original_max_position_embeddings", config, rope, default=config.get("max_position_embeddings"))


def _rope_factor(config: dict[str, Any], rope: dict[str, Any]) -> float:
    if rope.get("factor") is not None:
        return _number("factor", rope, kind=float)
    return _number("max_position_embeddings", config) / _rope_trained_len(config, rope)


def _has_tied_embeddings(files: dict[str, Any], declared: bool) -> bool:
    """Return whether the embedding is also the output head.

    `declared` is `tie_word_embeddings`. As in transformers, a head in the weights that differs from the embedding takes
    precedence.
    """
    names = [f"{NAMES[name]}.weight" for name in ("embedding", "head")]
    embedding, head = map(files.get, names)
    if head is None:
        return declared or embedding is not None
    if not declared or embedding is None:
        return declared
    embedding, head = (files[name].get_slice(name) for name in names)
    if (shape := embedding.get_shape()) != head.get_shape():
        return False
    # Compare a few rows at a time, because the embedding and the head may have several GB. The dtypes may differ.
    parts = (slice(i, i + 1024) for i in range(0, shape[0], 1024))
    return all(torch.equal(embedding[part].double(), head[part].double()) for part in parts)


def _check_supported(config: dict[str, Any], rope: dict[str, Any], kind: str, family: Family) -> None:
    # Maps the name of each setting to its value and to the supported values.
    checks: dict[str, tuple[Any, tuple[Any, ...]]] = {"rope_type": (kind, family.rope_types or ("default", *ROPE_FIXED))}
    quantization = config.get("quantization_config")
    is_read = not quantization or quantization.get("quant_method") in family.quantization
    checks["quantization_config"] = None if is_read else "given", (None,)
    for name, value in fixed_entries(family).items():
        checks[name] = value if config.get(name) is None else config[name], (value,)
    checks |= {name: (config.get(name), (None, False)) for name in OFF}
    # In transformers, a softcap of 0 makes all logits 0.
    checks |= {name: (config.get(name), (None,)) for name in OFF if name.endswith("softcapping")}
    for name, value in ROPE_FIXED.get(kind, {}).items():
        # transformers replaces null by the default value only for these two entries.
        is_default = name in ("beta_slow", "beta_fast") and rope.get(name) is None
        checks[name] = value if is_default else rope.get(name, value), (value,)
    if family.rotary_fraction is None:
        checks["partial_rotary_factor"] = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")), (None, 1.0)
    if kind in HAS_DEFAULT_FACTOR:
        factor = _rope_factor(config, rope)
        scale = longrope_scale(factor, _rope_trained_len(config, rope)) if kind == "longrope" else yarn_scale(factor)
        checks["attention_factor"] = rope.get("attention_factor"), (None, scale)
        checks |= {name: (rope.get(name), (None,)) for name in ("mscale", "mscale_all_dim")}
    if any(isinstance(value, dict) for value in rope.values()):
        checks["rope_parameters"] = "different in layers of different types", ("one for all layers",)
    for name, (value, supported) in checks.items():
        if value not in supported:
            raise ConfigError(f"{name} is {value}, but only {' or '.join(map(str, supported))} is supported")


def _rope_entries(config: dict[str, Any], family: Family) -> tuple[dict[str, Any], float | None]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or family.defaults.get("rope_scaling") or {}
    if family.local_rope_theta is None:
        return rope, None
    parameters = config.get("rope_parameters") or {}
    if unknown := parameters.keys() - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"rope_parameters has {', '.join(sorted(unknown))}, but only entries per type of layer are supported")
    full, local = (parameters.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    if (kind := local.get("rope_type") or "default") != "default":
        raise ConfigError(f"rope_type is {kind} in sliding layers, but only default is supported")
    older = {"rope_theta": config.get("rope_local_base_freq")}
    theta = _number("rope_theta", local, older, kind=float, default=family.local_rope_theta)
    full = full | (config.get("rope_scaling") or {})
    is_same = full.get("rope_type", "default") == "default" and _number("rope_theta", full, config, kind=float) == theta
    return full, None if is_same else theta


def _rope_type(rope: dict[str, Any]) -> str:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "yarn" and rope.get("truncate") is False:
        return "yarn-exact"
    return "longrope" if kind == "su" else kind  # an earlier name


def _rope_scaling(config: dict[str, Any], rope: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the settings that extend a model to longer sequences, or {}. `kind` is the result of `_rope_type`."""
    if kind == "default":
        return {}
    factor = _rope_factor(config, rope) if kind in HAS_DEFAULT_FACTOR else _number("factor", rope, kind=float)
    trained_len = None if kind == "linear" else _rope_trained_len(config, rope)
    settings = {"rope_factor": factor, "rope_trained_len": trained_len, "rope_scaling": kind}
    if kind == "longrope":
        factors = [*rope["short_factor"], *rope["long_factor"]]
        settings["rope_factors"] = [_number("factor", {"factor": each}, kind=float) for each in factors]
    return settings


def _period(types: list[str]) -> list[str]:
    return next(types[:n] for n in range(1, len(types) + 1) if all(kind == types[i % n] for i, kind in enumerate(types)))


def compare_settings(path: Path, model: ModelConfig, vocab_size: int) -> str:
    """Compare the run's settings with the model in a folder. Return the differences, or "" if there are none.

    `vocab_size` counts the tokens of the run's tokenizer.

    Raises:
        ConfigError: a setting that changes the shapes of weights differs, or the embedding has too few rows.
    """
    settings = read_settings(path)
    rows = settings.pop("vocab_size")
    if max(rows, model.vocab_size or 0) < vocab_size:
        raise ConfigError(
            f"{path} has {rows} rows of embeddings, but the tokenizer has {vocab_size} tokens, including special tokens: set "
            f"model.vocab_size={vocab_size} to add rows with random weights, or remove the tokens from number {rows} on"
        )
    if rows > padded_vocabulary(model, vocab_size):
        raise ConfigError(f"{path} has {rows} tokens, more than the model of this run: set model.vocab_size={rows}")
    for name in ("rope_trained_len", "rope_scaling"):
        settings.setdefault(name, None)
    if model.rope_factor is None:
        model = replace(model, rope_trained_len=None, rope_scaling=cast("str", None))
    changes = {name: value for name, value in settings.items() if getattr(model, name) != value}
    if fixed := {name: value for name, value in changes.items() if name not in MAY_DIFFER}:
        listed = _list_changes(fixed, model)
        raise ConfigError(f"{path} is a model of {listed}: leave these settings out, because the folder defines them")
    if model.vocab_size not in (None, rows):
        changes["vocab_size"] = rows
    return _list_changes(changes, model)


def warn_of_length(path: Path, model: ModelConfig, seq_len: int) -> str:
    """Return "" if the published model supports `seq_len` tokens. If not, return a warning."""
    settings, config = declared_settings(path), json.loads((path / "config.json").read_text())
    positions = config.get("max_position_embeddings")
    has_other_scaling = model.rope_factor is not None and model.rope_factor != settings["rope_factor"]
    if not isinstance(positions, int) or model.rope_theta != settings["rope_theta"]:
        return ""
    if model.rope_factor is not None and model.rope_trained_len is not None:
        scaled = int(model.rope_factor * model.rope_trained_len)
        positions = scaled if has_other_scaling else max(scaled, positions)
    layers = [model.layer(index) for index in range(model.layers)]
    if max((layer.window or seq_len for layer in layers if layer.rope.dim), default=0) <= positions:
        return ""
    trained = model.rope_trained_len or positions
    return (
        f"sequences of {seq_len:,} tokens are longer than the {positions:,} positions of the model: set model.rope_factor="
        f"{-(-seq_len // trained)} and model.rope_trained_len={trained}, see docs/how-to/extend-a-model.md"
    )


def _list_changes(settings: dict[str, Any], model: ModelConfig) -> str:
    # Users set resolved_head_dim and resolved_ffn_dim with the options head_dim and ffn_dim.
    names = {name: f"model.{name.removeprefix('resolved_')}" for name in settings}
    return ", ".join(f"{names[name]}={value} (now {getattr(model, name)})" for name, value in settings.items())


def load(path: Path, model: nn.Module) -> None:
    """Load the weights in a folder into `model`. Each rank reads only the rows of its own shards.

    If the embedding of `model` has additional padded rows, these rows do not change.

    Args:
        path: the folder of the Hugging Face model.
        model: the model. FSDP may have sharded the parameters along their first dimension.

    Raises:
        ConfigError: a tensor is missing, has another shape or is quantized, or a file cannot be read.
    """
    files, parameters, family = _open_tensors(path), model.state_dict(), family_of(path)
    rows = declared_settings(path)["vocab_size"]
    _warn_of_the_head(path, is_tied="head" not in parameters)
    tensors: dict[str, dict[str, Tensor]] = {}  # the parameters that each tensor of the files contains
    for parameter_name, parameter in parameters.items():
        name = hugging_face_name(parameter_name, family)
        if parameter_name == "embedding" and name not in files and "head" not in parameters:
            name = hugging_face_name("head", family)  # Some models store a tied embedding only as the head.
        tensors.setdefault(name, {})[parameter_name] = parameter
    size, total, copied = bytes_on_disk(path, "*.safetensors"), local_bytes(parameters.values()), 0
    with show_progress(("loading", "loaded"), path, size, lambda: copied / total):
        for name, parts in tensors.items():
            count = len(next(iter(parts.values())))
            for each in expert_weights.tensor_names(name, count, files):
                if each not in files:
                    raise ConfigError(f"{path} has no {each} in its *.safetensors files: the folder must be complete")
            stored = expert_weights.open_tensor(files, name, count)
            if (dtype := stored.get_dtype()) not in ("F64", "F32", "F16", "BF16"):
                raise ConfigError(f"{path}: {name} is {dtype}, so the model is quantized: use the original model")
            shape, expected = tuple(stored.get_shape()), [sum(map(len, parts.values())), *next(iter(parts.values())).shape[1:]]
            if parts.keys() & {"embedding", "head"}:
                expected[0] = min(expected[0], rows)
            if shape != tuple(expected):
                raise ConfigError(f"{path}: {name} has shape {shape}, but {tuple(expected)} in this run")
            start = 0  # the first row of the next part
            for parameter in parts.values():
                own, first = _own_rows(parameter)
                last = min(first + len(own), shape[0] - start)
                if first < last:
                    own[: last - first].copy_(stored[start + first : start + last])
                start += len(parameter)
                copied += own.nbytes


def _warn_of_the_head(path: Path, is_tied: bool) -> None:
    declared = bool(json.loads((path / "config.json").read_text()).get("tie_word_embeddings"))
    if declared == is_tied or (dist.is_initialized() and dist.get_rank() != 0):
        return
    reason = "contain no output head, so the embedding is" if is_tied else "contain another output head, which is"
    log.warning(f"{'weights':<12}{path}: config.json has tie_word_embeddings={declared}, but the weights {reason} used")


def _own_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """Return this rank's rows of a parameter, and the index of the first row.

    FSDP splits the rows like `torch.chunk`, so the last ranks may hold fewer rows, or none.
    """
    if not isinstance(parameter, DTensor):
        return parameter, 0
    return parameter.to_local(), parameter.device_mesh.get_local_rank() * -(-len(parameter) // parameter.device_mesh.size())


def _open_tensors(path: Path) -> dict[str, Any]:
    """Open the safetensors files of a folder. Return the open file of each tensor.

    Raises:
        ConfigError: a file cannot be read, or a tensor that the index lists is missing.
    """
    from safetensors import SafetensorError, safe_open

    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    file, opened = index, list[Any]()
    listed: dict[str, str] = {}
    try:
        if single.is_file():
            names = [single]
        elif index.is_file():
            listed = json.loads(index.read_text())["weight_map"]
            names = {path / name for name in listed.values()}
            for file in names:
                # Do not call `resolve`, because the hub's cache consists of symbolic links.
                if path not in file.parents or ".." in file.relative_to(path).parts:
                    raise ValueError(f"{index.name} lists it, but it is outside of the model's folder")
        else:
            names = path.glob("*.safetensors")
        for file in sorted(names):
            opened.append(safe_open(file, "pt"))
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; download it again") from error
    files: dict[str, Any] = {}
    for tensors in opened:
        for name in tensors.keys():  # noqa: SIM118  # an open file is not a dict
            if files.setdefault(name, tensors) is not tensors:
                raise ConfigError(f"{path}: two safetensors files contain {name}: remove the files of the other model")
    for name in listed:
        if name not in files:
            raise ConfigError(f"{path} has no {name} in its *.safetensors files: the folder of the model must be complete")
    return files
