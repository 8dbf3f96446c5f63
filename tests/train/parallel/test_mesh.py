"""Training does not depend on how many ranks share a sequence, nor on what is recomputed or how the ring turns."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import datasets
import pytest
import torch
import torch.distributed as dist

import ringattn.attention
from ringattn.train import evaluate, metrics, step
from ringattn.train import setup as run_setup
from ringattn.train import trainer as trainer_module
from ringattn.train.config import Config, TrainerConfig
from ringattn.train.generate import generate
from ringattn.train.model.gpt import Block
from ringattn.train.parallel import memory
from tests.distributed import run_ranks
from tests.train.jobs import SEQUENCES, STEPS, job, one_rank
from tests.train.launch import write_corpus


def gradients(config: Config, path: Path) -> None:
    """Write the gradients of all parameters in the first step, whole, to `path`, and what is evaluated before it beside."""
    run = run_setup.build(config)
    held_out = evaluate.evaluate(run)
    run.optimizer.zero_grad = lambda: None
    step.take_step(run, 1, consumed=0)
    whole = {name: parameter.grad.full_tensor() for name, parameter in run.model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(whole, path)
        path.with_suffix(".json").write_text(json.dumps(held_out))


def greedy(config: Config, prompt: list[int]) -> list[int]:
    """Eight tokens after a prompt, by a fresh model."""
    run = run_setup.build(config)
    options = dict(group=run.mesh.sequence.get_group(), device=run.device, temperature=0.0)
    return generate(run.model, prompt, 8, **options, vocab_size=256, eos=256)  # eos is out of reach: no text ends early


@patch.object(evaluate, "SHORTEST_CONTEXT", 8)
def work(corpus: str, directory: Path) -> None:
    """All jobs of this world size: 20 steps, gradients and a few tokens for every ring that divides it."""
    world_size = dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    for ring in (r for r in (1, 2, 4) if world_size % r == 0):
        config = job(corpus, world_size // ring, ring=ring)
        out = directory / f"world{world_size}_ring{ring}"
        trainer_module.train(config, out)
        gradients(config, out / "gradients.pt")
        tokens = [greedy(config, prompt) for prompt in ([], [65], list(range(40, 80)))]
        if dist.get_rank() == 0:
            (out / "tokens.json").write_text(json.dumps(tokens))
    if world_size == 4:
        config = job(corpus, 1, ring=4)
        config.data.eval_split = None
        config.trainer.eval_every, config.trainer.eval_tokens = TrainerConfig.eval_every, TrainerConfig.eval_tokens
        trainer_module.train(config, directory / "unevaluated")
    for layout, schedule, ulysses in (
        ("contiguous", "state", 1),
        ("striped", "kv", 1),
        ("auto", "auto", 2),
        ("zigzag", "kv", None),
    ):
        if world_size % (ulysses or 1) == 0:
            config = job(corpus, 1, ring=world_size, ulysses=ulysses, layout=layout, schedule=schedule)
            config.parallel.activation_checkpointing = True
            gradients(config, directory / f"world{world_size}_{layout}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("ranks")
    corpus = write_corpus(directory / "corpus")
    run_ranks(work, 4, directory / "store", corpus, directory)
    with one_rank():
        work(corpus, directory)
    return directory


def rows(path: Path) -> list[dict[str, float]]:
    return metrics.read(path / "metrics.jsonl")


def losses(path: Path) -> torch.Tensor:
    return torch.tensor([row["loss"] for row in rows(path)])


@pytest.mark.parametrize("ring", [1, 2, 4])
def test_twenty_steps_are_those_of_one_rank(results, ring):
    alone, shared = losses(results / "world1_ring1"), losses(results / f"world4_ring{ring}")
    assert len(shared) == STEPS and alone[-1] < 0.8 * alone[0]
    torch.testing.assert_close(shared, alone, rtol=1e-5, atol=0)


of_a_first_step = pytest.mark.parametrize(
    "name",
    ["world4_ring1/gradients.pt", "world4_ring2/gradients.pt", "world4_ring4/gradients.pt"]
    + [f"world4_{layout}.pt" for layout in ("contiguous", "striped", "auto", "zigzag")]
    + ["world1_striped.pt"],
)


@of_a_first_step
def test_gradients_of_every_parameter_are_those_of_one_rank(results, name):
    alone, shared = torch.load(results / "world1_ring1" / "gradients.pt"), torch.load(results / name)
    assert alone.keys() == shared.keys() and len(alone) == 2 + 2 * 9
    for key, gradient in alone.items():
        scale = float(gradient.abs().max())
        assert scale > 0
        torch.testing.assert_close(shared[key], gradient, rtol=1e-4, atol=1e-5 * scale, msg=lambda m, k=key: f"{k}: {m}")


@of_a_first_step
def test_held_out_text_has_the_loss_of_one_rank(results, name):
    alone, shared = (json.loads((results / x).with_suffix(".json").read_text()) for x in ("world1_ring1/gradients.pt", name))
    assert list(alone) == ["eval_loss", "eval_loss/0", "eval_loss/8", "eval_loss/16", "eval_loss/32"]
    assert shared == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("ring", [1, 2, 4])
def test_held_out_text_is_evaluated_regularly_and_at_the_end(results, ring):
    alone, shared = (rows(results / name) for name in ("world1_ring1", f"world4_ring{ring}"))
    assert [row["step"] for row in shared if "eval_loss" in row] == [8, 16, 20]
    assert [row["eval_loss"] for row in shared if "eval_loss" in row] == pytest.approx(
        [row["eval_loss"] for row in alone if "eval_loss" in row], rel=1e-4
    )
    summary = json.loads((results / f"world4_ring{ring}" / "summary.json").read_text())
    assert summary["eval_loss"] == shared[-1]["eval_loss"] < shared[7]["eval_loss"]


def test_evaluations_leave_training_alone(results):
    assert rows(results / "world4_ring4")[0].keys() == rows(results / "unevaluated")[-1].keys()
    assert torch.equal(losses(results / "world4_ring4"), losses(results / "unevaluated"))


@pytest.mark.parametrize("ring", [1, 2, 4])
def test_the_same_text_is_generated(results, ring):
    alone, shared = (json.loads((results / f"{x}/tokens.json").read_text()) for x in ("world1_ring1", f"world4_ring{ring}"))
    assert shared == alone
    assert [len(tokens) for tokens in alone] == [8, 9, 48]


@pytest.mark.parametrize("choice", [True, None], ids=["asked for", "where memory is short"])
def test_activation_checkpointing_never_runs_attention_twice(choice, results, monkeypatch):
    calls, blocks = [], []
    forward, after = ringattn.attention.Ring.forward, Block.after
    monkeypatch.setattr(memory, "is_tight", lambda needed, device: True)
    monkeypatch.setattr(Block, "after", lambda *arguments: blocks.append(1) or after(*arguments))

    def count(*arguments, **options):
        calls.append(arguments)
        return forward(*arguments, **options)

    monkeypatch.setattr(ringattn.attention.Ring, "forward", count)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", results / "cache")
    with one_rank():
        run = run_setup.build(job(str(results / "corpus" / "*.txt"), 1, activation_checkpointing=choice))
        step.take_step(run, 1, consumed=0)
    assert len(calls) == SEQUENCES * 2  # micro-steps, layers
    assert len(blocks) == 2 * len(calls)  # all else runs again
