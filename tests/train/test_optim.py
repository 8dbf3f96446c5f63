"""Tests of the optimizer, of the learning-rate schedules, and of which parameters decay."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ringattn.train import optim
from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import ModelConfig, OptimConfig
from tests.train.jobs import one_rank


def rates(steps: int, **settings) -> list[float]:
    """The learning rates of all steps of a run, for a peak of 1."""
    config = OptimConfig(lr=1.0, **settings)
    return [round(optim.learning_rate(step, steps, config), 4) for step in range(1, steps + 1)]


def test_cosine_schedule():
    assert rates(6, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1) == [0.5, 1.0, 0.8682, 0.55, 0.2318, 0.1]


def test_wsd_schedule_is_constant_before_its_decay():
    assert rates(10, schedule="wsd", warmup_steps=2, decay_fraction=0.4, min_lr_ratio=0.2) == [
        *(0.5, 1.0, 1.0, 1.0, 1.0, 1.0),
        *(0.8, 0.6, 0.4, 0.2),
    ]


def test_decay_starts_after_the_warmup():
    """A decay fraction of 1 would otherwise include the warmup."""
    assert rates(4, schedule="wsd", warmup_steps=2, decay_fraction=1.0, min_lr_ratio=0.0) == [0.5, 1.0, 0.5, 0.0]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2, 5, 30])
@pytest.mark.parametrize("warmup_steps", [None, 0, 1])
def test_every_rate_is_between_zero_and_the_peak(schedule, steps, warmup_steps):
    assert all(0 < rate <= 1 for rate in rates(steps, schedule=schedule, warmup_steps=warmup_steps))


def test_warmup_takes_a_tenth_of_the_steps_by_default():
    assert rates(100)[:11] == rates(100, warmup_steps=10)[:11]


def test_only_matrices_decay():
    with torch.device("meta"):
        model = GPT(ModelConfig(), vocab_size=10)
    decaying, constant = optim.build(model, OptimConfig(weight_decay=0.1)).param_groups
    assert decaying["weight_decay"] == 0.1
    assert all(p.ndim == 2 for p in decaying["params"])
    assert constant["weight_decay"] == 0.0
    assert all(p.ndim == 1 for p in constant["params"])
    assert len(decaying["params"]) + len(constant["params"]) == len(list(model.parameters()))


def test_biases_of_experts_do_not_decay():
    with torch.device("meta"):
        model = GPT(ModelConfig(layers=1, experts=4, expert_bias=True), vocab_size=10)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decaying, constant = ({names[id(p)] for p in group["params"]} for group in optim.build(model, OptimConfig()).param_groups)
    assert {f"blocks.0.experts.{name}" for name in ("router.weight", "gate", "up", "down")} <= decaying
    assert {f"blocks.0.experts.{name}_bias" for name in ("gate", "up", "down")} <= constant


def test_default_learning_rate_falls_with_the_size_of_the_model():
    """It is close to that of GPT-3, and at most 2e-3. A continued run has a tenth of it.

    Normalised queries and keys allow a higher rate.
    """
    published = {125e6: 6e-4, 350e6: 3e-4, 1.3e9: 2e-4, 6.7e9: 1.2e-4}
    for size, lr in published.items():
        assert optim.default_lr(size, False, continued=False) == pytest.approx(lr, rel=0.35)
    assert optim.default_lr(1e5, False, continued=False) == 2e-3
    assert optim.default_lr(1e5, False, continued=True) == 2e-4
    assert optim.default_lr(1e5, True, continued=False) == 3e-3
    assert optim.default_lr(1e9, True, continued=True) == pytest.approx(1.75 * optim.default_lr(1e9, False, continued=True))


def test_shards_are_updated_as_by_pytorch():
    """Three steps of DTensors, with clipped gradients, give the same bits as PyTorch's optimizer and its clipping."""
    with one_rank():
        mesh = init_device_mesh("cpu", (1,))
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            parameters = [nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)])) for shape in ((5, 3), (4,))]
            models.append(nn.ParameterList(parameters))
        ours, theirs = models
        optimizers = [
            kind(model.parameters(), lr=0.1) for kind, model in zip((optim.AdamW, torch.optim.AdamW), models, strict=True)
        ]
        for _ in range(3):
            gradients = [distribute_tensor(torch.randn(x.shape), mesh, [Shard(0)]) for x in ours]
            for model in models:
                for parameter, gradient in zip(model, gradients, strict=True):
                    parameter.grad = gradient.clone()
            norm = torch.linalg.vector_norm(optim.squared_norms(ours).sqrt())
            optim.scale_gradients(ours, optim.clip_scale(norm, 0.5))
            assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5).full_tensor())
            assert norm > 0.5
            for optimizer in optimizers:
                optimizer.step()
        for x, y in zip(ours, theirs, strict=True):
            assert torch.equal(x.full_tensor(), y.full_tensor())
        assert all(isinstance(x["exp_avg"], DTensor) for x in optimizers[0].state.values())
