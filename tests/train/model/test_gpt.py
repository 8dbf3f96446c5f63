"""The architecture of the GPT: its size, its initial weights, causality, and relative positions."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ringattn import Layout, Mask, ring_attention
from ringattn.train.model.gpt import GPT, Block
from ringattn.train.settings.config import ModelConfig
from tests.train.settings.test_config import composed

VOCAB = 50


def build(**settings) -> GPT:
    config = ModelConfig(**{"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, **settings})
    model = GPT(config, VOCAB)
    generator = torch.Generator().manual_seed(0)
    for module in (*model.blocks, model):
        module.init_weights(generator)
    return model


def attend(q, k, v):
    """PyTorch's causal attention over a whole sequence."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def logits(model: GPT, tokens, positions=None, attend=attend):
    positions = torch.arange(tokens.shape[1]) if positions is None else positions
    return model(tokens, positions, attend, lambda hidden, head: hidden @ head.T)


def random_tokens(length: int, batch: int = 2):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


SIZES = {"tiny": 0.4348e6, "124m": 123.6e6, "350m": 355.1e6, "1.4b": 1.44e9, "8b": 8.03e9}
SIZES |= {"llama-3.1-8b": 8.03e9, "llama-3.2-1b": 1.236e9}
SIZES |= {"qwen2.5-7b": 7.616e9, "qwen3-0.6b": 0.596e9, "qwen3-8b": 8.191e9}


@pytest.mark.parametrize(("name", "parameters"), SIZES.items())
def test_configs_have_the_published_number_of_parameters(name, parameters):
    with torch.device("meta"):
        model = GPT(composed(f"model={name}").model, vocab_size=257)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.001)


def test_logits_do_not_depend_on_later_tokens():
    model, tokens = build(), random_tokens(17)
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % VOCAB
    torch.testing.assert_close(logits(model, tokens)[:, :11], logits(model, changed)[:, :11])
    assert not torch.allclose(logits(model, tokens)[:, 11:], logits(model, changed)[:, 11:])


def test_logits_depend_only_on_distances_between_positions():
    model, tokens = build(), random_tokens(16)
    shifted = torch.arange(16) + 1000
    torch.testing.assert_close(logits(model, tokens), logits(model, tokens, shifted), rtol=1e-3, atol=1e-4)
    stretched = 3 * torch.arange(16)
    assert not torch.allclose(logits(model, tokens), logits(model, tokens, stretched), rtol=1e-3, atol=1e-4)


def test_ring_attention_on_one_rank_gives_the_same_logits():
    model, tokens = build(), random_tokens(33)
    ring = partial(ring_attention, layout=Layout.zigzag(seq_len=33, ranks=1), mask=Mask.causal())
    torch.testing.assert_close(logits(model, tokens, attend=ring), logits(model, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_model_has_no_output_matrix(tied):
    model = build(tie_embeddings=tied)
    names = dict(model.named_parameters())
    assert ("head" in names) is not tied
    assert model.embedding.shape == (64, 32)


def test_initial_weights_have_the_documented_standard_deviations():
    config = ModelConfig(layers=8, dim=256, heads=4, kv_heads=4)
    block = Block(config)
    block.init_weights(torch.Generator().manual_seed(0))
    assert block.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.output.weight, block.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention_norm.eq(1).all()


@pytest.mark.parametrize("experts", [None, 4])
def test_ffn_of_the_first_layer_has_weights_of_one_divided_by_the_root_of_its_inputs(experts):
    dim, ffn_dim = 256, 512
    block = Block(ModelConfig(layers=8, dim=dim, heads=4, kv_heads=4, ffn_dim=ffn_dim, experts=experts), is_first=True)
    block.init_weights(torch.Generator().manual_seed(0))
    weights = {name.removeprefix("experts.").removesuffix(".weight"): p for name, p in block.named_parameters()}
    expected = {"query": 0.02, "output": 0.02 / 4, "gate": dim**-0.5, "up": dim**-0.5, "down": ffn_dim**-0.5}
    for name, std in expected.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.05), name


@pytest.mark.parametrize("settings", [{}, {"experts": 4}, {"parallel": True}, {"tie_embeddings": False}], ids=str)
def test_gradients_of_later_layers_do_not_grow_with_the_reciprocal_of_the_embeddings(settings):
    # With a standard deviation of 0.02 in the first FFN, too, the norm is 5.4 to 5.7, and the residual stream is 0.02.
    model, tokens, streams = build(**settings, layers=24, dim=128), random_tokens(65, batch=4), []
    model.blocks[0].register_forward_hook(lambda _, inputs, outputs: streams.append(outputs[0]))
    F.cross_entropy(logits(model, tokens[:, :-1])[..., :VOCAB].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = [p.grad.norm() for block in model.blocks[1:] for p in block.parameters() if p.grad is not None]
    assert torch.stack(gradients).norm() < 0.5
    assert 0.3 < streams[0].square().mean().sqrt() < 1.5


@pytest.mark.parametrize(
    ("config", "ffn_dim"),
    [
        pytest.param(ModelConfig(dim=128), 384, id="eight thirds of dim, rounded up to a multiple of 128"),
        pytest.param(ModelConfig(dim=4096, heads=32, kv_heads=8, ffn_dim=14336), 14336, id="as set"),
    ],
)
def test_ffn_has_its_dimension_by_default_or_as_set(config, ffn_dim):
    with torch.device("meta"):
        assert Block(config).gate.weight.shape == (ffn_dim, config.dim)
