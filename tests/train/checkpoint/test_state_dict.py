"""The tensors of a checkpoint: names, resuming bit for bit, and resuming on another number of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ringattn.train.checkpoint import storage
from ringattn.train.checkpoint.state_dict import load_rng_state, model_state, rng_state, train_state
from tests.distributed import run_ranks


class Tiny(nn.Module):
    """A model that is difficult to shard: odd numbers of rows, a parameter of one element, and buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.hidden(self.embed(tokens)) @ self.embed.weight.T * self.scale


def build(seed: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """A model and its optimizer, sharded over the ranks if there is a process group."""
    torch.manual_seed(seed)
    model = Tiny()
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.hidden, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.AdamW, steps: int) -> None:
    for _ in range(steps):
        tokens = torch.randint(0, 7, (2, 3))
        model(tokens).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.seen += 1


def gather(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in tensors.items()}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def save(directory: Path, step: int, tensors: dict[str, Tensor]) -> Path:
    return storage.save(directory, step, tensors, meta={}, keep=1)


def test_every_tensor_of_a_run_has_one_name():
    parameters = ["embed.weight", "hidden.weight", "hidden.bias", "scale"]
    expected = [f"model.{name}" for name in (*parameters, "seen")]
    expected += [f"optim.{name}.{state}" for name in parameters for state in ("step", "exp_avg", "exp_avg_sq")]
    assert sorted(train_state(*build(0))) == sorted(expected)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_the_state_of_a_new_optimizer_is_that_before_its_first_step(fused):
    """A first step gives the same result whether the optimizer creates its state itself or `train_state` does."""
    states = []
    for allocate_before in (False, True):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(3, 4).t())
        optimizer = torch.optim.AdamW([parameter], fused=fused)
        if allocate_before:
            train_state(nn.ParameterDict({"w": parameter}), optimizer)
        parameter.grad = torch.randn(4, 3)
        optimizer.step()
        states.append(optimizer.state[parameter])
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key])
        assert (value.dtype, value.stride()) == (states[1][key].dtype, states[1][key].stride())


def test_a_resumed_run_continues_bit_for_bit(tmp_path):
    model, optimizer = build(0)
    train(model, optimizer, 3)
    path = save(tmp_path, 3, train_state(model, optimizer) | rng_state())
    train(model, optimizer, 2)

    resumed, resumed_optimizer = build(1)
    storage.load(path, train_state(resumed, resumed_optimizer))
    assert load_rng_state(path)
    assert resumed.seen == 3
    train(resumed, resumed_optimizer, 2)

    assert_equal(train_state(model, optimizer), train_state(resumed, resumed_optimizer))


def test_the_model_can_be_loaded_without_its_optimizer(tmp_path):
    model, optimizer = build(0)
    path = save(tmp_path, 1, train_state(model, optimizer))
    other, _ = build(1)
    storage.load(path, model_state(other))
    assert_equal(model_state(model), model_state(other))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint that two ranks have saved, and the tensors in it."""
    directory = tmp_path_factory.mktemp("sharded")
    run_ranks(_save_sharded, 2, directory / "ranks", directory)
    return storage.latest(directory), torch.load(directory / "expected.pt", weights_only=True)


def _save_sharded(directory: Path) -> None:
    model, optimizer = build(0)
    torch.manual_seed(dist.get_rank())
    train(model, optimizer, 2)
    with torch.no_grad():
        # Without a backward pass, FSDP leaves the parameters of the root module gathered, as it does after an evaluation.
        model(torch.tensor([[1, 2]]))
    state = train_state(model, optimizer)
    expected = gather(state)
    if dist.get_rank() == 0:
        torch.save(expected, directory / "expected.pt")
    save(directory, 2, state | rng_state())


def test_a_checkpoint_of_two_ranks_can_be_loaded_by_one(sharded):
    path, expected = sharded
    model, optimizer = build(1)
    storage.load(path, train_state(model, optimizer))
    assert_equal(train_state(model, optimizer), expected)
    assert not load_rng_state(path)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_checkpoint_of_two_ranks_can_be_loaded_by_several(ranks, sharded, tmp_path):
    run_ranks(_load_sharded, ranks, tmp_path, *sharded)


def _load_sharded(path: Path, expected: dict[str, Tensor]) -> None:
    model, optimizer = build(1)
    storage.load(path, train_state(model, optimizer))
    assert_equal(gather(train_state(model, optimizer)), expected)
    same_ranks = dist.get_world_size() == 2
    assert load_rng_state(path) == same_ranks
    if same_ranks:
        loaded = torch.get_rng_state()
        torch.manual_seed(dist.get_rank())
        for _ in range(2):
            torch.randint(0, 7, (2, 3))
        assert torch.equal(loaded, torch.get_rng_state())
    train(model, optimizer, 1)
