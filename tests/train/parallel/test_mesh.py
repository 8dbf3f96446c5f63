"""The mesh of data-parallel x ring x Ulysses ranks."""

from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringattn import simulate
from ringattn.comm import watchdog
from ringattn.train.parallel import mesh as mesh_module
from ringattn.train.parallel.mesh import MeshShape, attention, build_mesh, causal_masks, choose_layout, set_timeout
from ringattn.train.parallel.ranks import disconnect_ranks
from ringattn.train.settings.config import Config, DataConfig, ModelConfig, ParallelConfig
from tests.train.jobs import one_rank
from tests.train.model.test_gpt import VOCAB, build
from tests.train.plain import PlainLayer, plain_logits

AXES = ("dp", "sequence", "ring", "ulysses", "all")


def groups_of(rank: int, ranks: int, sequence: int, ulysses: int) -> dict[str, list[int]]:
    """Return the ranks that are connected with one rank along each axis. The backend "fake" needs no other processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = build_mesh("cpu", sequence, ulysses)
        assert build_mesh("cpu", sequence, ulysses) is mesh
        return {axis: dist.get_process_group_ranks(getattr(mesh, axis).get_group()) for axis in AXES}
    finally:
        disconnect_ranks()


@pytest.mark.parametrize(
    ("rank", "dp", "sequence", "ring", "ulysses"),
    [
        (0, [0, 8], [0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6], [0, 1]),
        (15, [7, 15], [8, 9, 10, 11, 12, 13, 14, 15], [9, 11, 13, 15], [14, 15]),
    ],
)
def test_ranks_that_exchange_heads_are_consecutive(rank, dp, sequence, ring, ulysses):
    """Eight of 16 ranks share a sequence. They form rings of four ranks, and all-to-alls of two ranks."""
    expected = {"dp": dp, "sequence": sequence, "ring": ring, "ulysses": ulysses, "all": list(range(16))}
    assert groups_of(rank, ranks=16, sequence=8, ulysses=2) == expected


@pytest.mark.parametrize(("set_by_user", "expected"), [(None, [50, 70]), ("600", [600, 600])])
def test_each_job_sets_the_timeout_of_a_hop_unless_the_user_does(set_by_user, expected, monkeypatch):
    monkeypatch.setenv(watchdog.TIMEOUT, "600")
    monkeypatch.setattr(mesh_module, "USER_HOP_TIMEOUT", set_by_user)
    timeouts = []
    with one_rank():
        mesh = build_mesh("cpu", 1)
        for seconds in (50, 70):
            set_timeout(mesh, seconds)
            timeouts.append(watchdog.timeout_seconds())
    assert timeouts == expected


def test_collectives_of_all_axes_have_the_timeout(monkeypatch):
    timeouts = {}
    monkeypatch.setenv(watchdog.TIMEOUT, "600")
    monkeypatch.setattr(mesh_module, "set_group_timeout", lambda timeout, group: timeouts.update({group: timeout.seconds}))
    with one_rank():
        mesh = build_mesh("cpu", 1)
        set_timeout(mesh, 50)
        assert timeouts == dict.fromkeys([None, *(getattr(mesh, axis).get_group() for axis in AXES)], 50)


# Five layers of four kinds. Heads have 8 dimensions, of which 4 are rotated.
MIXED = dict(
    layers=5,
    window=7,
    layer_types=["sliding", "full", "sliding-nope", "full-nope"],
    rotary_fraction=0.5,
    local_rope_theta=50.0,
    rope_theta=1000.0,
    rope_factor=4.0,
    rope_scaling="linear",
)
LOCAL, FULL = PlainLayer(7, 50.0, 4), PlainLayer(None, 1000.0, 4, 4.0)
LAYERS = [LOCAL, FULL, PlainLayer(7, None), PlainLayer(None, None), LOCAL]


@pytest.mark.parametrize(("layout", "schedule"), [("auto", "kv"), ("striped", "state")])
def test_mixed_layers_on_a_ring_equal_a_plain_gpt(layout: str, schedule: str) -> None:
    """The loss and all gradients of two sequences of packed documents, on two ranks in fp64. Rotations are in fp32."""
    model = build(**MIXED).double()
    for name, parameter in model.named_parameters():
        # Larger than usual, so that a wrong key has an effect.
        parameter.data += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))) / 4
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(VOCAB, (2, 2, 61), generator=generator)
    documents = [[20, 13, 28], [3, 58]]
    config = Config(model=model.config, data=DataConfig(seq_len=61), parallel=ParallelConfig(layout=layout, schedule=schedule))
    masks = causal_masks(model.config, documents)
    whole = choose_layout(config, MeshShape(1, 2, 1), masks)

    def on_rank(rank: int, group) -> list[torch.Tensor]:
        axes = (SimpleNamespace(get_group=lambda x=x: x) for x in (group, None))
        mesh = SimpleNamespace(**dict(zip(("ring", "ulysses"), axes, strict=True)))
        attend, own = attention(config, mesh, masks, whole, training=True), deepcopy(model)

        def finish(hidden, head):
            return F.cross_entropy((hidden @ head.T).flatten(0, 1), whole.shard(labels, rank).flatten(), reduction="sum")

        loss = own(whole.shard(tokens, rank), whole.positions(rank), attend, finish)
        return [loss.detach(), *torch.autograd.grad(loss, list(own.parameters()))]

    got = [sum(parts) for parts in zip(*simulate(2, on_rank), strict=True)]
    weights = {name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()}
    logits = [plain_logits(weights, LAYERS, 8, *sequence) for sequence in zip(tokens, documents, strict=True)]
    loss = F.cross_entropy(torch.cat(logits), labels.flatten(), reduction="sum")
    for result, expected in zip(got, [loss.detach(), *torch.autograd.grad(loss, list(weights.values()))], strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_auto_layout_balances_all_layers() -> None:
    """A window alone would have a contiguous layout, in which the last rank has most of the work of the full layers."""
    config = Config(data=DataConfig(seq_len=8192), parallel=ParallelConfig(layout="auto"))
    kinds = []
    for types in (["sliding"], ["sliding", "full"], ["full"]):
        model = ModelConfig(window=64, layer_types=types)
        kinds.append(choose_layout(replace(config, model=model), MeshShape(1, 4, 1), causal_masks(model)).kind)
    assert kinds == ["contiguous", "zigzag", "zigzag"]
