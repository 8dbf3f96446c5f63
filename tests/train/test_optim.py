"""Tests of the optimizer, of the learning-rate schedules, and of which parameters decay."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ringattn.train import optim
from ringattn.train.checkpoint import storage
from ringattn.train.checkpoint.state_dict import train_state
from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import ModelConfig, OptimConfig
from tests.distributed import run_ranks
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
    """The rate is close to that of GPT-3, and at most 2e-3. A continued run has a tenth of this rate.

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


def build_8bit(seed: int) -> tuple[nn.Module, optim.AdamW]:
    """A model of two rows, sharded over the ranks, and its optimizer. A third rank has no rows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"few": (2, 4096), "odd": (7, 3, 256), "norm": (5,)}
    parameters = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parameters = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in parameters.items()}
    model = nn.ParameterDict({name: nn.Parameter(x) for name, x in parameters.items()})
    return model, optim.build(model, OptimConfig(), moments="8bit")


def train_8bit(model: nn.Module, optimizer: optim.AdamW, first: int, last: int) -> dict[str, Tensor]:
    """Take steps `first` to `last` with random gradients, and return the weights."""
    for step in range(first, last + 1):
        for (name, x), gradient in zip(model.items(), build_8bit(step)[0].values(), strict=True):
            x.grad = gradient.detach() * (10.0 if name == "few" else 0.1)
        for group in optimizer.param_groups:
            group["lr"] = 0.1
        optimizer.step()
    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}


def test_8_bit_moments_are_those_of_torchao(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    from torchao.optim import AdamW8bit

    ours, optimizer = build_8bit(0)
    theirs = {name: nn.Parameter(x.detach().clone()) for name, x in ours.items()}
    groups = [
        {"params": [theirs["few"], theirs["odd"]], "weight_decay": 0.1},
        {"params": [theirs["norm"]], "weight_decay": 0.0},
    ]
    reference = AdamW8bit(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8)
    for step in range(1, 4):
        train_8bit(ours, optimizer, step, step)
        for name, x in theirs.items():
            x.grad = ours[name].grad.clone()
        reference.step()
    for name in ("few", "odd"):
        assert torch.equal(ours[name], theirs[name]), name
        assert optimizer.state[ours[name]]["exp_avg.codes"].unique().numel() > 50
    torch.testing.assert_close(ours["norm"], theirs["norm"])


def test_8_bit_moments_resume_bit_for_bit_on_another_number_of_ranks(tmp_path):
    """Blocks do not span several rows, so they do not depend on the number of ranks."""
    expected = train_8bit(*build_8bit(0), 1, 4)
    run_ranks(_save_8bit, 3, tmp_path / "store", tmp_path)
    model, optimizer = build_8bit(9)
    storage.load(tmp_path / "step_00000002", train_state(model, optimizer))
    found = train_8bit(model, optimizer, 3, 4)
    for name, x in expected.items():
        assert torch.equal(x, found[name]), name


def _save_8bit(directory: Path) -> None:
    model, optimizer = build_8bit(0)
    train_8bit(model, optimizer, 1, 2)
    storage.save(directory, 2, train_state(model, optimizer), meta={}, keep=1)
