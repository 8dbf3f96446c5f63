"""Preparation of a model for training: random weights and shards, compilation, activation checkpointing."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ringattn.attention
from ringattn.train import setup as run_setup
from ringattn.train import step
from ringattn.train.model.gpt import GPT, Block
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.capacity import Needs
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import build_mesh
from ringattn.train.parallel.shard import compile_blocks, shard_model
from ringattn.train.settings.config import MemoryConfig, ModelConfig
from tests.distributed import run_ranks
from tests.train.jobs import SEQUENCES, job, one_rank

MODEL = ModelConfig(layers=3, dim=32, heads=4, kv_heads=2, qkv_bias=True)


def build(blocks_per_group: int = 2, bf16: bool = False) -> GPT:
    """A sharded model, whose three blocks form groups of the given size."""
    estimate.GROUP_BYTES = blocks_per_group * estimate._block_bytes(MODEL, bf16=False)
    with torch.device("meta"):
        model = GPT(MODEL, 257)
    shard_model(model, build_mesh("cpu", dist.get_world_size()), torch.device("cpu"), seed=3, bf16=bf16)
    return model


@pytest.fixture
def expected(monkeypatch) -> dict[str, torch.Tensor]:
    """The weights of the model on one rank."""
    monkeypatch.setattr(estimate, "GROUP_BYTES", estimate.GROUP_BYTES)  # restored after the test, because `build` changes it
    with one_rank():
        return {name: x.full_tensor().clone() for name, x in build().state_dict().items()}


def test_weights_do_not_depend_on_the_number_of_ranks(expected, tmp_path):
    torch.save(expected, tmp_path / "expected.pt")
    run_ranks(_check_weights, 3, tmp_path / "store", tmp_path / "expected.pt")


def _check_weights(path: Path) -> None:
    expected = torch.load(path)
    for blocks_per_group in (1, 3):
        model = build(blocks_per_group)
        for name, parameter in model.state_dict().items():
            assert torch.equal(parameter.full_tensor(), expected[name]), name
    # Every rank holds only its own shard.
    assert len(model.embedding.to_local()) in (106, 107)  # of 320 rows
    check_gradients_are_summed(model)
    check_bf16()


def check_gradients_are_summed(model: GPT) -> None:
    """FSDP would average the gradients by default. Every rank contributes a gradient of one here."""
    positions = torch.arange(2)
    model(torch.zeros(1, 2, dtype=torch.int64), positions, lambda q, k, v: q, lambda hidden, head: head.sum()).backward()
    assert model.head is None
    assert model.embedding.grad.full_tensor().eq(dist.get_world_size()).all()


def check_bf16() -> None:
    """Attention and the loss compute in bf16. Gradients are summed in fp32: the sum of 256, 1 and 2 does not fit into bf16."""
    model = build(bf16=True)
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    dtypes = []

    def attend(q, k, v):
        dtypes.extend(x.dtype for x in (q, k, v))
        return q

    contribution = [256.0, 1.0, 2.0][dist.get_rank()]

    def finish(hidden, head):
        dtypes.append(head.dtype)
        return head.sum() * contribution

    model(torch.zeros(1, 2, dtype=torch.int64), torch.arange(2), attend, finish).backward()
    assert set(dtypes) == {torch.bfloat16}
    assert model.embedding.grad.full_tensor().eq(259).all()


def test_every_block_has_its_own_weights_and_biases_of_zero(expected):
    assert expected["blocks.0.query.bias"].eq(0).all()
    assert not torch.equal(expected["blocks.0.query.weight"], expected["blocks.1.query.weight"])


def test_everything_but_attention_is_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function: compiled.append(function.__name__) or function)
    with torch.device("meta"):
        compile_blocks(GPT(MODEL, 257))
    assert compiled == ["before", "after"] * 3


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["recompute", "recompute-all", "offload", "offload-inputs"])
def test_attention_is_computed_twice_only_if_it_is_recomputed(activations, corpus, monkeypatch):
    calls = {"attention": 0, "rest": 0}
    forward, after = ringattn.attention.Ring.forward, Block.after

    def count_attention(*args, **kwargs):
        calls["attention"] += 1
        return forward(*args, **kwargs)

    def count_rest(*args):
        calls["rest"] += 1
        return after(*args)

    monkeypatch.setattr(ringattn.attention.Ring, "forward", count_attention)
    monkeypatch.setattr(Block, "after", count_rest)
    with one_rank():
        run = run_setup.build(job(corpus, 1, MemoryConfig(activations)))
        step.take_step(run, 1, consumed=0)
    micro_steps, layers = SEQUENCES, 2
    attention = {"recompute-all": 2, "offload-inputs": 2}.get(activations, 1)
    assert calls == {"attention": attention * micro_steps * layers, "rest": 2 * micro_steps * layers}


@pytest.mark.slow
def test_only_the_first_blocks_are_recomputed(corpus, monkeypatch):
    """The loss and the gradients do not depend on the number of blocks that are recomputed or in host memory."""
    results, after, calls = [], Block.after, []

    def count_after(block, *args):
        calls.append(block)
        return after(block, *args)

    monkeypatch.setattr(Block, "after", count_after)
    for count, offloaded in ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1)):
        plan = MemoryPlan(recomputed_blocks=count, offloaded_blocks=offloaded)
        monkeypatch.setattr(run_setup, "choose_plan", lambda *_, plan=plan: (plan, Needs({}, {"activations": 0})))
        calls.clear()
        with one_rank():
            run = run_setup.build(job(corpus, 1))
            record, _ = step.take_step(run, 1, consumed=0)
        recomputed = [calls.count(block) - SEQUENCES for block in run.model.blocks]
        assert recomputed == [SEQUENCES] * count + [0] * (2 - count)
        results.append((record["loss"], record["grad_norm"]))
    assert len(set(results)) == 1
