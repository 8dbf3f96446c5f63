"""The accuracy on the recall task: of predictors that are known, on any mesh, during training, and for a finished run."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ringattn.train import preemption
from ringattn.train import setup as run_setup
from ringattn.train.data.recall import FIRST_KEY, FIRST_VALUE, NUM_VALUES, grid_batch
from ringattn.train.inference.generation import _sample
from ringattn.train.inference.recall import count_correct, evaluate_recall
from ringattn.train.model.loss import IGNORE
from ringattn.train.preemption import StoppedEarly
from ringattn.train.reports.recall_results import from_metrics
from ringattn.train.reports.wandb_run import WandbRun
from ringattn.train.settings.config import Config, ConfigError, DataConfig, with_settings
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank

TASK = ["data=recall", "model.dim=32", "data.seq_len=100", "logger=off", "trainer.sample_tokens=0", "trainer.device=cpu"]
VOCABULARY = 257


def recall_job(corpus: str = "", dp: int = 1, **parallel: object) -> Config:
    """The settings of a run on the recall task, with batches of several documents."""
    config = job(corpus, dp, **parallel)
    data = DataConfig(source="recall", seq_len=1100)
    return with_settings(config, {"data": data, "trainer.batch_size": 5, "trainer.eval_tokens": 1})


def predictor(predict: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A model that predicts the tokens which `predict` returns for the tokens (B, N)."""

    def model(tokens, positions, attend, finish):
        return finish(F.one_hot(predict(tokens), VOCABULARY).float(), torch.eye(VOCABULARY))

    return model


def recall_values(tokens: torch.Tensor, window: int) -> torch.Tensor:
    """Predict the value of each key from its fact, if the fact is among the last `window` tokens. Otherwise, predict 0."""
    predicted = torch.zeros_like(tokens)
    for row, document in enumerate(tokens.tolist()):
        facts = {token // NUM_VALUES: position for position, token in enumerate(document) if token < FIRST_KEY}
        for position, token in enumerate(document):
            fact = facts.get(token - FIRST_KEY, -window)
            if position - window < fact:
                predicted[row, position] = FIRST_VALUE + document[fact] % NUM_VALUES
    return predicted


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_model_has_no_accuracy_and_no_text(value):
    labels = torch.full((1, 3), 5)
    hidden = torch.zeros(1, 3, VOCABULARY)
    hidden[0, 1, 2] = value
    with pytest.raises(ConfigError, match="NaN or infinity"):
        count_correct(hidden, torch.eye(VOCABULARY), labels, VOCABULARY)
    for temperature in (0, 0.8):
        with pytest.raises(ConfigError, match="NaN or infinity"):
            _sample(hidden[0, 1], temperature, 1.0, torch.Generator())


def test_perfect_and_random_predictors():
    batch, _ = grid_batch(512, range(3))
    labels = batch.labels
    head = torch.cat([torch.eye(VOCABULARY), 9 * torch.ones(63, VOCABULARY)])  # The last rows are padding.
    perfect = F.one_hot(labels.clamp(min=0), VOCABULARY).float()
    assert count_correct(perfect, head, labels, VOCABULARY).tolist() == [[16, 16]] * 3
    perfect[1, labels[1] != IGNORE] = F.one_hot(torch.tensor(5), VOCABULARY).float()
    assert count_correct(perfect, head, labels, VOCABULARY).tolist() == [[16, 16], [0, 16], [16, 16]]
    batch, _ = grid_batch(64, range(200))
    guesses = FIRST_VALUE + torch.randint(NUM_VALUES, batch.labels.shape, generator=torch.Generator().manual_seed(0))
    guesses = F.one_hot(guesses, VOCABULARY).float()
    correct, total = count_correct(guesses, head, batch.labels, VOCABULARY).sum(0).tolist()
    # Of 3,200 guesses, 267 are correct on average, with a standard deviation of 16.
    assert total == 3200
    assert 190 < correct < 345


def test_cells_show_where_a_predictor_finds_the_answers():
    """A predictor with a window finds all answers in short sequences. In long sequences, it finds those in the window."""
    config = recall_job()
    with one_rank():
        run = run_setup.build(config)
        run = replace(run, model=predictor(lambda tokens: recall_values(tokens, window=550)))
        accuracies = evaluate_recall(run, [1100, 550])
    assert list(accuracies) == [(length, position) for length in (1100, 550) for position in range(0, 101, 10)]
    assert all(accuracies[550, position] == 1 for position in range(0, 101, 10))
    found = [accuracies[1100, position] for position in range(0, 101, 10)]
    assert found[0] == 0
    assert found[-1] == 1
    assert found == sorted(found)


@pytest.mark.parametrize("batch_size", [1, 44], ids=["between batches", "between lengths"])
def test_request_to_stop_ends_the_evaluation(batch_size, monkeypatch):
    config, calls = recall_job(), []
    config = with_settings(config, {"trainer.batch_size": batch_size})
    with one_rank():
        run = run_setup.build(config)
        run = replace(run, model=predictor(lambda tokens: calls.append(len(tokens)) or tokens))
        monkeypatch.setattr(preemption, "stop_requested", lambda time_limit_s: bool(calls))
        with pytest.raises(StoppedEarly):
            evaluate_recall(run, [64, 64, 64])
    assert calls == [batch_size] * 2


def fixed_values(tokens: torch.Tensor) -> torch.Tensor:
    """A predictor that ignores all other tokens: it always predicts the same value for a key."""
    return FIRST_VALUE + (tokens * 7) % NUM_VALUES


def write_accuracies(directory: Path, ring: int) -> None:
    run = run_setup.build(recall_job(ring=ring))
    run = replace(run, model=predictor(fixed_values))
    accuracies = evaluate_recall(run, [1100, 513])
    if torch.distributed.get_rank() == 0:
        (directory / "accuracies.json").write_text(json.dumps(list(accuracies.values())))


def read_accuracies(directory: Path) -> list[float]:
    return json.loads((directory / "accuracies.json").read_text())


@pytest.mark.slow
def test_accuracies_do_not_depend_on_the_ranks(tmp_path):
    """Two groups of ranks evaluate different documents, and both ranks of a group share each document."""
    with one_rank():
        write_accuracies(tmp_path, ring=1)
    expected = read_accuracies(tmp_path)
    assert 0 < max(expected) < 0.4
    run_ranks(write_accuracies, 4, tmp_path / "store", tmp_path, 2)
    assert read_accuracies(tmp_path) == expected


def records(name: str) -> list[dict[str, float]]:
    return [json.loads(text) for text in Path("outputs", name, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_training_writes_the_accuracies_and_resumes_exactly(run_command_line, only_error, monkeypatch):
    pictures = []
    monkeypatch.setattr(WandbRun, "log_picture", lambda self, name, step, path: pictures.append((name, step, path.name)))
    settings = [*TASK, "trainer.batch_size=8", "trainer.steps=4", "trainer.checkpoint_every=2", "trainer.eval_tokens=1"]
    assert run_command_line(*settings, "name=whole") == 0
    last = records("whole")[-1]
    accuracies = from_metrics(last)
    assert list(accuracies) == [(100, position) for position in range(0, 101, 10)]
    assert last["recall_accuracy"] == accuracies[100, 0]
    assert json.loads(Path("outputs/whole/summary.json").read_text())["recall_accuracy"] == last["recall_accuracy"]
    assert Path("outputs/whole/recall.png").exists()
    assert ("recall_heat_map", 4, "recall.png") in pictures

    branch = [*settings, "trainer.resume=outputs/whole/checkpoints/step_00000002", "name=branch"]
    assert run_command_line(*branch) == 0
    steps = [
        {name: record[name] for name in record if not name.endswith(("_s", "seconds", "rank", "gib"))}
        for record in [*records("whole")[2:], *records("branch")]
    ]
    assert [each["step"] for each in steps] == [3, 4, 3, 4]
    assert steps[:2] == steps[2:]
    assert run_command_line(*branch[:-1], "data.seed=1", "name=other") == 1
    assert "another corpus" in only_error()


@pytest.mark.slow
def test_full_attention_learns_the_task_and_a_window_does_not(run_command_line):
    """The facts of the positions 0 to 50 are 32 to 127 tokens back, and two layers with a window of 16 see 30 tokens back."""
    settings = ["experiment=recall", "data.seq_len=128", "trainer.steps=100", "trainer.batch_size=8", "logger=off"]
    settings += ["trainer.device=cpu", "trainer.eval_every=0", "trainer.eval_tokens=32768"]
    assert run_command_line(*settings, "name=full") == 0
    full = from_metrics(records("full")[-1])
    assert min(full.values()) > 0.95
    assert run_command_line(*settings, "model.window=16", "name=window") == 0
    accuracies = from_metrics(records("window")[-1])
    assert all(0.02 < accuracies[128, position] < 0.16 for position in range(0, 51, 10)), "chance is 0.083"
