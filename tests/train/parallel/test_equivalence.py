"""Training on several ranks equals training on one rank, for every mesh, layout, schedule and with recomputation."""

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import datasets
import pytest
import torch
import torch.distributed as dist

from ringattn.train import setup as run_setup
from ringattn.train import step, trainer
from ringattn.train.inference import losses as evaluation
from ringattn.train.inference.generation import generate
from ringattn.train.reports import metrics
from ringattn.train.settings.config import Config, TrainerConfig, with_settings
from tests.distributed import run_ranks
from tests.train.chats import chat_job, write_chat_corpus
from tests.train.jobs import CHUNKED, OFFLOAD, RECOMPUTE, job, one_rank
from tests.train.launch import write_corpus

# Ways in which four ranks share a step: the number of data-parallel ranks, and the settings of `parallel`.
MESHES = {
    "dp 2 x ring 2": (2, dict(ring=2)),
    "ring 2 x ulysses 2": (1, dict(ring=4, ulysses=2, layout="auto", memory=CHUNKED)),
}
SLOW_MESHES = {
    "dp 4": (4, dict(ring=1)),
    "ring 4": (1, dict(ring=4)),
    "ring 4, contiguous, state": (
        1,
        dict(ring=4, ulysses=1, layout="contiguous", schedule="state", memory=RECOMPUTE),
    ),
    "ring 4, striped, kv": (1, dict(ring=4, ulysses=1, layout="striped", schedule="kv", memory=RECOMPUTE)),
    "ring 4, zigzag, kv": (1, dict(ring=4, layout="zigzag", schedule="kv", memory=OFFLOAD)),
}
CHAT_MESH = (2, dict(ring=2))
RINGS = [1, 2, 4]
# In these steps, the loss falls by a third.
TEN_STEPS = {"trainer.steps": 10, "trainer.eval_every": 4, "optim.lr": 1e-2}


def mixed(config: Config) -> Config:
    """The settings with one sliding and one full layer."""
    return with_settings(config, {"model.layer_types": ["sliding", "full-nope"], "model.window": 20})


def prepare(directory: Path) -> None:
    """Prepare a rank for runs that use the cache in `directory`."""
    os.environ["LOCAL_WORLD_SIZE"] = str(dist.get_world_size())
    datasets.config.HF_DATASETS_CACHE = directory / "cache"


@patch.object(evaluation, "SHORTEST_LENGTH", 16)
def first_step(config: Config) -> dict:
    """Return the losses on held-out text before the first step, and the gradients of all parameters in that step."""
    run = run_setup.build(config)
    losses = evaluation.evaluate(run)
    run.optimizer.zero_grad = lambda: None
    # The update gathers the parameters again for the next step. The gathered parameters have no gradients.
    run.model.unshard = lambda: None
    step.take_step(run, 1, consumed=0)
    return {"losses": losses, "gradients": {name: x.grad.full_tensor() for name, x in run.model.named_parameters()}}


def write_first_steps(corpus: str, directory: Path, meshes: dict) -> None:
    prepare(directory)
    results = {name: first_step(job(corpus, dp, **settings)) for name, (dp, settings) in meshes.items()}
    if meshes == MESHES:
        results["mixed"] = first_step(mixed(job(corpus, 1, **MESHES["ring 2 x ulysses 2"][1])))
        results["chat"] = first_step(chat_job(directory / "chat", CHAT_MESH[0], **CHAT_MESH[1]))
    if dist.get_rank() == 0:
        torch.save(results, directory / f"{len(meshes)}_meshes.pt")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("equivalence")


@pytest.fixture(scope="module")
def corpus(directory) -> str:
    write_chat_corpus(directory / "chat")
    return write_corpus(directory / "corpus")


@pytest.fixture(scope="module")
def first_step_of_one_rank(corpus, directory) -> dict:
    with one_rank():
        prepare(directory)
        return first_step(job(corpus, 1, ring=1))


@pytest.fixture(scope="module")
def first_steps(corpus, directory, first_step_of_one_rank) -> dict:
    run_ranks(write_first_steps, 4, directory / "store", corpus, directory, MESHES)
    return torch.load(directory / f"{len(MESHES)}_meshes.pt")


@pytest.fixture(scope="module")
def slow_first_steps(corpus, directory, first_step_of_one_rank) -> dict:
    run_ranks(write_first_steps, 4, directory / "slow_store", corpus, directory, SLOW_MESHES)
    return torch.load(directory / f"{len(SLOW_MESHES)}_meshes.pt")


def assert_equal_steps(result: dict, expected: dict) -> None:
    assert {"eval_loss", "eval_loss_at/16", "eval_loss_at/61", "eval_targets"} <= expected["losses"].keys()
    # The difference between two almost equal losses has a larger relative error than the losses.
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5, abs=1e-6)
    assert result["gradients"].keys() == expected["gradients"].keys()
    assert len(expected["gradients"]) == 2 + 2 * 9
    for name, gradient in expected["gradients"].items():
        scale = float(gradient.abs().max())
        assert scale > 0
        # Sums in another order differ by rounding in fp32.
        torch.testing.assert_close(result["gradients"][name], gradient, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_and_evaluations_equal_those_of_one_rank(mesh, first_steps, first_step_of_one_rank):
    assert_equal_steps(first_steps[mesh], first_step_of_one_rank)


def test_mixed_layers_have_the_gradients_and_evaluations_of_one_rank(corpus, directory, first_steps, first_step_of_one_rank):
    with one_rank():
        prepare(directory)
        expected = first_step(mixed(job(corpus, 1, ring=1)))
    assert_equal_steps(first_steps["mixed"], expected)
    assert expected["losses"] != first_step_of_one_rank["losses"]


def test_conversations_train_as_on_one_rank(directory, first_steps):
    """Ranks and micro-steps have different numbers of labels. The loss is the mean over all labels of the step."""
    with one_rank():
        prepare(directory)
        assert_equal_steps(first_steps["chat"], first_step(chat_job(directory / "chat", 1, ring=1)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SLOW_MESHES)
def test_gradients_and_evaluations_of_more_meshes_equal_those_of_one_rank(mesh, slow_first_steps, first_step_of_one_rank):
    assert_equal_steps(slow_first_steps[mesh], first_step_of_one_rank)


@pytest.mark.slow
def test_recomputation_does_not_change_gradients(corpus, directory, first_step_of_one_rank):
    with one_rank():
        prepare(directory)
        result = first_step(job(corpus, 1, ring=1, layout="striped", schedule="kv", memory=RECOMPUTE))
    assert_equal_steps(result, first_step_of_one_rank)


# Settings of a model with experts. The load-balancing loss has a large factor, so that an error in it would be seen.
EXPERTS = {"model.experts": 4, "model.ffn_dim": 24, "model.balance_loss": 3.0}
EXPERTS |= {"model.expert_bias": True, "model.activation": "clamped", "model.sinks": True}  # gpt-oss
# Ways in which two ranks share micro-steps of two sequences: sequences per rank, and the settings of `parallel`.
EXPERT_MESHES = {
    "dp 2": (1, dict(ring=1)),
    "ring 2": (2, dict(ring=2, memory=CHUNKED)),
}


def expert_step(corpus: str, directory: Path, batch_size: int, **parallel_settings: object) -> dict:
    """Return the record and the gradients of a step with experts, whose micro-steps have two sequences on all ranks."""
    prepare(directory)
    config = with_settings(job(corpus, 2, **parallel_settings), {"trainer.batch_size": batch_size, **EXPERTS})
    run = run_setup.build(config)
    run.optimizer.zero_grad = lambda: None
    run.model.unshard = lambda: None
    record, _ = step.take_step(run, 1, consumed=0)
    gradients = {name: x.grad.full_tensor() for name, x in run.model.named_parameters()}
    return {name: record[name] for name in ("loss", "balance_loss", "expert_imbalance", "grad_norm")} | {"gradients": gradients}


def write_expert_steps(corpus: str, directory: Path) -> None:
    results = {name: expert_step(corpus, directory, size, **settings) for name, (size, settings) in EXPERT_MESHES.items()}
    if dist.get_rank() == 0:
        torch.save(results, directory / "experts.pt")


@pytest.mark.slow
def test_experts_have_the_same_losses_and_gradients_on_two_ranks(corpus, directory):
    """Without the all-reduce of the tokens per expert, the gradients of the routers would differ."""
    with one_rank():
        expected = expert_step(corpus, directory, 2, ring=1)
    run_ranks(write_expert_steps, 2, directory / "experts", corpus, directory)
    assert expected["balance_loss"] > 2
    assert expected["expert_imbalance"] > 1
    wanted = expected.pop("gradients")
    assert {"blocks.0.experts.router.weight", "blocks.1.sinks"} <= wanted.keys()
    for result in torch.load(directory / "experts.pt").values():
        gradients = result.pop("gradients")
        assert result == pytest.approx(expected, rel=1e-5)
        for name, gradient in wanted.items():
            scale = float(gradient.abs().max())
            assert scale > 0
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * scale)


def greedy_tokens(config: Config, prompt: list[int]) -> list[int]:
    """Return a prompt and the eight most likely tokens after it, by a model with random weights."""
    run = run_setup.build(config)
    # No token equals `eos`, because the vocabulary ends before it. Therefore no text ends early.
    run = replace(run, tokenizer=SimpleNamespace(vocab_size=256, eos=256, bos=0))
    return generate(run, prompt, 8, temperature=0.0)


@patch.object(evaluation, "SHORTEST_LENGTH", 16)
def write_runs(corpus: str, directory: Path) -> None:
    """Train with every ring that divides the number of ranks, and generate some text."""
    prepare(directory)
    ranks = dist.get_world_size()
    jobs = {f"ring{ring}": job(corpus, ranks // ring, ring=ring) for ring in RINGS if ranks % ring == 0}
    jobs["mixed"] = mixed(job(corpus, 1, ring=ranks))
    for name, config in jobs.items():
        config = with_settings(config, TEN_STEPS)
        path = directory / f"ranks{ranks}_{name}"
        trainer.train(config, path)
        tokens = [greedy_tokens(config, prompt) for prompt in ([], [65], list(range(40, 80)))]
        if dist.get_rank() == 0:
            (path / "tokens.json").write_text(json.dumps(tokens))
    config = chat_job(directory / "chat", max(ranks // 2, 1), ring=min(ranks, 2))
    trainer.train(with_settings(config, TEN_STEPS), directory / f"ranks{ranks}_chat")
    if ranks == 4:
        config = with_settings(job(corpus, 1, ring=4), TEN_STEPS)
        values = {"data.eval_split": None, "data.eval_fraction": 0.0}
        values |= {f"trainer.{name}": getattr(TrainerConfig, name) for name in ("eval_every", "eval_tokens")}
        trainer.train(with_settings(config, values), directory / "without_evaluation")


@pytest.fixture(scope="module")
def runs(corpus, directory) -> Path:
    run_ranks(write_runs, 4, directory / "runs_store", corpus, directory)
    with one_rank():
        write_runs(corpus, directory)
    return directory


def read_records(path: Path) -> list[dict[str, float]]:
    return metrics.read(path / "metrics.jsonl")


def losses(path: Path) -> torch.Tensor:
    return torch.tensor([record["loss"] for record in read_records(path)])


@pytest.mark.slow
@pytest.mark.parametrize("job", ["ring1", "ring2", "ring4", "mixed"])
def test_losses_of_ten_steps_equal_those_of_one_rank(job, runs):
    expected, result = (losses(runs / name) for name in ("ranks1_mixed" if job == "mixed" else "ranks1_ring1", f"ranks4_{job}"))
    assert len(result) == 10
    assert expected[-1] < 0.8 * expected[0]
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_losses_of_conversations_fall_and_equal_those_of_one_rank(runs):
    expected, result = losses(runs / "ranks1_chat"), losses(runs / "ranks4_chat")
    assert expected[-1] < 0.8 * expected[0]
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=0)
    evaluations = [read_records(runs / name)[-1]["eval_loss"] for name in ("ranks1_chat", "ranks4_chat")]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ring", RINGS)
def test_held_out_text_is_evaluated_regularly_and_at_the_end(ring, runs):
    expected, result = (
        {record["step"]: record["eval_loss"] for record in read_records(runs / name) if "eval_loss" in record}
        for name in ("ranks1_ring1", f"ranks4_ring{ring}")
    )
    assert list(result) == [4, 8, 10]
    assert result[10] < result[4]
    assert result == pytest.approx(expected, rel=1e-4)
    summary = json.loads((runs / f"ranks4_ring{ring}" / "summary.json").read_text())
    assert summary["eval_loss"] == result[10]


@pytest.mark.slow
def test_evaluations_do_not_change_the_training(runs):
    first, last = read_records(runs / "ranks4_ring4")[0], read_records(runs / "without_evaluation")[-1]
    assert last.keys() == first.keys() | {"checkpoint_s"}, "only a checkpoint follows the last step"
    assert torch.equal(losses(runs / "ranks4_ring4"), losses(runs / "without_evaluation"))


@pytest.mark.slow
@pytest.mark.parametrize("job", ["ring1", "ring2", "ring4", "mixed"])
def test_generated_text_equals_that_of_one_rank(job, runs):
    one_rank = "ranks1_mixed" if job == "mixed" else "ranks1_ring1"
    expected, result = (json.loads((runs / name / "tokens.json").read_text()) for name in (one_rank, f"ranks4_{job}"))
    assert result == expected
    assert [len(tokens) for tokens in expected] == [8, 9, 48]
