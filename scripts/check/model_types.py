"""Compare every type of causal model in transformers, on a ring of two ranks, with transformers in one process.

    python -m scripts.check.model_types                 # all types of the installed version, as a Markdown table; minutes
    python -m scripts.check.model_types qwen3 gemma2    # some types

The models are tiny and have random weights in float64. A type is exact if all logits and gradients of two packed documents
equal those of eager attention. For all other types, `put_on_ring` or the first call must raise an error.
"""

import argparse
import copy
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringattn import simulate
from scripts.tables import markdown_table

DOCUMENTS = [14, 9]
VOCAB = 96
LIMIT = 1e-5  # eager attention computes the softmax in fp32; an error in a mask exceeds 1e-3
MAX_PARAMETERS = 20_000_000  # larger models take too long

# Sizes of the tiny models, under all names that configurations use.
SIZES: dict[str, int] = {
    **dict.fromkeys(("vocab_size",), VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embed_dim", "hidden_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "experts_per_token"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "sliding_window": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}


# The settings for which a small model keeps None, because None disables a feature
KEPT_IF_NONE = {"q_lora_rank", "sliding_window", "pad_token_id", "n_group", "topk_group", "hidden_dim", "rotary_dim"}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_SHARED_KEYS = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}
# additional settings that small models of some types need
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 2, "topk_group": 1, "num_experts_per_token": 2},
    "bamba": _MAMBA,
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": _SHARED_KEYS | {"activation_sparsity_pattern": [0.5, 0.0] * 2, "intermediate_size": [64] * 4},
    "gemma4_text": _SHARED_KEYS,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA,
    "kimi_linear": {"num_experts_per_token": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3},
    "zaya": {"num_experts_per_tok": 1},
}
SPECIAL |= {kind.removesuffix("_text"): settings for kind, settings in SPECIAL.items() if kind.startswith("gemma")}


class Outcome(NamedTuple):
    kind: str
    result: str  # "exact", "rejected", "wrong" or "not built"
    detail: str


def causal_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(kind: str) -> Any:
    from transformers import AutoConfig

    default = AutoConfig.for_model(kind)
    text = default.get_text_config()
    sizes: dict[str, Any] = {name: size for name, size in SIZES.items() if name in vars(text)}
    sizes = {name: size for name, size in sizes.items() if vars(text)[name] is not None or name not in KEPT_IF_NONE}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if "is_decoder" in vars(text):
        sizes["is_decoder"] = True
    if vars(text).get("layer_types"):
        kinds = list(dict.fromkeys(text.layer_types))  # one layer of each type
        count = max(2, len(kinds))
        sizes |= {"layer_types": (kinds * 2)[:count], "num_hidden_layers": count}
    config: Any = type(text)(**sizes | SPECIAL.get(kind, {}) | {"use_cache": False})
    for name in vars(config):
        if "dropout" in name or name.endswith(("_pdrop", "_drop")):
            setattr(config, name, 0.0)
    return config


def tiny_model(kind: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    config = tiny_config(kind)
    options = dict(attn_implementation="eager", experts_implementation="eager")
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config, **options).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"the model with small sizes still has {size:,} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, **options).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def check_type(kind: str) -> Outcome:
    try:
        model = tiny_model(kind)
        tokens = torch.randint(2, VOCAB, (1, sum(DOCUMENTS)), generator=torch.Generator().manual_seed(0))
        expected = _in_one_process(model, tokens)
    except Exception as error:
        return Outcome(kind, "not built", _first_line(error))
    try:
        found = _on_ring(model, tokens)
    except ValueError as error:
        return Outcome(kind, "rejected", _first_line(error))
    except Exception as error:
        return Outcome(kind, "failed", f"{type(error).__name__}: {_first_line(error)}")
    worst = largest_error(found[:1], expected[:1]), largest_error(found[1:], expected[1:])
    return Outcome(kind, "exact" if max(worst) < LIMIT else "wrong", "{:.1e} and {:.1e}".format(*worst))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest error of any tensor, relative to the tensor's largest element. The scale of a tensor is at least 1e-3
    of the largest element of all tensors.
    """
    sizes = [y.abs().max().item() for y in expected]
    errors = [(x - y).abs().max().item() for x, y in zip(found, expected, strict=True)]
    relative = [error / max(size, 1e-3 * max(sizes)) for error, size in zip(errors, sizes, strict=True)]
    return max(relative) if torch.tensor(relative).isfinite().all() else float("inf")


def _weights(logits: Tensor) -> Tensor:
    return torch.rand(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)


def _in_one_process(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    model = copy.deepcopy(model)
    logits = torch.cat([model(input_ids=document, use_cache=False).logits for document in tokens.split(DOCUMENTS, 1)], 1)
    return [logits.detach(), *_gradients(model, (logits * _weights(logits)).sum())]


def _gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]


def _on_ring(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    from ringattn.transformers import put_on_ring
    from ringattn.transformers.batch import shard_for

    put_on_ring(model, None)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS])[None]
    batch = {"input_ids": tokens, "position_ids": positions}

    def run(rank: int, group: Any) -> tuple[Any, list[Tensor]]:
        arguments = shard_for(batch, group, rank, 2)
        layout = arguments["ring_batch"].layout
        logits = model(**arguments).logits
        weights = layout.shard(_weights(logits.new_empty(1, layout.seq_len, logits.shape[-1])), rank)
        return (layout, logits.detach()), _gradients(model, (logits * weights).sum())

    (first, second), (gradients, others) = zip(*simulate(2, run), strict=True)
    logits = first[0].unshard([first[1], second[1]])
    return [logits, *(x + y for x, y in zip(gradients, others, strict=True))]


def check_types(kinds: list[str]) -> Iterator[Outcome]:
    level, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield from map(check_type, kinds)
    finally:
        logging.disable(level)
        torch.set_num_threads(threads)


def main() -> None:
    from transformers import CONFIG_MAPPING

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="types of models; without any, all causal types of transformers")
    args = parser.parse_args()
    if unknown := sorted(set(args.types) - set(CONFIG_MAPPING)):
        parser.error(f"transformers has no type {', '.join(unknown)}: leave it out")
    outcomes = []
    for outcome in check_types(args.types or causal_types()):
        print(*outcome, file=sys.stderr)
        outcomes.append(outcome)
    print(markdown_table("type | result | largest relative error, or reason", outcomes))
    if any(outcome.result in ("wrong", "failed") for outcome in outcomes):
        sys.exit(1)


if __name__ == "__main__":
    main()
