"""Check that a Hugging Face model is exact on a ring, and replace its attention."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ringattn.transformers.attention import attend  # noqa: F401  # registers attn_implementation="ring"
from ringattn.transformers.batch import ring_of

# The supported layers attend to all earlier tokens, or to the tokens of a window.
SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


def put_on_ring(model: nn.Module, mesh: DeviceMesh | None) -> None:
    """Let a model attend to the tokens of all ranks. Afterwards, call `model(**shard_batch(batch, mesh))`.

    The parameters stay as they are. DDP, FSDP2 or accelerate can replicate or shard the parameters over all ranks of the ring.

    Args:
        model: a causal language model of Hugging Face, or a PEFT model of one.
        mesh: the one-dimensional mesh of the ranks that share a sequence; None for one process.

    Raises:
        ValueError: a layer combines tokens without attention, or the loss is not the usual cross-entropy. Unsupported keywords
            and masks of attention raise an error in the first call.
    """
    ring_of(mesh)
    outer: Any = model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("the PEFT adapter adds tokens in front of the sequence, which would be on all ranks: use LoRA")
    base: Any = outer.get_base_model() if hasattr(outer, "get_base_model") else outer
    if not isinstance(base, PreTrainedModel):
        raise ValueError(f"model is a {type(base).__name__}: it must be a causal language model of transformers")
    check_layers(base)
    check_loss(base)
    base.set_attn_implementation("ring")  # only warns if it is not possible
    if not base._can_set_attn_implementation() or base.config.get_text_config()._attn_implementation != "ring":
        raise ValueError(f"{type(base).__name__} does not use the AttentionInterface of transformers, which a ring requires")
    if not hasattr(base, "ring_mesh"):
        base.register_forward_hook(_check_call, with_kwargs=True)
        share_last_position(base)
    for module in base.modules():
        vars(module)["is_on_ring"] = True  # which `attend` requires
    vars(base)["ring_mesh"] = mesh
    vars(base)["counts_tokens"] = any(map(_counts_tokens, base.modules()))


def _check_call(model: nn.Module, _: object, arguments: dict[str, Any], results: object) -> None:
    batch = arguments.get("ring_batch")
    kept: Any = arguments.get("logits_to_keep", 0)
    if batch is not None and batch.layout.ranks > 1 and (isinstance(kept, Tensor) or kept):
        raise ValueError("logits_to_keep would select tokens of every shard: leave it out, and select after Layout.unshard")
    if batch is not None and batch.counts_padding and vars(model)["counts_tokens"]:
        raise ValueError(f"{type(model).__name__} does not count padding in positions: add position_ids to padded batches")
    if batch is not None and not batch.is_used:
        raise ValueError(f"{type(model).__name__} has not called attention, so its layers would not see tokens of other ranks")


def _counts_tokens(module: nn.Module) -> bool:
    """Return whether an embedding computes missing positions from the attention mask."""
    return isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters


def share_last_position(model: PreTrainedModel) -> None:
    """Append the last position of the whole batch to `position_ids`.

    The largest of the `position_ids` may determine the rotary frequencies, and must therefore be equal on all ranks.
    """
    last: list[Tensor] = []

    def read(_: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        batch = keywords.get("ring_batch")
        last[:] = [] if batch is None else [batch.last_position]

    def append(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
        x, *given = arguments
        keywords = keywords | dict(zip(("position_ids", "layer_type"), given, strict=False))
        positions = keywords["position_ids"]
        keywords["position_ids"] = torch.cat([positions, *(each.expand(len(positions), 1) for each in last)], 1)
        return (x,), keywords

    def remove(_: nn.Module, arguments: Any, results: Any) -> Any:
        def without_last(x: Tensor) -> Tensor:
            return x[:, : x.shape[1] - len(last)]

        return tree_map(without_last, results)

    modules = [module for module in model.modules() if _depends_on_last_position(module)]
    for module in modules:
        module.register_forward_pre_hook(append, with_kwargs=True)
        module.register_forward_hook(remove)
    if modules:
        model.register_forward_pre_hook(read, with_kwargs=True)


def _depends_on_last_position(module: nn.Module) -> bool:
    kinds: Any = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    return any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in kinds)


def check_layers(model: PreTrainedModel) -> None:
    """Raise ValueError if a layer mixes tokens by an operation that a ring does not support."""
    unsupported = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - SUPPORTED_LAYERS
    for module in model.modules():
        # Layers with a recurrent state, such as Mamba and gated delta nets, begin with a convolution over the tokens. Models
        # like RoBERTa compute the position of a token from all earlier tokens.
        if isinstance(module, nn.Conv1d) or hasattr(module, "create_position_ids_from_input_ids"):
            unsupported.add(type(module).__name__)
    if unsupported:
        raise ValueError(
            f"{type(model).__name__} has layers of the type {', '.join(sorted(unsupported))}, which a ring does not support"
        )


def check_loss(model: PreTrainedModel) -> None:
    """Raise ValueError unless `ForCausalLMLoss` is the model's only loss and accepts shifted labels."""
    name = type(model).__name__
    forward = inspect.unwrap(type(model).forward)
    passes_labels = "loss_function" in forward.__code__.co_names and forward.__code__.co_flags & inspect.CO_VARKEYWORDS
    if model.loss_function is not ForCausalLMLoss or not passes_labels:
        raise ValueError(f"{name} does not use the causal loss of transformers, which a ring requires")
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            f"{name} adds a loss that balances experts over the tokens of one rank: set output_router_logits=False in its "
            "config, or router_aux_loss_coef=0.0 in the SFTConfig of TRL"
        )
