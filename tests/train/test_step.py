"""Tests of one optimizer step: it equals a step of plain PyTorch, and meanwhile the next step is prepared."""

from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringattn import Mask
from ringattn.train import preemption, step
from ringattn.train import setup as run_setup
from ringattn.train.data.batch import Batch
from ringattn.train.data.loader import AheadLoader, Loader, choose_layout, masks_of
from ringattn.train.data.packing import PackedDataset
from ringattn.train.model.gpt import GPT
from ringattn.train.parallel.mesh import MeshShape, causal_masks
from ringattn.train.settings.config import Config, DataConfig, ModelConfig, OptimConfig, ParallelConfig, with_settings
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank
from tests.train.plain import plain_attention

WINDOW = 40


def write_short_documents(directory: Path) -> str:
    """A corpus whose documents are much shorter than a sequence, so that the mask of documents has an effect."""
    directory.mkdir()
    for i in range(100):
        (directory / f"{i}.txt").write_text(f"{i} squared is {i * i}.")
    return f"{directory}/*.txt"


def plain_loss(model: GPT, batch: Batch) -> torch.Tensor:
    """The mean loss of a batch of 61 tokens per sequence, computed with PyTorch's attention."""
    attend = plain_attention(Mask.causal(WINDOW, batch.documents))

    def loss_fn(hidden, head):
        return F.cross_entropy((hidden @ head[:257].T).flatten(0, 1), batch.labels.flatten())

    return model(batch.tokens, torch.arange(61), attend, loss_fn)


@pytest.mark.slow
def test_steps_equal_those_of_plain_pytorch(corpus, tmp_path):
    """The loss, the gradient norm, the learning rate and the parameters of four steps with accumulation, clipping and decay."""
    config = job(write_short_documents(tmp_path / "short"), 1)
    config = with_settings(
        config, {"optim": OptimConfig(lr=3e-3, betas=(0.8, 0.9), clip=0.5, warmup_steps=2), "trainer.steps": 4}
    )
    with one_rank():
        run = run_setup.build(config)
        plain = GPT(config.model, 257)
        plain.load_state_dict({name: x.full_tensor() for name, x in run.model.state_dict().items()})
        decay = ((2, 0.1), (1, 0.0))  # the weight decay of matrices, and of the scales of norms
        groups = [dict(params=[p for p in plain.parameters() if p.ndim == n], weight_decay=w) for n, w in decay]
        optimizer = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-8)
        for number, lr in enumerate((1.5e-3, 3e-3, 1.65e-3, 3e-4), 1):
            loss = sum(plain_loss(plain, batch) for batch, *_ in run.loader.get(4 * (number - 1))) / 4
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            assert norm > 0.5
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            record, _ = step.take_step(run, number, 4 * (number - 1))
            assert (record["loss"], record["grad_norm"], record["lr"]) == pytest.approx(
                (loss.item(), norm.item(), lr), rel=1e-4
            )
        for name, parameter in run.model.named_parameters():
            torch.testing.assert_close(parameter.full_tensor(), plain.get_parameter(name), rtol=1e-3, atol=1e-4)


def routing_of(logits: torch.Tensor) -> torch.Tensor:
    """The routing of tokens (layers, tokens, 5) to two experts each."""
    probabilities = logits.softmax(-1)
    counts = F.one_hot(probabilities.topk(2).indices, 5).sum((1, 2))
    return torch.stack((counts.to(logits.dtype), probabilities.sum(1)), 1)


def expert_balance(logits: torch.Tensor) -> list[torch.Tensor]:
    """The loss of all ranks together, its gradient for this rank's logits, and the metrics of a step."""
    model = ModelConfig(layers=2, experts=5, balance_loss=0.3)
    balance = step.ExpertBalance(SimpleNamespace(config=Config(model=model), device="cpu"), micro_steps=2)
    logits.requires_grad_()
    loss = sum(balance(routing_of(part)) for part in logits.chunk(2, 1))
    (gradient,) = torch.autograd.grad(loss, logits)
    loss = torch.stack((loss.detach(), 0.3 * balance.loss))
    dist.all_reduce(loss)
    return [loss, gradient, balance.imbalance()]


def write_expert_balance(logits: torch.Tensor, directory: Path) -> None:
    # Every rank has half of the tokens of each of the two micro-steps.
    part = torch.cat([half.chunk(2, 1)[dist.get_rank()] for half in logits.chunk(2, 1)], 1)
    torch.save(expert_balance(part), directory / f"{dist.get_rank()}.pt")


def test_the_balance_of_experts_does_not_depend_on_the_number_of_ranks(tmp_path):
    logits = 2 * torch.randn(2, 48, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with one_rank():
        loss, gradient, imbalance = expert_balance(logits.clone())
    run_ranks(write_expert_balance, 2, tmp_path, logits, tmp_path)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    halves = [torch.cat([a, b], 1) for a, b in zip(*(gradient.chunk(2, 1) for _, gradient, _ in results), strict=True)]
    torch.testing.assert_close(torch.cat(halves, 1), gradient)
    assert gradient.abs().min() > 0
    assert loss[0] == pytest.approx(loss[1])
    for each, _, other in results:
        torch.testing.assert_close(each, loss)
        assert other == imbalance > 1


def test_next_step_is_loaded_during_the_current_one(corpus, monkeypatch):
    """The second step loads no batches, because the first one has done so."""
    config = job(corpus, 1)
    config = with_settings(config, {"trainer.steps": 2, "trainer.accumulate": 1})
    with one_rank():
        run = run_setup.build(config)
        step.take_step(run, 1, 0)
        monkeypatch.setattr(PackedDataset, "batch", None)
        step.take_step(run, 2, run.sequences_per_step)


@pytest.mark.slow
def test_training_with_a_process_has_the_same_losses(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for start in (lambda device: Loader(), lambda device: AheadLoader()):
        monkeypatch.setattr(run_setup, "start_loader", start)
        config = job(corpus, 1)
        with one_rank():
            run = run_setup.build(config)
            losses.append([step.take_step(run, number, 4 * (number - 1))[0]["loss"] for number in range(1, 7)])
            run.loader.close()
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 6


@pytest.mark.slow
def test_any_rank_can_stop_all_ranks(tmp_path, corpus):
    run_ranks(check_stop_request, 2, tmp_path / "store", corpus, tmp_path / "cache")


def check_stop_request(corpus: str, cache: Path) -> None:
    """On every rank: the request of rank 1 is reported, and the loss of a step with one micro-step is not affected by it."""
    datasets.config.HF_DATASETS_CACHE = cache
    config = job(corpus, 1, ring=2)
    config = with_settings(config, {"trainer.accumulate": 1, "trainer.batch_size": 4})
    run = run_setup.build(config)
    first, stop = step.take_step(run, 1, 0)
    assert not stop
    preemption.stop_requested = lambda time_limit_s: dist.get_rank() == 1
    second, stop = step.take_step(run, 2, 4)
    assert stop
    assert second["loss"] < first["loss"]


def test_divergence_is_an_error_that_names_the_step(corpus):
    config = job(corpus, 1)
    config = with_settings(config, {"optim.lr": 1e30, "optim.warmup_steps": 0, "model.layers": 1})
    with one_rank():
        run = run_setup.build(config)
        step.take_step(run, 1, 0)
        with pytest.raises(step.Diverged) as error:
            step.take_step(run, 2, 4)
    assert all(part in str(error.value) for part in ("step 2", "optim.lr", "optim.warmup_steps"))


def test_auto_layout_depends_on_the_documents():
    """On 2 x 2 ranks, the layout is chosen for the ring of two, and split among the two ranks that exchange heads."""
    config = Config(data=DataConfig(seq_len=4096), parallel=ParallelConfig(layout="auto"))
    layouts = {}
    for lengths in ([2048, 2048], [3000, 1096], [4096]):
        layout = choose_layout(config, MeshShape(1, 2, 2), causal_masks(config.model, lengths))
        assert (layout.ranks, layout.parts, layout.seq_len) == (4, 2, 4096)
        layouts[layout.name] = lengths
    assert layouts == {"contiguous/2": [2048, 2048], "assigned-128/2": [3000, 1096], "zigzag/2": [4096]}


def test_mask_uses_the_settings():
    """Documents limit attention only if `data.mask_documents` is true; the window always does."""
    batch = Batch(torch.zeros(1, 4), torch.zeros(1, 4), ((3, 1),))
    config = Config(model=ModelConfig(layers=1, window=2))
    assert step.count_pairs(config.model, masks_of(config, batch), batch) == 1 + 2 + 2 + 1
    config = with_settings(config, {"data.mask_documents": False})
    assert step.count_pairs(config.model, masks_of(config, batch), batch) == 1 + 2 + 2 + 2


def test_pairs_are_counted_for_every_sequence():
    """A mask without documents applies to all sequences of a batch."""
    batch = Batch(torch.zeros(2, 4), torch.zeros(2, 4), ((4,), (3, 1)))
    model = ModelConfig(layers=1)
    assert step.count_pairs(model, causal_masks(model), batch) == 2 * 10
    assert step.count_pairs(model, causal_masks(model, batch.documents), batch) == 10 + 7


def test_pairs_of_all_layers_are_counted():
    """Three sliding layers with 7 pairs, and two full layers with 10 pairs."""
    model = ModelConfig(layers=5, window=2, layer_types=["sliding", "full"])
    batch = Batch(torch.zeros(1, 4), torch.zeros(1, 4), ((4,),))
    assert step.count_pairs(model, causal_masks(model), batch) == 3 * 7 + 2 * 10
