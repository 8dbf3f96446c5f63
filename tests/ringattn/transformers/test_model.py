"""Which models can be put on a ring, and which are rejected by name."""

import pickle

import pytest
import torch

from ringattn import Layout
from ringattn.transformers import put_on_ring, shard_batch, token_logprobs
from ringattn.transformers.batch import shard_for
from tests.ringattn.transformers.small_models import new_model, random_tokens

transformers = pytest.importorskip("transformers")

REJECTED_AT_ONCE = {
    "llama4_text": (dict(num_hidden_layers=4, intermediate_size_mlp=64, num_local_experts=1), "chunked_attention"),
    "qwen3_next": (dict(num_hidden_layers=4, num_experts=2, num_experts_per_tok=1), "linear_attention"),
    "mamba": (dict(num_hidden_layers=1), "Conv1d"),
    "mixtral": (dict(output_router_logits=True), "output_router_logits=False"),
}


@pytest.mark.parametrize("kind", REJECTED_AT_ONCE)
def test_a_model_that_would_be_wrong_on_a_ring_is_rejected(kind: str) -> None:
    settings, named = REJECTED_AT_ONCE[kind]
    with pytest.raises(ValueError, match=named):
        put_on_ring(new_model(kind, **settings), None)


def test_softcaps_are_rejected_in_the_first_call() -> None:
    model = new_model("gemma2")
    put_on_ring(model, None)
    with pytest.raises(ValueError, match="passes softcap"):
        model(**shard_batch({"input_ids": random_tokens(1, 8)}, None))


def test_positions_that_do_not_count_padding_are_required() -> None:
    """OPT computes positions from the attention mask, so each rank would count only its own tokens."""
    model, tokens = new_model("opt", ffn_dim=64, word_embed_proj_dim=32, dropout=0.0), random_tokens(1, 8)
    mask = (torch.arange(8) >= 3).long()[None]
    expected = model(tokens, attention_mask=mask).logits
    put_on_ring(model, None)
    batch = {"input_ids": tokens, "attention_mask": mask}
    with pytest.raises(ValueError, match="add position_ids"):
        model(**shard_batch(batch, None))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(**shard_batch(batch | {"position_ids": positions}, None)).logits
    torch.testing.assert_close(found[:, 3:], expected[:, 3:])
    model(**shard_batch({"input_ids": tokens, "attention_mask": mask.flip(1)}, None))


def test_other_losses_are_rejected() -> None:
    config = transformers.Qwen3Config(hidden_size=32, num_hidden_layers=1, intermediate_size=32, vocab_size=64)
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification does not use the causal loss"):
        put_on_ring(transformers.AutoModelForSequenceClassification.from_config(config), None)
    with pytest.raises(ValueError, match="model is a Linear: it must be a causal language model"):
        put_on_ring(torch.nn.Linear(2, 2), None)


def test_prompt_learning_is_rejected() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(new_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="adds tokens in front of the sequence"):
        put_on_ring(model, None)


def test_a_selection_of_logits_is_rejected() -> None:
    """Every rank would select the last tokens of its own shard."""
    from ringattn.transformers.model import _check_call

    model = new_model()
    put_on_ring(model, None)
    batch = shard_for({"input_ids": random_tokens(1, 8)}, None, 0, 1)
    assert model(**batch, logits_to_keep=1).logits.shape[1] == 1
    batch["ring_batch"].layout = Layout.zigzag(16, 2)
    for kept in (1, torch.tensor([3])):
        with pytest.raises(ValueError, match="logits_to_keep would select tokens of every shard"):
            _check_call(model, (), batch | {"logits_to_keep": kept}, None)


def test_a_model_on_a_ring_can_be_pickled() -> None:
    model, batch = new_model(), shard_batch({"input_ids": random_tokens(1, 8)}, None)
    put_on_ring(model, None)
    assert pickle.loads(pickle.dumps(model))(**batch).logits.equal(model(**batch).logits)


def test_a_model_can_be_created_with_attention_on_a_ring() -> None:
    """An unchecked model raises an error."""
    config = new_model().config
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ring")
    arguments = shard_batch({"input_ids": random_tokens(1, 8)}, None)
    with pytest.raises(ValueError, match=r"call put_on_ring\(model, mesh\)"):
        model(**arguments)
    with pytest.raises(ValueError, match="is not on a ring"):
        token_logprobs(model, arguments)
    put_on_ring(model, None)
    found = model(**arguments).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(found, model(arguments["input_ids"]).logits)
    model.set_attn_implementation("ring")
    with pytest.raises(ValueError, match="received no ring_batch"):
        model(arguments["input_ids"])
