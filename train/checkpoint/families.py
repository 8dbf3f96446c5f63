"""The families of models in Hugging Face's format: how entries of config.json and names of weights relate to ours.

Every family is a variation of Llama. To add a family whose parts our model has, add an entry to FAMILIES.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Entry(NamedTuple):
    """An entry of config.json that determines a setting of our model.

    The type of the default is the type of the entry.
    """

    setting: str
    default: Any
    decode: Callable[[Any], Any] = lambda value: value  # returns the setting for a value of the entry
    encode: Callable[[Any], Any] = lambda value: value  # returns the value of the entry for a setting


@dataclass(frozen=True)
class Family:
    """A family of models, by its differences from Llama."""

    architecture: str  # the class of the model in transformers
    defaults: dict[str, Any] = field(default_factory=dict)  # the defaults of entries of config.json in transformers
    settings: dict[str, Any] = field(default_factory=dict)  # settings that all models of the family have
    entries: dict[str, Entry] = field(default_factory=dict)  # further entries that determine settings
    fixed: dict[str, Any] = field(default_factory=dict)  # entries of which our model supports only this value
    names: dict[str, str] = field(default_factory=dict)  # the names of weights
    norm_eps: str = "rms_norm_eps"  # the entry of `norm_eps`


def inverse(x: float) -> float:
    return 1 / x


QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

# Maps the `model_type` in config.json to the family. An export uses the first one that can have the settings of the model.
FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", QWEN, {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", QWEN | {"head_dim": 128}, {"qk_norm": True}),
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
# Maps our names of modules and weights, without the prefix of a block, to the names in Hugging Face's format.
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
# config.json may also contain these entries. Unless a family has other values, our model supports only these.
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
# Parts of other models, which these entries of config.json must not enable.
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
# Entries that do not change the logits of a model.
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
    """Return the sorted names of the entries of a config.json whose meaning is not known. Entries of null have no effect."""
    family = FAMILIES[config["model_type"]]
    known = READ | IRRELEVANT | {*OFF} | FIXED.keys() | family.fixed.keys() | family.entries.keys() | {family.norm_eps}
    return sorted(name for name, value in config.items() if value is not None and name not in known)


def fixed_entries(family: Family) -> dict[str, Any]:
    """Return the entries of config.json of which our model supports only one value, with this value."""
    return {name: value for name, value in {**FIXED, **family.fixed}.items() if name not in family.entries}


def weight_name(name: str, family: Family) -> str:
    """Return the name of one of our modules, without the prefix of a block, in Hugging Face's format.

    If several modules have the same name, the file contains their weights one after another in one tensor.
    """
    return family.names.get(name, NAMES.get(name, name))
