"""Rotary positions: the documented angles, exact distances far away, and the scaling of Llama 3.1 and yarn."""

import math

import pytest
import torch

from ringattn.train.model.rope import rope, rotate, slowdown, yarn_scale
from ringattn.train.settings.config import ModelConfig, Rope


def settings(**changes) -> Rope:
    return ModelConfig(**changes).layer(0).rope


def frequencies(rope: Rope) -> torch.Tensor:
    return rope.theta ** (-torch.arange(0, rope.dim, 2) / rope.dim)


def test_pairs_are_rotated_by_the_documented_angle():
    cos, sin = rope(torch.tensor([0, 7]), settings(head_dim=4, rope_theta=100.0))
    x = torch.tensor([1.0, 0.0, 0.0, 2.0]).expand(1, 2, 1, 4)
    a, b = torch.tensor(7.0), torch.tensor(0.7)  # theta ** (-2 i / 4) is 1 and 0.1
    expected = torch.stack([a.cos(), -2 * b.sin(), a.sin(), 2 * b.cos()])
    torch.testing.assert_close(rotate(x, cos, sin)[0, 0, 0], x[0, 0, 0])
    torch.testing.assert_close(rotate(x, cos, sin)[0, 1, 0], expected)


def test_angles_are_exact_at_large_positions():
    """With frequencies in fp32, the angle at this position would be wrong by about 0.05."""
    position, theta, dim = 1_000_000, 10_000.0, 8
    cos, sin = rope(torch.tensor([position]), settings(head_dim=dim, rope_theta=theta))
    angles = [position * theta ** (-2 * i / dim) for i in range(dim // 2)]
    torch.testing.assert_close(cos[0, 0, 0], torch.tensor([math.cos(angle) for angle in angles]), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[0, 0, 0], torch.tensor([math.sin(angle) for angle in angles]), rtol=0, atol=1e-6)


def test_every_batch_entry_may_have_positions_of_its_own():
    positions = torch.tensor([[0, 1, 2], [500_000, 500_001, 500_002]])
    cos, sin = rope(positions, settings(head_dim=8))
    assert cos.shape == (2, 3, 1, 4)
    assert cos.dtype == torch.float32
    x = torch.randn(2, 3, 2, 8, dtype=torch.bfloat16)
    assert rotate(x, cos, sin).dtype == torch.bfloat16
    torch.testing.assert_close(cos[1], rope(positions[1], settings(head_dim=8))[0][0])


def test_angles_between_distant_neighbours_are_exact():
    far = torch.tensor([2**24 + 1, 2**24 + 2])
    config = settings(head_dim=8)
    (cos, sin), (cos_of_one, sin_of_one) = rope(far, config), rope(torch.tensor([1]), config)
    torch.testing.assert_close(cos[0, 0] * cos[0, 1] + sin[0, 0] * sin[0, 1], cos_of_one[0, 0])
    torch.testing.assert_close(sin[0, 1] * cos[0, 0] - cos[0, 1] * sin[0, 0], sin_of_one[0, 0])


LLAMA = settings(head_dim=64, rope_factor=8.0, rope_trained_len=8192)


def test_llama3_slows_pairs_down_by_their_number_of_rotations():
    """Pairs keep their frequency above four rotations within 8,192 tokens, and are slowed by the full factor below one."""
    rotations = torch.tensor([100.0, 4.0, 2.5, 1.0, 0.5])
    expected = torch.tensor([1, 1, (1 + 1 / 8) / 2, 1 / 8, 1 / 8])
    torch.testing.assert_close(slowdown(rotations * 2 * math.pi / 8192, LLAMA), expected)
    plain, slower = (rope(torch.tensor([5000]), x)[0] for x in (LLAMA._replace(factor=None), LLAMA))
    assert torch.equal(plain[..., :4], slower[..., :4])
    assert not torch.isclose(plain[..., -4:], slower[..., -4:]).any()


QWEN = settings(head_dim=128, rope_theta=1e6, rope_factor=4.0, rope_trained_len=32_768, rope_scaling="yarn")


def test_yarn_slows_pairs_down_by_their_index():
    """Of Qwen's 64 pairs, pair 23.6 makes 32 rotations within 32,768 tokens and pair 39.65 makes one. Pairs between them are
    slowed.

    The two indices are rounded outwards, to 23 and 40.
    """
    slower = slowdown(frequencies(QWEN), QWEN)
    assert torch.equal(slower[:24], torch.ones(24))
    assert torch.equal(slower[40:], torch.full((24,), 1 / 4))
    torch.testing.assert_close(slower[24:40], 1 - torch.arange(1, 17) / 17 * 3 / 4)


def test_yarn_scales_queries_and_keys():
    assert yarn_scale(1.0) == 1.0
    assert yarn_scale(4.0) == pytest.approx(1.138629)
    cos, sin = rope(torch.tensor([0, 99_999]), QWEN)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, yarn_scale(4.0) ** 2))


@pytest.mark.parametrize("trained_len", [64, 512, 32_768, 10**7])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("kind", ["llama3", "yarn", "yarn-exact", "linear"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_frequencies_equal_those_of_transformers(kind, head_dim, trained_len, fraction):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = dict(rope_factor=8.0, rope_trained_len=trained_len, rope_scaling=kind)
    config = settings(head_dim=head_dim, rope_theta=5e5, rotary_fraction=fraction, **scaling)
    name, _, exact = kind.partition("-")
    rope_parameters = {"rope_type": name, "rope_theta": 5e5, "factor": 8.0, "partial_rotary_factor": fraction}
    if kind != "linear":
        rope_parameters |= {"original_max_position_embeddings": trained_len}
    if kind == "llama3":
        rope_parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if exact:
        rope_parameters |= {"truncate": False}
    config_of_transformers = transformers.LlamaConfig(head_dim=head_dim, rope_parameters=rope_parameters)
    expected, scale = ROPE_INIT_FUNCTIONS[name](config_of_transformers, "cpu")
    torch.testing.assert_close(frequencies(config) * slowdown(frequencies(config), config), expected)
    assert scale == (yarn_scale(8.0) if name == "yarn" else 1.0)


def test_only_the_first_dimensions_are_rotated():
    x = torch.randn(1, 3, 2, 8)
    rotated = rotate(x, *rope(torch.arange(3), settings(head_dim=8, rotary_fraction=0.5)))
    torch.testing.assert_close(rotated[..., :4], rotate(x[..., :4], *rope(torch.arange(3), settings(head_dim=4))))
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    assert torch.equal(rotate(x, *rope(torch.arange(3), settings(head_dim=8, layer_types=["full-nope"]))), x)
