"""Tests of the choices that are made when a run is built: kernels, the number of Ulysses ranks, recomputation, precision."""

import math
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import torch.distributed as dist

from ringattn.train import setup as run_setup
from ringattn.train import step
from ringattn.train.data.packing import PackedDataset
from ringattn.train.model.gpt import Block
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.capacity import COMFORTABLE_FRACTION, Capacity
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.settings.config import (
    Config,
    ConfigError,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    TrainerConfig,
    with_settings,
)
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank


def check_one_choice() -> None:
    """On every rank: all ranks use the choice of rank 0, although each rank predicts another one."""
    run_setup.best_ulysses_degree = lambda *args, **options: 1 + dist.get_rank()
    assert run_setup._best_ulysses(Config(), 2, torch.device("cpu"), bf16=False) == 1


def test_all_ranks_use_the_number_of_ulysses_ranks_of_rank_0(tmp_path):
    run_ranks(check_one_choice, 2, tmp_path / "store")


def check_text_of_ranks(directory: Path) -> None:
    """On every rank: each host has a cache of its own, and other files with the same names and lengths."""
    datasets.config.HF_DATASETS_CACHE = directory / f"cache {dist.get_rank()}"
    corpus = directory / f"host {dist.get_rank()}"
    corpus.mkdir()
    for i in range(20):
        (corpus / f"{i}.txt").write_text(f"{dist.get_rank()}" * 400)
    with pytest.raises(
        ConfigError, match=r"the text of .* differs between the ranks: rank 1 has another one; copy the same files"
    ):
        run_setup.find_resources(job(str(corpus), 1, ring=2))
    run_setup.find_resources(job(str(corpus / ".." / "host 0"), 1, ring=2))


def test_text_that_differs_between_hosts_is_an_error(tmp_path):
    run_ranks(check_text_of_ranks, 2, tmp_path / "store", tmp_path)


def test_a_damaged_document_is_not_reported_as_another_text(corpus, monkeypatch):
    """The checksum of the text reads documents. If only one rank has an error, the error must also reach the others."""
    damaged = property(lambda self: (_ for _ in ()).throw(ConfigError("a document is damaged")))
    monkeypatch.setattr(PackedDataset, "fingerprint", damaged)
    with one_rank(), pytest.raises(ConfigError, match=r"^a document is damaged$"):
        run_setup.find_resources(job(corpus, 1))


def test_a_router_that_cannot_learn_is_rejected(corpus):
    config = with_settings(job(corpus, 1), {"model.experts": 3, "model.experts_per_token": 1})
    with one_rank():
        with pytest.raises(ConfigError, match="so the router would not learn"):
            run_setup.find_resources(config)
        run_setup.find_resources(with_settings(config, {"model.normalise_top_k": False}))


@pytest.mark.parametrize(("done", "consumed", "steps"), [(0, 0, 5), (2, 8, 3), (4, 4, 7), (9, 12, 9)])
def test_a_resumed_run_ends_before_its_text_runs_out(done, consumed, steps):
    """The text has 11 sequences, and a step has two. Earlier steps may have had other numbers of sequences."""
    mesh, data = SimpleNamespace(dp=SimpleNamespace(size=lambda: 2)), SimpleNamespace(sequences_per_epoch=11)
    config = with_settings(Config(), {"data.exhausted": "end", "trainer.batch_size": 1})
    with one_rank():
        assert run_setup.end_with_text(config, data, mesh, done, consumed).trainer.steps == steps
        config = with_settings(config, {"optim.warmup_steps": steps + 1})
        with pytest.raises(ConfigError, match=f"must not exceed trainer.steps={steps}"):
            run_setup.end_with_text(config, data, mesh, done, consumed)


def check_fastest_mesh() -> None:
    """On every rank: all ranks use the mesh that rank 0 chooses."""
    run_setup.machine_of = lambda *args: SimpleNamespace(gpu=True)
    run_setup.prediction.fastest_shape = lambda config, machine: MeshShape(2 - dist.get_rank(), 1, 1)
    config = Config(parallel=ParallelConfig(mesh="fastest", ring=2, ulysses=2))
    config = with_settings(config, {"trainer.tokens_per_step": 1024, "trainer.batch_size": 1, "trainer.device": "cpu"})
    config = run_setup.choose_fastest_mesh(config)
    assert (config.parallel.mesh, config.parallel.ring, config.parallel.ulysses) == ("fastest", 1, 1)


def test_all_ranks_use_the_fastest_mesh_of_rank_0(tmp_path):
    """The mesh that an earlier launch has chosen does not matter."""
    run_ranks(check_fastest_mesh, 2, tmp_path / "store")


def test_evaluation_does_not_choose_a_mesh():
    config = Config(parallel=ParallelConfig(mesh="fastest"))
    with pytest.raises(ConfigError, match=r"parallel\.mesh=fastest .*parallel\.ring"):
        run_setup.choose_mesh(config, torch.device("cpu"), bf16=False)


@pytest.mark.parametrize(("window", "ranks", "ulysses"), [(None, 4, 4), (None, 16, 8), (1024, 4, 1), (1024, 16, 1)])
def test_number_of_ulysses_ranks_comes_from_the_cost_model(window, ranks, ulysses, monkeypatch):
    """On the GPUs of one host, and of two hosts with eight GPUs each. A window makes the ring cheaper than the all-to-all."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(ranks, 8)))
    monkeypatch.setattr(run_setup, "attention_flops", lambda device: 5.8e14)
    monkeypatch.setattr(run_setup, "broadcast_object", lambda value: value)
    model = ModelConfig(dim=2048, heads=16, kv_heads=16, window=window)
    config = Config(model=model, data=DataConfig(seq_len=65536))
    config = with_settings(config, {"parallel.layout": "auto", "trainer.batch_size": 1})
    assert run_setup._best_ulysses(config, ranks, torch.device("cuda"), bf16=True) == ulysses


@pytest.mark.parametrize("kernel", ["triton", "hopper"])
def test_kernels_for_gpus_are_an_error_on_cpus(kernel):
    config = Config(parallel=ParallelConfig(kernel=kernel))
    with pytest.raises(ConfigError, match=f"parallel.kernel={kernel} .*parallel.kernel=auto"):
        run_setup.choose_backend(config, torch.device("cpu"), bf16=False)


def test_error_of_kernels_names_the_setting(monkeypatch):
    """The Hopper kernels support neither fp32 nor other devices than Hopper GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = Config(trainer=TrainerConfig(precision="fp32"), parallel=ParallelConfig(kernel="hopper"))
    with pytest.raises(ConfigError, match=r"parallel\.kernel=hopper: .*float32"):
        run_setup.choose_backend(config, torch.device("cuda", 7), bf16=False)


@pytest.mark.parametrize(("setting", "device", "expected"), [(None, "cpu", False), (None, "cuda", True), (True, "cpu", True)])
def test_compile_is_the_default_on_cuda_only(setting, device, expected):
    config = Config(trainer=TrainerConfig(compile=setting))
    assert run_setup.uses_compile(config, torch.device(device)) == expected


@pytest.mark.parametrize(
    ("precision", "device", "bf16"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("bf16", "cpu", True), ("fp32", "cuda", False)],
)
def test_bf16_is_the_default_on_cuda_only(precision, device, bf16, monkeypatch):
    monkeypatch.setattr(run_setup, "pick_device", lambda choice: torch.device(device))
    monkeypatch.setattr(run_setup, "choose_backend", lambda *args, **options: "kernel")
    assert run_setup.choose_device(Config(trainer=TrainerConfig(precision=precision)))[1] == bf16


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_training_computes_in_the_precision_of_the_settings(precision, dtype, corpus, monkeypatch):
    """AdamW always updates fp32 parameters."""
    dtypes, after = set(), Block.after
    monkeypatch.setattr(Block, "after", lambda block, x, attention: dtypes.add(attention.dtype) or after(block, x, attention))
    config = job(corpus, 1)
    config = with_settings(config, {"trainer.precision": precision})
    with one_rank():
        run = run_setup.build(config)
        record, _ = step.take_step(run, 1, consumed=0)
    assert dtypes == {dtype}
    assert {x.dtype for group in run.optimizer.param_groups for x in group["params"]} == {torch.float32}
    assert record["loss"] == pytest.approx(math.log(257), abs=0.1)


def test_run_is_built_as_the_settings_say(corpus, monkeypatch):
    """The sizes of a step, the precision, the peak for MFU and the seed of held-out text."""
    config = job(corpus, 1)
    config = with_settings(config, {"trainer.batch_size": 2, "trainer.accumulate": 3, "trainer.peak_tflops": 0.5})
    config = with_settings(config, {"data.seed": 7})
    with one_rank():
        run = run_setup.build(config)
    assert (run.sequences_per_step, run.tokens_per_step, run.peak_flops) == (6, 6 * 61, 0.5e12)
    assert (run.bf16, run.plan, run.init_from, run.init_from_changes) == (False, MemoryPlan(), None, "")
    assert (run.data.seed, run.held_out.seed) == (7, 0), "all runs are evaluated on the same text"


@pytest.mark.slow
def test_blocks_are_recomputed_if_memory_is_short(corpus, monkeypatch):
    plan, config = MemoryPlan(recomputed_blocks=2), job(corpus, 1, MemoryConfig(optimizer="keep"))
    needed = estimate.needs(config, MeshShape(1, 1, 1), 257, False, False, plan).device
    gpu = Capacity(sum(needed.values()) / COMFORTABLE_FRACTION, host=0)
    monkeypatch.setattr(Capacity, "of", lambda device: gpu)
    with one_rank():
        assert run_setup.build(config).plan == plan


def test_error_names_the_vocabulary_of_the_tokenizer(corpus):
    config = job(corpus, 1)
    config = with_settings(config, {"model.vocab_size": 100})
    with one_rank(), pytest.raises(ConfigError, match=r"model\.vocab_size=100 .*257"):
        run_setup.build(config)
