"""Weights of experts that are written in a Hugging Face format are read back, also for some experts only."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ringattn.train.checkpoint import expert_weights

# The parameters (4 experts, out, in) and biases (4, out) by their names in each format.
SHAPES = {
    "gate": (4, 6, 10),
    "up": (4, 6, 10),
    "down": (4, 10, 6),
    "gate_bias": (4, 6),
    "up_bias": (4, 6),
    "down_bias": (4, 10),
}
FORMATS = {
    "one tensor per expert": {"gate": "experts.{}.w1.weight", "up": "experts.{}.w3.weight", "down": "experts.{}.w2.weight"},
    "gpt-oss": {
        **{"gate": "gate_up_proj:0", "up": "gate_up_proj:1", "down": "down_proj:"},
        **{"gate_bias": "gate_up_proj_bias:0", "up_bias": "gate_up_proj_bias:1", "down_bias": "down_proj_bias:"},
    },
}


@pytest.mark.parametrize("kind", FORMATS)
def test_exported_weights_are_read_back(kind, tmp_path):
    names, generator = FORMATS[kind], torch.Generator().manual_seed(0)
    weights = {part: torch.randn(SHAPES[part], generator=generator) for part in names}
    tensors = expert_weights.exported_tensors({names[part]: [weight] for part, weight in weights.items()})
    save_file(tensors, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        files = dict.fromkeys(tensors, file)
        for part, weight in weights.items():
            stored = expert_weights.open_tensor(files, names[part], 4)
            assert (stored.get_shape(), stored.get_dtype()) == (list(weight.shape), "F32")
            assert torch.equal(stored[1:3], weight[1:3])
            assert {*expert_weights.tensor_names(names[part], 4, files)} <= tensors.keys()


def test_dequantized_numbers_equal_those_of_the_standard():
    """All 16 codes and all exponents: 1.5 is 0b0011, and its negative has the highest bit."""
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | codes.flip(0) << 4).view(1, 1, 16)
    exact = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    for exponent in (-100, -3, 0, 20):
        numbers = expert_weights.dequantize(blocks, torch.full((1, 1), 127 + exponent, dtype=torch.uint8))
        assert numbers.dtype == torch.bfloat16
        pairs = [x * 2.0**exponent for pair in zip(exact, reversed(exact), strict=True) for x in pair]
        assert numbers.flatten().tolist() == pairs
