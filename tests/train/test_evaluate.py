import datasets
import pytest
import torch
import torch.nn.functional as F

from ringattn import Layout, Mask
from ringattn.kernels import interval_mask
from ringattn.train import evaluate
from ringattn.train import setup as run_setup
from ringattn.train.config import Config, ConfigError, DataConfig
from ringattn.train.data.packing import Batch, load, load_held_out
from ringattn.train.data.sources import are_disjoint, splits_overlap
from tests.distributed import run_ranks
from tests.train.jobs import job, one_rank
from tests.train.launch import write_corpus

WINDOW = 40


@pytest.fixture
def config(tmp_path, monkeypatch) -> Config:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(evaluate, "SHORTEST_CONTEXT", 8)
    config = job(write_corpus(tmp_path / "corpus"), 1)
    config.trainer.batch_size = 2  # of five sequences, the last batch has one
    return config


def plain_losses(run: run_setup.Run, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every token of a held-out sequence: the loss by torch's own attention, and how many tokens before it are seen."""
    tokens, labels, documents = run.held_out.sequence(index)
    allowed = interval_mask.dense(*Mask.causal(WINDOW, [documents]).intervals(61), 61)[:, None]

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True).transpose(1, 2)

    def finish(hidden, head):
        return F.cross_entropy((hidden @ head[:257].T)[0], torch.from_numpy(labels), reduction="none")

    with torch.no_grad():
        return run.model(torch.from_numpy(tokens)[None], torch.arange(61), attend, finish), allowed[0, 0].sum(-1) - 1


@pytest.mark.parametrize("wanted", [5, 1000], ids=["five sequences", "all there are"])
def test_the_loss_is_that_of_plain_pytorch(wanted, config):
    config.trainer.eval_tokens = 61 * wanted - 60  # the last sequence is begun, and so taken whole
    with one_rank():
        run = run_setup.build(config)
        count = min(wanted, run.held_out.sequences_per_epoch)
        assert count % 2 == 1
        result = evaluate.evaluate(run)
        # The evaluated sequences are spread evenly over the held-out text.
        numbers = [i * run.held_out.sequences_per_epoch // count for i in range(count)]
        losses, before = (torch.cat(parts) for parts in zip(*(plain_losses(run, i) for i in numbers), strict=True))
    expected = {"eval_loss": losses.mean().item()}
    for start, end in ((0, 8), (8, 16), (16, 32), (32, 64)):
        expected[f"eval_loss/{start}"] = losses[(before >= start) & (before < end)].mean().item()
    assert result == pytest.approx(expected, rel=1e-5)
    assert run.held_out.tokens_per_epoch < run.data.tokens_per_epoch / 5


def test_tokens_are_grouped_by_what_they_see():
    documents = ((200, 312), (512,))
    batch = Batch(torch.zeros(2, 512), torch.zeros(2, 512), documents)
    starts = evaluate.context_groups(512)
    assert starts == [0, 128, 256]
    first, second = evaluate.group_by_context(batch, Mask.causal(documents=documents), starts)
    assert first.bincount().tolist() == [128 + 128, 72 + 128, 56] and first[199] == 1 and first[200] == 0
    assert second.tolist() == [0] * 128 + [1] * 128 + [2] * 256
    assert evaluate.group_by_context(batch, Mask.causal(window=100), starts).max() == 0
    assert evaluate.context_groups(128) == evaluate.context_groups(1) == [0]


def test_a_group_without_tokens_is_left_out(config):
    config.model.window, config.trainer.eval_tokens = 16, 1
    with one_rank():
        assert list(evaluate.evaluate(run_setup.build(config))) == ["eval_loss", "eval_loss/0", "eval_loss/8"]


def test_held_out_text_that_fills_no_sequence(config, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    config.data.eval_path, config.data.eval_split = str(tmp_path / "short.txt"), None
    config.data.split = "train"
    with (
        one_rank(),
        pytest.raises(ConfigError, match="held-out text .*: the corpus has 6 tokens, but data.seq_len=61 requires 62"),
    ):
        run_setup.build(config)


OVERLAPS = {
    "all of it": (("train", None), ("train[95%:]", None), True),
    "two parts": (("train[:90%]", None), ("train[90%:]", None), False),
    "two parts, written otherwise": (("train[:90%]", None), ("train[-4:]", None), False),
    "one document": (("train[:90%]", None), ("train[35:]", None), True),
    "other files": (("train[1:]", "0*.txt"), (None, "1*.txt"), False),
    "the same files in other words": (("train[:50%]", "*.txt"), ("train[50%:]", "../corpus/*.txt"), False),
    "the same file among others": (("train[1:]", "*.txt"), ("train[:1]", "0*.txt"), True),
}


@pytest.mark.parametrize(("training", "held_out", "overlap"), OVERLAPS.values(), ids=OVERLAPS.keys())
def test_text_that_is_trained_on_is_not_held_out(training, held_out, overlap, config, tmp_path):
    data = config.data
    data.split, data.path = training[0], f"{tmp_path}/corpus/{training[1] or '*.txt'}"
    data.eval_split, data.eval_path = held_out[0], held_out[1] and f"{tmp_path}/corpus/{held_out[1]}"
    tokenizer = run_setup.load_tokenizer("bytes")
    if overlap:
        with pytest.raises(ConfigError, match="contains some of the held-out text, data.eval_"):
            load_held_out(data, tokenizer, load(data, tokenizer))
    else:
        assert load_held_out(data, tokenizer, load(data, tokenizer)).sequences_per_epoch > 0


def test_every_seed_is_evaluated_on_the_same_text(config):
    config.data.seed = 7
    with one_rank():
        run = run_setup.build(config)
    assert (run.data.seed, run.held_out.seed) == (7, 0)


def test_a_rank_without_tokens(tmp_path):
    """Zigzag over four ranks leaves one of five tokens none for one of them."""
    run_ranks(evaluate_few_tokens, 4, tmp_path / "store", write_corpus(tmp_path / "corpus"), tmp_path)


def evaluate_few_tokens(corpus: str, directory) -> None:
    datasets.config.HF_DATASETS_CACHE = directory / "cache"
    config = job(corpus, 1, ring=4, layout="zigzag")
    config.data.seq_len, config.trainer.eval_tokens = 5, 1
    assert min(Layout.zigzag(5, 4).rows(rank) for rank in range(4)) == 0
    assert list(evaluate.evaluate(run_setup.build(config))) == ["eval_loss", "eval_loss/0"]


def test_splits_of_other_names_and_other_datasetsare_disjoint():
    sizes = {"train": 9, "test": 9}
    assert not splits_overlap("train", "test", sizes)
    assert splits_overlap("train+test[:1]", "test", sizes) and splits_overlap("all", "test[8:]", sizes)
    data = DataConfig(source="hub", path="owner/name", eval_path="owner/other")
    assert are_disjoint(data, data.held_out, sizes)
