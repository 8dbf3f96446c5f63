"""Model FLOPs of a step, calculated by hand, and the peak FLOP/s of GPUs."""

import pytest
import torch

from ringattn.train.model.flops import matmul_parameters, peak_flops, step_flops
from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import ModelConfig

# The weights of a layer with dim 8, two query heads and one key head of dim 4, and ffn_dim 16: 8*8 + 2*8*4 + 8*8 + 3*8*16.
LAYER = 576
# The weights of the output matrix: a padded vocabulary of 64 times dim 8.
OUTPUT = 512


def model(**changes) -> GPT:
    settings = dict(layers=3, dim=8, heads=2, kv_heads=1, head_dim=4, ffn_dim=16) | changes
    with torch.device("meta"):
        return GPT(ModelConfig(**settings), vocab_size=60)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_only_weights_of_matrix_products_are_counted(tied):
    assert matmul_parameters(model(tie_embeddings=tied)) == 3 * LAYER + OUTPUT


def test_only_the_chosen_experts_are_counted():
    """A router has 8*5 weights, and each of the two experts per token has 3*8*16."""
    expected = 3 * (LAYER + 8 * 5 + 3 * 8 * 16) + OUTPUT
    assert matmul_parameters(model(experts=5, experts_per_token=2, expert_bias=True)) == expected


@pytest.mark.parametrize("head_dim", [4, None])
def test_flops_of_a_step_equal_those_calculated_by_hand(head_dim):
    tokens, pairs = 20, 3 * 2 * 10 * 11 // 2  # three layers, two sequences of ten tokens, with causal attention
    expected = 6 * (3 * LAYER + OUTPUT) * 20 + 12 * 4 * 2 * 330
    assert step_flops(model(head_dim=head_dim), tokens, pairs) == expected == 300_480


def test_without_pairs_only_matrices_are_counted():
    assert step_flops(model(layers=1), tokens=1, pairs=0) == 6 * (LAYER + OUTPUT)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A1000", None),
        ("Radeon", None),
    ],
)
def test_the_peak_follows_from_the_name_of_the_gpu(monkeypatch, name, teraflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = teraflops and pytest.approx(teraflops * 1e12)
    assert peak_flops(torch.device("cuda", 0)) == expected


def test_a_cpu_has_no_known_peak():
    assert peak_flops(torch.device("cpu")) is None
