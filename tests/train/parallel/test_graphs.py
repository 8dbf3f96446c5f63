"""Blocks that are replayed from CUDA graphs: when graphs are used, and that the results stay the same."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from ringattn.planning.rank_plan import Plan, use_plans
from ringattn.train import setup, step
from ringattn.train.commands.run import CONFIGS
from ringattn.train.inference.losses import evaluate
from ringattn.train.model import float8
from ringattn.train.model import loss as loss_module
from ringattn.train.parallel import graphs
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.capacity import GIB, Capacity, Needs
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape, causal_masks
from ringattn.train.settings.config import Config, ConfigError, DataConfig, ModelConfig, TrainerConfig, with_settings
from tests.distributed import RankPool, gpu_backend, run_ranks
from tests.train.jobs import job, one_rank
from tests.train.test_step import write_short_documents

CUDA = torch.device("cuda", 0)
LAYERS = ["sliding", "full-nope"]
DEFAULT = ModelConfig(layers=4, dim=1024, heads=8, kv_heads=8, ffn_dim=2816, qk_norm=True)


def uses(tokens: int, ranks: int, wanted: bool | None = None, device: torch.device = CUDA, compiled: bool = True) -> bool:
    config = Config(model=DEFAULT, data=DataConfig(seq_len=tokens), trainer=TrainerConfig(cuda_graphs=wanted, batch_size=1))
    return graphs.uses_graphs(config, MeshShape(1, ranks, 1), device, compiled, bf16=True)


def test_only_short_shards_use_graphs():
    assert uses(32_768, 4)
    assert uses(32_768, 1)
    assert not uses(262_144, 4)
    assert not uses(65_536, 1)
    assert uses(262_144, 4, wanted=True)
    assert not uses(32_768, 4, wanted=False)
    assert not uses(32_768, 4, device=torch.device("cpu"))
    assert not uses(32_768, 4, compiled=False)


def test_large_models_do_not_use_graphs():
    """Each rank would keep all parameters of the model, which FSDP shards."""
    model = ModelConfig(layers=32, dim=4096, heads=32, kv_heads=32, ffn_dim=11_008)
    config = Config(model=model, data=DataConfig(seq_len=4096), trainer=TrainerConfig(batch_size=1))
    assert not graphs.uses_graphs(config, MeshShape(1, 8, 1), CUDA, compiled=True, bf16=True)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_one_rank_uses_graphs_for_larger_models(in_fp8):
    """A model of 500 MiB has two FSDP groups on two ranks, but a single group on one rank."""
    trainer = TrainerConfig(batch_size=1, float8=in_fp8)
    config = Config(model=replace(DEFAULT, layers=20), data=DataConfig(seq_len=8192), trainer=trainer)
    found = [graphs.uses_graphs(config, MeshShape(1, ranks, 1), CUDA, True, bf16=True) for ranks in (1, 2)]
    assert found == [True, False]


def test_shards_of_different_lengths_cannot_be_captured():
    """The zigzag layout of two ranks has four pieces. Assigned shards are equal only if all chunks are."""
    assert uses(32_768, 2, wanted=True)
    assert uses(32_767, 1, wanted=True)
    for tokens in (32_766, 40_960):
        assert not uses(tokens, 2)
        with pytest.raises(ConfigError, match="an equal share, such as 16,384"):
            uses(tokens, 2, wanted=True)


def test_layers_with_different_masks_are_captured_only_without_a_ring():
    """Windows that are equal in all layers are one mask."""
    config = Config(model=DEFAULT, data=DataConfig(seq_len=32_768), trainer=TrainerConfig(batch_size=1))
    for layer_types, expected in ((LAYERS, [True, False]), (["sliding", "sliding-nope"], [True, True])):
        mixed = with_settings(config, {"model.layer_types": layer_types, "model.window": 300})
        shapes = MeshShape(1, 1, 1), MeshShape(1, 4, 1)
        assert [graphs.uses_graphs(mixed, shape, CUDA, compiled=True, bf16=True) for shape in shapes] == expected


@pytest.mark.parametrize("kernel", ["blockwise", "reference"])
def test_attention_of_pytorch_is_not_captured(kernel):
    """PyTorch's attention reads the mask on the host."""
    config = Config(model=DEFAULT, data=DataConfig(seq_len=32_768), trainer=TrainerConfig(batch_size=1))
    config = with_settings(config, {"parallel.kernel": kernel})
    assert not graphs.uses_graphs(config, MeshShape(1, 2, 1), CUDA, compiled=True, bf16=True)


def test_graphs_that_do_not_fit_are_used_only_if_they_are_requested():
    config = Config(model=DEFAULT, data=DataConfig(seq_len=32_768), trainer=TrainerConfig(batch_size=1))
    situation = MeshShape(1, 4, 1), CUDA, True, True, 257, Needs({"activations": 1.5 * GIB}, {})
    found = []
    for gib, wanted in ((3, None), (2, None), (2, True)):
        config = with_settings(config, {"trainer.cuda_graphs": wanted})
        graphed, needs = graphs.choose_graphs(config, *situation, Capacity(gib * GIB, 0))
        found.append((graphed, list(needs.device)))
    names = ["activations", "CUDA graphs"]
    assert found == [(True, names), (False, names[:1]), (True, names)]


@pytest.mark.parametrize(
    ("model", "seq_len", "shape", "peak"),
    [
        # The first two runs evaluate their model.
        ("52m", 32_768, (1, 1, 1), 6.60),
        ("52m", 131_072, (1, 4, 1), 6.88),
        ("52m", 32_768, (2, 1, 1), 5.88),
        ("52m", 32_768, (1, 4, 1), 2.02),
        ("52m", 32_768, (1, 1, 2), 3.57),
        ("52m", 65_536, (1, 2, 1), 6.13),
        ("52m", 131_072, (1, 4, 1), 6.31),
        ("124m", 65_536, (1, 2, 1), 11.64),
        ("124m", 65_536, (1, 4, 1), 6.61),
    ],
)
def test_the_memory_of_graphs_is_estimated(model, seq_len, shape, peak):
    """The measured peaks of runs with graphs on H200s, in GiB. The estimate is within 10% of the peak."""
    config = Config(data=DataConfig(seq_len=seq_len), trainer=TrainerConfig(batch_size=1))
    assert gib_with_graphs(config, model, shape) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(("in_fp8", "peak"), [(False, 22.98), (True, 22.11)])
def test_the_memory_of_graphs_with_several_micro_steps_is_estimated(in_fp8, peak):
    """The measured peaks of runs on one H200, in GiB."""
    trainer = TrainerConfig(batch_size=4, accumulate=4, float8=in_fp8)
    config = Config(data=DataConfig(seq_len=4096), trainer=trainer)
    assert gib_with_graphs(config, "350m", (1, 1, 1)) == pytest.approx(peak, rel=0.1)


def gib_with_graphs(config: Config, model: str, shape: tuple[int, int, int]) -> float:
    config = with_settings(config, {"model": ModelConfig(**OmegaConf.load(CONFIGS / "model" / f"{model}.yaml"))})
    needed = sum(estimate.needs(config, MeshShape(*shape), 257, True, True, MemoryPlan()).device.values())
    return (needed + graphs.graph_bytes(config, MeshShape(*shape), 257, bf16=True)) / GIB


@pytest.mark.parametrize("impossible", [{"device": torch.device("cpu")}, {"compiled": False}])
def test_graphs_that_are_impossible_are_rejected(impossible):
    with pytest.raises(ConfigError, match=r"trainer\.cuda_graphs=true requires a CUDA device"):
        uses(32_768, 4, wanted=True, **impossible)


@pytest.fixture
def no_capture(monkeypatch):
    """Without a GPU, the function that is captured is called directly, and its loss is not compiled."""
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda function, inputs, **options: function)
    monkeypatch.setattr(loss_module, "_compiled", lambda function: function)


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("in_fp8", [False, True])
def test_graphs_compute_the_loss_and_the_gradients_of_the_model(in_fp8, corpus, monkeypatch):
    """The mask has no documents, so it never changes."""
    monkeypatch.setattr(float8, "check", lambda *arguments: None)
    config = with_settings(job(corpus, 1), {"trainer.float8": in_fp8})
    config = with_settings(config, {"data.mask_documents": False, "trainer.accumulate": 1, "model.layer_types": LAYERS})
    with one_rank():
        run = setup.build(config)
        ready = step.prepare_step(run, 0)
        (micro_step,), results = ready.micro_steps, []
        for graphed in (False, True):
            if graphed:
                captured = graphs.ModelGraphs(run.model, config, run.mesh, run.tokenizer.vocab_size, False, run.device)
                run = replace(run, graphs=captured)
            loss = step.compute_loss(run, micro_step, ready.num_labels)
            loss.backward()
            results.append((loss.item(), [x.grad.full_tensor() for x in run.model.parameters()]))
            run.model.zero_grad()
        assert run.graphs.pack(micro_step.masks, micro_step.layout, []) == []
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1])


def graph_job(corpus: str, wanted: bool) -> Config:
    """A sliding and a full layer on a GPU, with two micro-steps per step and several documents per sequence.

    Some programs have no work.
    """
    config = job(corpus, 1)
    values = {"model": ModelConfig(layers=2, dim=128, heads=2, kv_heads=1, qk_norm=True, window=300, layer_types=LAYERS)}
    values |= {"data.path": str(Path(graphs.__file__).parents[1] / "*" / "*.py"), "data.seq_len": 4096, "optim.lr": 1e-3}
    trainer = {"device": "cuda", "cuda_graphs": wanted, "accumulate": 2, "steps": 4}
    return with_settings(config, values | {f"trainer.{name}": value for name, value in trainer.items()})


def losses_of(config: Config, evaluated: bool = True) -> list[float]:
    """Take four steps. Return their losses. If `evaluated`, losses on the held-out text follow, which do not use graphs."""
    run = setup.build(config)
    with closing(run.loader):
        assert (run.graphs is not None) == config.trainer.cuda_graphs
        losses = [step.take_step(run, i, run.sequences_per_step * (i - 1))[0]["loss"] for i in range(1, 5)]
        return losses + (list(evaluate(run).values()) if evaluated else [])


@pytest.mark.usefixtures("no_capture")
def test_a_plan_that_was_not_computed_ahead_is_computed(corpus):
    """Otherwise, a graph would use the documents of an earlier step. The two layers have different masks."""
    config = with_settings(job(corpus, 1), {"model.layer_types": LAYERS})
    with one_rank():
        run = setup.build(config)
        run = replace(run, graphs=graphs.ModelGraphs(run.model, config, run.mesh, run.tokenizer.vocab_size, False, run.device))
        (micro_step, *_) = step.prepare_step(run, 0).micro_steps
        masks, layout = micro_step.masks, micro_step.layout
        assert list(micro_step.plans) == []
        plans = [Plan(mask, layout.whole, 0, run.device, is_fixed=True) for mask in masks.values()]
        other = causal_masks(config.model, [[20, config.data.seq_len - 20]])
        packed = zip(micro_step.packed, run.graphs.pack(masks, layout, plans), run.graphs.pack(other, layout, []), strict=True)
        assert [(torch.equal(a, b), torch.equal(a, c)) for a, b, c in packed] == [(True, False)] * 2


@pytest.mark.slow
def test_slots_of_mixed_layers_give_the_losses_of_a_ring(tmp_path):
    """On two CPU ranks, the reference kernel reads the documents of every micro-step from the slots of its window."""
    run_ranks(check_slots, 2, tmp_path, write_short_documents(tmp_path / "short"))


def check_slots(corpus: str) -> None:
    torch.cuda.make_graphed_callables = lambda function, inputs, **options: function
    config = with_settings(job(corpus, 1, ring=2, schedule="kv", kernel="reference"), {"data.seq_len": 64, "model.window": 9})
    config = with_settings(config, {"model.layer_types": LAYERS})
    run, losses = setup.build(config), []
    captured = graphs.ModelGraphs(run.model, config, run.mesh, run.tokenizer.vocab_size, False, run.device)
    for graphed in (False, True):
        run = replace(run, prepared={}, graphs=captured if graphed else None)
        ready = step.prepare_step(run, 0)
        for micro_step in ready.micro_steps:
            # A graph would have captured the plans.
            with use_plans([slots.plan for slots in captured.slots] if graphed else []):
                losses.append(step.compute_loss(run, micro_step, ready.num_labels))
                losses[-1].backward()
        losses += [x.grad.full_tensor().double().square().sum() for x in run.model.parameters()]
        run.model.zero_grad()
    half = len(losses) // 2
    torch.testing.assert_close(losses[:half], losses[half:], rtol=1e-5, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("in_fp8", [False, True])
def test_training_with_graphs_gives_the_same_losses(in_fp8, corpus):
    """With and without graphs, with two micro-steps each, the losses have the same bits."""
    losses = {}
    for wanted in (False, True):
        config = graph_job(corpus, wanted)
        config = with_settings(config, {"trainer.deterministic": True, "trainer.float8": in_fp8})
        with one_rank():
            losses[wanted] = losses_of(config)
        torch.use_deterministic_algorithms(False)
    assert losses[True] == losses[False]
    assert losses[True][3] < losses[True][0]


# Ways in which two ranks share the two sequences of a step. With all of them, a step has the same loss.
TWO_RANKS = {
    "ring": {},
    "ring over NCCL": {},
    "all-to-alls": {"parallel.ulysses": 2},
    "data-parallel": {"parallel.ring": 1, "trainer.accumulate": 1},
}


def two_ranks_job(graphed: bool, way: str) -> Config:
    """All layers are equal, because graphs of rings do not support several masks."""
    return with_settings(graph_job("", graphed), {"model.layer_types": None, "model.window": None} | TWO_RANKS[way])


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RankPool, Path]]:
    """Start two ranks, and store their losses without graphs in a file. The ranks keep their compiled functions."""
    directory = tmp_path_factory.mktemp("graphs")
    pool, expected = RankPool(2, directory / "ranks", gpu_backend(2), timeout=280), directory / "losses.json"
    pool.run(write_losses_without_graphs, expected)
    yield pool, expected
    pool.close()


def write_losses_without_graphs(path: Path) -> None:
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    losses = losses_of(two_ranks_job(False, "ring"))
    if dist.get_rank() == 0:
        path.write_text(json.dumps(losses))


def check_losses_with_graphs(way: str, path: Path) -> None:
    """Compare the losses of the steps, and for the ring also those on the held-out text."""
    if way == "ring over NCCL":
        os.environ["RINGATTN_TRANSPORT"] = "p2p"
    try:
        losses = losses_of(two_ranks_job(True, way), evaluated=way == "ring")
    finally:
        os.environ.pop("RINGATTN_TRANSPORT", None)
    # The errors of differences between losses are almost 0, so their relative tolerance would be too small.
    assert losses == pytest.approx(json.loads(path.read_text())[: len(losses)], rel=2e-3, abs=2e-3)
    assert losses[3] < losses[0]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("way", TWO_RANKS)
def test_rings_and_all_to_alls_in_graphs_give_the_same_losses(way, two_gpus):
    """On two ranks, only the order of sums differs between runs with and without graphs."""
    pool, expected = two_gpus
    pool.run(check_losses_with_graphs, way, expected)
