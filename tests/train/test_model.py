import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ringattn import Layout, Mask, ring_attention
from tests.train.test_config import composed
from train.config import ModelConfig
from train.model import GPT, Block, rope, rotate, stretched

VOCAB = 50


def build(**settings) -> GPT:
    config = ModelConfig(**{"layers": 2, "dim": 32, "heads": 4, "kv_heads": 2, **settings})
    model = GPT(config, VOCAB)
    generator = torch.Generator().manual_seed(0)
    for module in (*model.blocks, model):
        module.init_weights(generator)
    return model


def attend(q, k, v):
    """Causal attention of a whole sequence, by PyTorch."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def logits(model: GPT, tokens, positions=None, attend=attend):
    positions = torch.arange(tokens.shape[1]) if positions is None else positions
    return model(tokens, positions, attend, lambda hidden, head: hidden @ head.T)


def random_tokens(length: int, batch: int = 2):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


SIZES = {"tiny": 0.83e6, "124m": 123.6e6, "350m": 353e6, "1.4b": 1.44e9, "8b": 8.03e9}
SIZES |= {"llama-3.1-8b": 8.03e9, "llama-3.2-1b": 1.236e9}


@pytest.mark.parametrize(("name", "parameters"), SIZES.items())
def test_sizes(name, parameters):
    with torch.device("meta"):
        model = GPT(composed(f"model={name}").model, vocab_size=257)
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)


def test_the_future_is_not_seen():
    model, tokens = build(), random_tokens(17)
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % VOCAB
    torch.testing.assert_close(logits(model, tokens)[:, :11], logits(model, changed)[:, :11])
    assert not torch.allclose(logits(model, tokens)[:, 11:], logits(model, changed)[:, 11:])


def test_only_distances_between_positions_matter():
    model, tokens = build(), random_tokens(16)
    shifted = torch.arange(16) + 1000
    torch.testing.assert_close(logits(model, tokens), logits(model, tokens, shifted), rtol=1e-3, atol=1e-4)
    stretched = 3 * torch.arange(16)
    assert not torch.allclose(logits(model, tokens), logits(model, tokens, stretched), rtol=1e-3, atol=1e-4)


def test_rope_turns_pairs_by_the_documented_angle():
    cos, sin = rope(torch.tensor([0, 7]), ModelConfig(head_dim=4, rope_theta=100.0))
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(1, 2, 1, 4)
    a, b = torch.tensor(7.0), torch.tensor(0.7)  # theta ** (-2 i / 4) is 1 and 0.1
    expected = torch.stack([a.cos(), -2 * b.sin(), a.sin(), 2 * b.cos()])
    torch.testing.assert_close(rotate(x, cos, sin)[0, 0, 0], x[0, 0, 0])
    torch.testing.assert_close(rotate(x, cos, sin)[0, 1, 0], expected)


def test_features_that_turn_seldom_turn_slower():
    """In 8,192 tokens: above four turns as before, below one slower by the factor, half-way between by the mean of both."""
    turns = torch.tensor([100.0, 4.0, 2.5, 1.0, 0.5])
    frequency = turns * 2 * math.pi / 8192
    expected = torch.tensor([1, 1, (1 + 1 / 8) / 2, 1 / 8, 1 / 8])
    torch.testing.assert_close(stretched(frequency, 8.0, 8192) / frequency, expected)
    plain, slower = (rope(torch.tensor([5000]), ModelConfig(head_dim=64, **x))[0] for x in ({}, {"rope_factor": 8.0}))
    assert torch.equal(plain[..., :4], slower[..., :4]) and not torch.isclose(plain[..., -4:], slower[..., -4:]).any()


def test_rope_takes_positions_a_batch_row_and_keeps_fp32_angles():
    positions = torch.tensor([[0, 1, 2], [500_000, 500_001, 500_002]])
    cos, sin = rope(positions, ModelConfig(head_dim=8))
    assert cos.shape == (2, 3, 1, 4) and cos.dtype == torch.float32
    x = torch.randn(2, 3, 2, 8, dtype=torch.bfloat16)
    assert rotate(x, cos, sin).dtype == torch.bfloat16
    torch.testing.assert_close(cos[1], rope(positions[1], ModelConfig(head_dim=8))[0][0])


def test_ring_attention_of_one_rank_is_the_same_attention():
    model, tokens = build(), random_tokens(33)
    ring = partial(ring_attention, layout=Layout.zigzag(seq_len=33, ranks=1), mask=Mask.causal())
    torch.testing.assert_close(logits(model, tokens, attend=ring), logits(model, tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings(tied):
    model = build(tie_embeddings=tied)
    names = dict(model.named_parameters())
    assert ("head" in names) is not tied
    assert model.embedding.shape == (64, 32)


def test_init_keeps_the_residual_stream_small():
    config = ModelConfig(layers=8, dim=256, heads=4, kv_heads=4)
    block = Block(config)
    block.init_weights(torch.Generator().manual_seed(0))
    assert block.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (block.output.weight, block.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.attention_norm.eq(1).all()


def test_ffn_dim_is_8_3_of_dim_rounded_up():
    assert Block(ModelConfig(dim=128)).gate.weight.shape == (384, 128)
    assert Block(ModelConfig(dim=4096, heads=32, kv_heads=8, ffn_dim=14336)).gate.weight.shape == (14336, 4096)
