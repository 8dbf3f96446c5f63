"""Tests of the description of a run on the console, and of the facts that Weights & Biases receives."""

import json
import platform
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ringattn import Mask
from ringattn.planning import workload
from ringattn.planning.cost_model import interconnect
from ringattn.planning.rank_plan import Plan
from ringattn.planning.workload import backward_work, forward_work
from ringattn.train import setup as run_setup
from ringattn.train.data.loader import choose_layout
from ringattn.train.reports import description
from ringattn.train.settings.config import with_settings
from ringattn.train.step import take_step
from tests.distributed import run_ranks
from tests.train.hub_models import write_config
from tests.train.jobs import job, one_rank


def test_description_names_what_the_run_uses(corpus, caplog, tmp_path):
    caplog.set_level("INFO")
    with one_rank():
        run = run_setup.build(job(corpus, 1, schedule="kv", route="relay"))
        run = replace(run, init_from=Path("weights"), init_from_changes="model.window=None (now 40)")
        facts = description.run_facts(run)
        description.describe(run, Path("outputs/name"), facts)
        entries = dict(message.split(maxsplit=1) for message in caplog.messages)
        assert entries["directory"] == "outputs/name"
        assert entries["weights"] == "from weights, which were trained with model.window=None (now 40)"
        assert corpus in entries["data"]
        assert "61 tokens" in entries["data"]
        assert "held-out" in entries["data"]
        assert entries["ring"] == "layout auto, 61 tokens per rank, schedule kv, route relay"
        assert "4 sequences, 244 tokens" in entries["step"]
        assert entries["precision"] == "fp32"
        assert "blockwise" in entries["kernel"]
        assert entries["model"].endswith(" parameters, vocabulary 257")
        caplog.clear()
        run = replace(run, config=with_settings(run.config, {"model.vocab_size": 300}), init_from=tmp_path / "hf")
        write_config(run.init_from, max_position_embeddings=32, rope_parameters=None)
        description.describe(
            run,
            Path("outputs/name"),
            facts | {"sequences_per_step": 1, "tokens_per_step": 61, "packing": {"web": facts["packing"][""]}},
        )
        assert "positions   sequences of 61 tokens are longer than the 32 positions of the model" in caplog.text
        assert "vocabulary 257 of 300 rows (the loss ignores the other rows)\n" in caplog.text
        assert any(message.endswith(" 1 sequence, 61 tokens") for message in caplog.messages)
        assert "documents web " in caplog.text


def test_prediction_is_logged_with_the_documents_of_the_text(corpus, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(description, "machine_of", lambda *args: SimpleNamespace(gpu="a GPU"))
    received = []
    monkeypatch.setattr(description.prediction, "describe_step", lambda *arguments: received.append(arguments[3]) or "fast")
    with one_rank():
        run = run_setup.build(with_settings(job(corpus, 1), {"model.layer_types": ["sliding", "full"]}))
        description.describe(run, Path("outputs/name"), description.run_facts(run))
        # The sequences are spread over the epoch.
        assert run.data.sequences_per_epoch >= 2 * description.SAMPLED_SEQUENCES
        distance = run.data.sequences_per_epoch // description.SAMPLED_SEQUENCES
        documents = [run.data.sequence(i * distance)[2] for i in range(description.SAMPLED_SEQUENCES)]
    shares = {}
    for window in (40, None):
        pairs = [sum(Mask.causal(window, [lengths]).pairs(61)) for lengths in documents]
        shares[window] = pytest.approx(sum(pairs) / len(pairs) / Mask.causal(window).pairs(61)[0])
    assert received == [shares]
    assert f"{'prediction':<12}fast" in caplog.messages


def test_facts_are_those_of_the_run(corpus):
    config = job(corpus, 1, schedule="kv", route="relay", layout="striped")
    config = with_settings(config, {"trainer.peak_tflops": 0.5})
    with one_rank():
        run = run_setup.build(config)
        facts = json.loads(json.dumps(description.run_facts(run)))
        assert description.communication_facts(run) == {"transport": None}
    expected = {"kernel": "blockwise", "schedule": "kv", "route": "relay", "layout": "striped", "device": "cpu", "ranks": 1}
    expected |= {"mesh": {"data_parallel": 1, "ring": 1, "ulysses": 1}, "tokens_per_step": 244, "peak_tflops_per_rank": 0.5}
    assert {name: facts[name] for name in expected} == expected
    assert facts["parameters"] == sum(parameter.numel() for parameter in run.model.parameters())
    # The window is 40 tokens, so query i has min(i + 1, 40) keys. The model has two layers of four heads with 8 elements.
    pairs, matrices = 40 * 41 / 2 + 21 * 40, sum(p.numel() for p in run.model.parameters() if p.ndim == 2)
    assert facts["flops_per_token"] == pytest.approx(6 * matrices + 12 * 8 * 4 * 2 * pairs / 61)
    assert facts["versions"]["python"] == platform.python_version()
    assert facts["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert set(facts["versions"]) == {"python", "torch", "triton", "ringattn"}


@pytest.mark.slow
@pytest.mark.parametrize(("route", "schedule"), [("auto", "auto"), ("relay", "kv")])
def test_facts_name_the_transport_and_the_schedules_of_the_ring(route, schedule, corpus, tmp_path):
    run_ranks(check_communication_facts, 2, tmp_path / "store", corpus, route, schedule)


def check_communication_facts(corpus: str, route: str, schedule: str) -> None:
    config = job(corpus, 1, route=route, schedule=schedule)
    run = run_setup.build(config)
    take_step(run, 1, 0)
    with patch.object(workload, "HEAD_CHUNK_FLOPS", 1):  # one chunk per key head
        facts = description.communication_facts(run)
    chosen = "kv" if schedule == "kv" else "state"
    expected = {"transport": "gloo", "route": "relay" if route == "relay" else "direct"}
    expected |= {"schedule_forward": chosen, "schedule_backward": chosen}
    assert {name: facts[name] for name in expected} == expected

    rank = dist.get_rank()
    joined = interconnect("gloo", flops=5e10)._replace(all_pairs=route != "relay")
    mask = Mask.causal(40)
    plan = Plan(mask, choose_layout(config, run.mesh.shape, {40: mask}).whole, rank, torch.device("cpu"))
    q, k = (torch.empty(1, plan.layout.rows(rank), heads, 8, device="meta") for heads in (2, 1))
    hops = [hop for work in (forward_work(q, k, k), backward_work(q, k, k)) for hop in plan.costs(chosen, work, joined)]
    exposed = sum(hop.communication - hop.compute for hop in hops if hop.communication > hop.compute)
    assert exposed > 0
    # Two layers, two chunks of heads and four micro-steps.
    assert facts["predicted_exposed_communication_s_per_step"] == pytest.approx(16 * exposed)


def test_commit_is_that_of_the_clone_of_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr(description, "ROOT", tmp_path)
    assert description.git_commit() is None, "the code is not in a clone"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    assert description.git_commit() is None, "there is no commit"
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "a"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert description.git_commit() == commit
    monkeypatch.setenv("PATH", str(tmp_path))
    assert description.git_commit() is None, "git is not installed"
