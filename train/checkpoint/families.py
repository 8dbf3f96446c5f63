"""List the supported families of Hugging Face models.

A family maps its config.json to our settings, and its weights to our names.

Every supported family is a variation of Llama. To support another family that our model can express, add an entry to FAMILIES.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringattn.train.settings.config import ConfigError


class Entry(NamedTuple):
    """Maps an entry of config.json to a setting. The value has the type of `default`."""

    setting: str
    default: Any
    decode: Callable[[Any], Any] = lambda value: value  # returns the setting for a value of the entry
    encode: Callable[[Any], Any] = lambda value: value  # returns the value of the entry for a setting


@dataclass(frozen=True)
class Family:
    """Describes how a family of models differs from Llama."""

    architecture: str  # the class of the model in transformers
    defaults: dict[str, Any] = field(default_factory=dict)  # the defaults of entries of config.json in transformers
    settings: dict[str, Any] = field(default_factory=dict)  # settings that all models of the family have
    entries: dict[str, Entry] = field(default_factory=dict)  # further entries that determine settings
    fixed: dict[str, Any] = field(default_factory=dict)  # entries for which our model supports only this value
    names: dict[str, str] = field(default_factory=dict)  # the names of weights
    norm_eps: str = "rms_norm_eps"  # the entry of `norm_eps`
    # Returns the type of each layer, as in `model.layer_types`.
    layers: Callable[[dict[str, Any]], list[str]] = lambda config: ["full"] * config["num_hidden_layers"]
    lists_layers: bool = False  # whether an export contains `layer_types`
    local_rope_theta: float | None = None  # the default base in sliding layers, if the family can have a separate one
    rotary_fraction: float | None = None  # the default fraction of rotated dimensions, if the family can have another one
    rope_types: tuple[str, ...] = ()  # the supported scalings of rotary angles, or () for all
    aliases: dict[str, str] = field(default_factory=dict)  # other names of entries, with the names that we use
    quantization: tuple[str, ...] = ()  # the supported formats of quantized weights
    reads: frozenset[str] = frozenset()  # further entries that `layers` and `huggingface.settings_from_config` read


def listed(config: dict[str, Any], default: Callable[[int], str]) -> list[str]:
    """Return the type of each layer. If config.json lacks `layer_types`, call `default` with each layer's number, from 1."""
    types = config.get("layer_types")
    count = config["num_hidden_layers"]
    if types is None:
        return [default(layer) for layer in range(1, count + 1)]
    if len(types) != count or not {*types} <= {"full_attention", "sliding_attention"}:
        shown = " and ".join(sorted({*map(str, types)}))
        raise ConfigError(
            f"layer_types must contain full_attention or sliding_attention for each of {count} layers, but contains "
            f"{len(types)} values: {shown}"
        )
    return [kind.removesuffix("_attention") for kind in types]


def mistral_layers(config: dict[str, Any]) -> list[str]:
    return listed(config, lambda _: "full" if config["sliding_window"] is None else "sliding")


def uniform_layers(config: dict[str, Any]) -> list[str]:
    """Return equal types for all layers, because transformers ignores `layer_types` in some families."""
    window = config["sliding_window"]
    types = mistral_layers(config)
    if {*types} != {"full" if window is None else "sliding"}:
        raise ConfigError(f"layer_types contradicts sliding_window={window}, which applies to all layers of this family")
    return types


def qwen_layers(config: dict[str, Any]) -> list[str]:
    if not config.get("use_sliding_window"):
        return ["full"] * config["num_hidden_layers"]
    first = config["max_window_layers"] if config["sliding_window"] is not None else config["num_hidden_layers"]
    return listed(config, lambda layer: "sliding" if layer > first else "full")


def alternating_layers(config: dict[str, Any]) -> list[str]:
    """A layer has full attention if its number is a multiple of `sliding_window_pattern`."""
    pattern = config["sliding_window_pattern"]
    return listed(config, lambda layer: "sliding" if layer % pattern else "full")


def nope_in_full_layers(config: dict[str, Any]) -> list[str]:
    return ["full-nope" if kind == "full" else kind for kind in alternating_layers(config)]


def exaone_layers(config: dict[str, Any]) -> list[str]:
    """A model without a window has rotary embeddings in all layers."""
    return alternating_layers(config) if config["sliding_window"] is None else nope_in_full_layers(config)


def smollm_layers(config: dict[str, Any]) -> list[str]:
    interval, count = config["no_rope_layer_interval"], config["num_hidden_layers"]
    has_rope = config.get("no_rope_layers") or [layer % interval != 0 for layer in range(1, count + 1)]
    has_window = config.get("use_sliding_window") and config.get("sliding_window") is not None
    kinds = listed(config, lambda layer: "sliding" if has_window and not has_rope[layer - 1] else "full")
    if "sliding" in kinds and not config.get("use_sliding_window"):
        # Unless use_sliding_window is true, the window in transformers depends on the attention function.
        raise ConfigError("layer_types contains sliding_attention, but use_sliding_window is not true")
    return [kind if rope else f"{kind}-nope" for kind, rope in zip(kinds, has_rope, strict=False)]


def qwen_moe_layers(config: dict[str, Any]) -> list[str]:
    has_window = config.get("use_sliding_window") and config["sliding_window"] is not None
    return ["sliding" if has_window else "full"] * config["num_hidden_layers"]


def gpt_oss_layers(config: dict[str, Any]) -> list[str]:
    return listed(config, lambda layer: "sliding" if layer % 2 else "full")


def whole(x: float) -> int:
    if x != int(x):
        raise ValueError(f"{x} is not an integer")
    return int(x)


def inverse(x: float) -> float:
    return 1 / x


def inverse_root(x: float) -> float:
    return 1 / math.sqrt(x)


def square(x: float) -> int:
    return round(x**2)


def inverse_square(x: float) -> int:
    return round(x**-2)


AFTER = {
    "attention_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}
# Entries of config.json that `model.balance_loss` replaces
ROUTER_LOSS = frozenset({"router_aux_loss_coef", "output_router_logits"})
# If each type of layer has its own rope_parameters, transformers ignores "truncate", so yarn-exact is impossible.
NESTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
PATTERN = frozenset({"sliding_window_pattern"})
QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

# Maps the `model_type` in config.json to the family. An export uses the first family that supports the model's settings.
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}, layers=mistral_layers),
    "ministral": Family(
        "MinistralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": 4096},
        layers=mistral_layers,
        lists_layers=True,
    ),
    "qwen2": Family("Qwen2ForCausalLM", QWEN, {"qkv_bias": True}, layers=qwen_layers, lists_layers=True),
    "qwen3": Family("Qwen3ForCausalLM", QWEN | {"head_dim": 128}, {"qk_norm": True}, layers=qwen_layers, lists_layers=True),
    "olmo3": Family(
        "Olmo3ForCausalLM",
        {"sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5},
        {"norm_position": "after", "qk_norm": True, "qk_norm_all_heads": True},
        names=AFTER,
        layers=alternating_layers,
        lists_layers=True,
        local_rope_theta=500_000.0,
        rope_types=NESTED_ROPE_TYPES,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {
            **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
            **{"sliding_window_pattern": 6, "rope_theta": 1e6, "tie_word_embeddings": True},
        },
        {"norm": "rms_plus_one", "norm_position": "both", "qk_norm": True, "activation": "gelu"},
        {
            "hidden_size": Entry("embedding_scale", 2304.0, math.sqrt, square),
            "query_pre_attn_scalar": Entry("attention_scale", 256.0, inverse_root, inverse_square),
        },
        {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"},
        {**AFTER, "ffn_norm": "pre_feedforward_layernorm"},
        layers=alternating_layers,
        lists_layers=True,
        local_rope_theta=10_000.0,
        rope_types=NESTED_ROPE_TYPES,
        reads=PATTERN | {"rope_local_base_freq", "_sliding_window_pattern"},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, "no_rope_layer_interval": 4},
        layers=smollm_layers,
        lists_layers=True,
        reads=frozenset({"no_rope_layers", "no_rope_layer_interval"}),
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        {"sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True, "layer_norm_eps": 1e-5},
        {"norm": "layer", "parallel": True, "rope_interleaved": True},
        {"logit_scale": Entry("logit_scale", 0.0625)},
        {
            **{"use_parallel_block": True, "use_gated_activation": True, "position_embedding_type": "rope_gptj"},
            **{"rotary_pct": 1.0, "order_of_interleaved_layers": "local_attn_first"},
        },
        norm_eps="layer_norm_eps",
        layers=nope_in_full_layers,
        lists_layers=True,
        reads=PATTERN | {"layer_switch", "use_embedding_sharing", "use_parallel_embedding"},
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        {"sliding_window": None, "rms_norm_eps": 1e-5},
        fixed={"lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
        names={
            **dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj"),
            **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
        },
        layers=uniform_layers,
        rotary_fraction=1.0,
        rope_types=("default", "longrope"),
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7},
        {"norm_position": "both", "rope_interleaved": True},
        {"attention_bias": Entry("qkv_bias", True)},
        names={
            **{"attention_post_norm": "post_self_attn_layernorm", "ffn_post_norm": "post_mlp_layernorm"},
            **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
        },
        rotary_fraction=0.5,
    ),
    "exaone4": Family(
        "Exaone4ForCausalLM",
        {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5},
        {"norm_position": "after", "qk_norm": True},
        names=AFTER,
        layers=exaone_layers,
        lists_layers=True,
        reads=PATTERN,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        {"num_key_value_heads": 8, "sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        entries={
            "num_local_experts": Entry("experts", 8, whole),
            "num_experts_per_tok": Entry("experts_per_token", 2, whole),
        },
        fixed={"router_jitter_noise": 0.0},
        names={
            "experts.router": "block_sparse_moe.gate",
            "experts.gate": "block_sparse_moe.experts.{}.w1",
            "experts.up": "block_sparse_moe.experts.{}.w3",
            "experts.down": "block_sparse_moe.experts.{}.w2",
        },
        layers=uniform_layers,
        reads=ROUTER_LOSS,
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 4, "sliding_window": 4096},
        {"qk_norm": True},
        {
            "num_experts": Entry("experts", 128, whole),
            "num_experts_per_tok": Entry("experts_per_token", 8, whole),
            "moe_intermediate_size": Entry("resolved_ffn_dim", 768, whole),
            "norm_topk_prob": Entry("normalise_top_k", False),
        },
        {"decoder_sparse_step": 1, "mlp_only_layers": []},
        {
            "experts.router": "mlp.gate",
            "experts.gate": "mlp.experts.{}.gate_proj",
            "experts.up": "mlp.experts.{}.up_proj",
            "experts.down": "mlp.experts.{}.down_proj",
        },
        layers=qwen_moe_layers,
        aliases={"num_local_experts": "num_experts"},
        reads=ROUTER_LOSS,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
            **{"rms_norm_eps": 1e-5, "rope_theta": 150_000.0},
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
                "original_max_position_embeddings": 4096,
            },
        },
        {"qkv_bias": True, "output_bias": True, "sinks": True, "expert_bias": True, "activation": "clamped"},
        {
            "num_local_experts": Entry("experts", 128, whole),
            "num_experts_per_tok": Entry("experts_per_token", 4, whole),
        },
        {"attention_bias": True, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        {
            "sinks": "self_attn.sinks:",
            "experts.router": "mlp.router",
            **{f"experts.{name}": f"mlp.experts.gate_up_proj:{part}" for part, name in enumerate(("gate", "up"))},
            **{f"experts.{name}_bias": f"mlp.experts.gate_up_proj_bias:{part}" for part, name in enumerate(("gate", "up"))},
            "experts.down": "mlp.experts.down_proj:",
            "experts.down_bias": "mlp.experts.down_proj_bias:",
        },
        layers=gpt_oss_layers,
        lists_layers=True,
        quantization=("mxfp4",),
        reads=ROUTER_LOSS | {"initial_context_length", "experts_per_token"},
    ),
    "granite": Family(
        "GraniteForCausalLM",
        entries={
            "attention_multiplier": Entry("attention_scale", 1.0),
            "embedding_multiplier": Entry("embedding_scale", 1.0),
            "residual_multiplier": Entry("residual_scale", 1.0),
            "logits_scaling": Entry("logit_scale", 1.0, inverse, inverse),
        },
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        {"num_key_value_heads": 8, "head_dim": 128},
        entries={"attention_bias": Entry("qkv_bias", True), "attention_out_bias": Entry("output_bias", False)},
    ),
}
# Maps our modules and weights to Hugging Face's names. The names of layers lack the prefix "blocks.N".
NAMES = {
    "embedding": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
    "output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
# The required values of some entries of config.json. `Family.fixed` may override them.
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# Entries of config.json that switch on unsupported features
OFF = (
    *("rope_interleaved", "use_mrope", "final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"),
    *("use_qk_norm",),
)
# The entries that `huggingface.settings_from_config` reads.
READ = {
    *("model_type", "vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "intermediate_size", "rope_theta", "rope_parameters", "rope_scaling", "tie_word_embeddings"),
    *("max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor", "quantization_config"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
}
# Entries of config.json that do not change the logits of a model
IRRELEVANT = {
    *("architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "initializer_range", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
    *("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop", "hidden_dropout", "use_cache"),
    *("_name_or_path", "name_or_path", "model_name", "_commit_hash", "unsloth_fixed", "unsloth_version", "license"),
    *("is_llama_config", "transformers.js_config", "max_sequence_length", "model_max_length"),
    *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "cache_implementation", "use_flash_attn"),
    # transformers writes these entries into every config.json, in some of its versions.
    *("return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "output_scores", "torchscript", "prefix"),
    *("use_bfloat16", "tf_legacy_loss", "pruned_heads", "is_encoder_decoder", "is_decoder", "add_cross_attention"),
    *("cross_attention_hidden_size", "tie_encoder_decoder", "max_length", "min_length", "do_sample", "early_stopping"),
    *("num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "bad_words_ids"),
    *("repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "problem_type"),
    *("num_return_sequences", "chunk_size_feed_forward", "return_dict_in_generate", "forced_bos_token_id", "id2label"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "label2id"),
    *("begin_suppress_tokens", "finetuning_task", "tokenizer_class", "task_specific_params"),
}


def unknown_entries(config: dict[str, Any]) -> list[str]:
    """Return the sorted names of config.json's entries with an unknown meaning. Entries that are null are ignored."""
    family = FAMILIES[config["model_type"]]
    of_family = family.reads.union(family.aliases, family.fixed, family.entries, {family.norm_eps})
    known = of_family.union(READ, IRRELEVANT, OFF, FIXED)
    return sorted(name for name, value in config.items() if value is not None and name not in known)


def renamed(config: dict[str, Any], family: Family) -> dict[str, Any]:
    for other, name in family.aliases.items():
        if config.get(other) is not None:
            if config.get(name, config[other]) != config[other]:
                raise ConfigError(f"{name} is {config[name]}, but {other} is {config[other]}")
            config = config | {name: config[other]}
    return config


def fixed_entries(family: Family) -> dict[str, Any]:
    """Return the entries of config.json for which our model supports only one value, with the supported value."""
    return {name: value for name, value in {**FIXED, **family.fixed}.items() if name not in family.entries}


def weight_name(name: str, family: Family) -> str:
    """Translate a name of a module or a weight into Hugging Face's name. `name` does not begin with "blocks.N"."""
    return family.names.get(name, NAMES.get(name, name))
