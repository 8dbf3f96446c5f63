"""Tests of mixtures: the shares of the sources, their order, their held-out text, and what happens when a source runs out."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringattn.train.data.loader import Preparation
from ringattn.train.data.mixture import MixtureDataset, count_before, in_proportion
from ringattn.train.data.packing import PackedDataset, load_held_out, load_training
from ringattn.train.data.shards import Documents
from ringattn.train.data.tokenisation import tokenise
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.settings.config import Config, ConfigError, DataConfig, MixSource, check, with_settings
from tests.train.data.rows import Rows

WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}


def packed(token: int, count: int, seq_len: int, group_size: int = 1) -> PackedDataset:
    """A text of `count` documents of 50 tokens, all of them `token`."""
    return PackedDataset(Documents.of(Rows([[token] * 50] * count)), seq_len, seed=3, group_size=group_size)


def mixture(seq_len: int = 10, group_size: int = 1, count: int = 40) -> MixtureDataset:
    sources = {name: packed(ord(name), count, seq_len, group_size) for name in WEIGHTS}
    return MixtureDataset(sources, WEIGHTS.values(), group_size)


def data_config(tmp_path: Path, **values: object) -> DataConfig:
    """Three files of JSON lines, whose documents consist of the name of the file."""
    for name in WEIGHTS:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": name * 63}) + "\n" for _ in range(200)))
    mix = [MixSource(name, weight, "jsonl", str(tmp_path / f"{name}.jsonl")) for name, weight in WEIGHTS.items()]
    return DataConfig(**{"source": "mix", "mix": mix, "seq_len": 64} | values)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(0, 600))
@example([490] + [10] * 49, 24)  # The first items of the small sources are late, and then come together.
@settings(max_examples=100)
def test_the_order_of_sources_sorts_their_items_by_time(weights: list[int], position: int) -> None:
    """Compare with a sort of all items. The number of items of each source is close to its share."""
    shares = np.array(weights) / sum(weights)
    items = sorted(((number + 0.5) / share, source) for source, share in enumerate(shares) for number in range(position + 10))
    sources = [source for _, source in items[: position + 1]]
    counts, source = count_before(shares, position)
    assert counts.tolist() == [sources[:-1].count(each) for each in range(len(shares))]
    assert source == sources[-1]
    assert np.abs(counts - position * shares).max() <= max(len(shares) / 2, 1)


@pytest.mark.parametrize("group_size", [1, 4])
def test_a_mixture_reads_the_sequences_of_each_source_in_order(group_size):
    data, seen = mixture(group_size=group_size), Counter()
    for index in range(1200):
        tokens, labels, documents = data.sequence(index)
        name = chr(tokens[0])
        expected = data.sources[name].sequence(seen[name])
        assert (tokens == expected[0]).all()
        assert (labels == expected[1]).all()
        assert documents == expected[2]
        seen[name] += 1
        if index % 100 == 0:
            progress = data.progress(index + 1)
            assert {name: each.tokens for name, each in progress.items()} == {name: 10 * seen[name] for name in WEIGHTS}
    # One source runs out exactly when the number of its sequences exceeds an epoch.
    end = data.sequences_per_epoch
    assert max(each.epochs for each in data.progress(end).values()) == 1
    assert max(each.epochs for each in data.progress(end + 1).values()) > 1
    assert data.progress(end + 1)[data.first_exhausted].epochs > 1


@pytest.mark.parametrize("tokens", [200_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
def test_the_shares_of_tokens_equal_the_weights_on_any_number_of_ranks(tokens):
    """Every number of data-parallel ranks reads the same sequences in every step.

    After 10 million tokens, the shares are exact to 0.5%.
    """
    seq_len, data = 1000, mixture(seq_len=1000)
    per_step, found = 8, []
    for ranks in (1, 2, 4):
        config = with_settings(Config(data=DataConfig(seq_len=seq_len)), {"trainer.accumulate": per_step // ranks})
        loaders = [Preparation(config, data, MeshShape(ranks, 1, 1), dp, ring=0) for dp in range(ranks)]
        steps = []
        for consumed in range(0, tokens // seq_len, per_step):
            micro_steps = zip(*(loader.batches(consumed) for loader in loaders), strict=True)
            steps.append(torch.cat([batch.tokens for micro_step in micro_steps for batch in micro_step]).numpy())
        found.append(np.stack(steps))
    assert all((each == found[0]).all() for each in found)
    counts = np.bincount(found[0].flatten(), minlength=256)
    for name, weight in WEIGHTS.items():
        assert counts[ord(name)] / counts.sum() == pytest.approx(weight, abs=max(0.005 * weight, 1000 / tokens))


def test_padding_does_not_count_as_tokens():
    data = mixture()
    data.sources["a"].padding = 0.5
    padded = MixtureDataset(data.sources, WEIGHTS.values())
    tokens = {name: each.tokens for name, each in padded.progress(10_000).items()}
    assert tokens["a"] / sum(tokens.values()) == pytest.approx(0.6, rel=1e-3)


def test_held_out_text_has_the_shares_of_the_mixture(tmp_path):
    config = data_config(tmp_path, eval_fraction=0.2)
    training = load_training(config, BytesTokenizer())
    assert isinstance(training, MixtureDataset)
    held_out = load_held_out(config, BytesTokenizer(), training)
    counts = np.bincount(held_out.batch(range(held_out.sequences_per_epoch)).tokens.flatten(), minlength=257)
    for name, weight in WEIGHTS.items():
        assert counts[ord(name)] / counts[:256].sum() == pytest.approx(weight, abs=0.02)


def test_a_prepared_text_can_be_a_source(tmp_path):
    config = data_config(tmp_path)
    prepared = tokenise(DataConfig("jsonl", path=config.mix[0].path), BytesTokenizer(), folder=tmp_path / "prepared")
    mix = [MixSource("a", 0.6, "prepared", str(prepared)), *config.mix[1:]]
    mixed = with_settings(Config(data=config), {"data.mix": mix})
    check(mixed, world_size=1)
    expected, data = (load_training(each, BytesTokenizer()).batch(range(400)) for each in (config, mixed.data))
    assert torch.equal(data.tokens, expected.tokens)


def test_in_proportion_uses_as_many_documents_as_possible():
    parts = [packed(1, count, 10)._documents for count in (30, 100)]
    assert len(in_proportion(parts, [1, 1])) == 60
    assert len(in_proportion(parts, [1, 2])) == 90


def test_a_change_of_a_weight_or_a_source_changes_the_fingerprint(tmp_path):
    config = data_config(tmp_path)
    before = load_training(config, BytesTokenizer()).fingerprint
    assert json.loads(json.dumps(before)) == before
    assert load_training(config, BytesTokenizer()).fingerprint == before
    assert "checksum" not in str(before["sources"]), "checkpoints of earlier versions have no checksums there"
    path = Path(config.mix[2].path)
    path.write_text(path.read_text().replace("c", "d", 1))
    changed = load_training(config, BytesTokenizer()).fingerprint
    assert [a == b for a, b in zip(changed["checksum"], before["checksum"], strict=True)] == [True, True, False]
    other = with_settings(
        Config(data=config), {"data.mix": [*config.mix[:2], MixSource("c", 0.2, "jsonl", config.mix[2].path)]}
    )
    assert load_training(other.data, BytesTokenizer()).fingerprint != before


@pytest.mark.parametrize(
    ("mix", "named"),
    [
        ([], "requires data.mix"),
        ([MixSource(), MixSource()], "2 sources with the name stdlib"),
        ([MixSource("a/b")], "'a/b'"),
        ([MixSource(weight=0.0)], "weight=0.0: must be greater than 0"),
        ([MixSource(), MixSource("b", weight=1e-7)], "b: weight=1e-07: must be at least 1e-06 of the sum"),
        ([MixSource(weight=1e308), MixSource("b", weight=1e308)], "must be at least 1e-06 of the sum of the weights, inf"),
        ([MixSource(source="recall")], "source=recall is impossible"),
        ([MixSource(source="csv")], "unknown data.source=csv"),
        ([MixSource(path="x")], "data.path=x has no effect"),
    ],
)
def test_invalid_mixtures_are_rejected(mix, named):
    with pytest.raises(ConfigError, match=named):
        check(Config(data=DataConfig(source="mix", mix=mix)), world_size=1)


@pytest.mark.parametrize("name", ["eval_path", "eval_split"])
def test_sources_of_a_mixture_have_no_held_out_text_of_their_own(name):
    """MixSource does not have these settings, so the message must not ask for them."""
    with pytest.raises(ConfigError, match=f"data.{name}=x has no effect if .* set data.eval_fraction"):
        check(Config(data=DataConfig(source="mix", mix=[MixSource()], **{name: "x"})), world_size=1)


@pytest.mark.parametrize(
    ("changes", "is_rejected"),
    [
        ({}, False),  # The split into training and held-out text is the same.
        ({"path": "a*.jsonl"}, False),
        ({"path": "*.jsonl"}, True),
        ({"split": "train[:50%]"}, True),
        ({"path": "b.jsonl"}, False),
    ],
)
def test_held_out_text_is_not_in_another_source(tmp_path, monkeypatch, changes, is_rejected):
    monkeypatch.chdir(tmp_path)
    data_config(tmp_path)
    mix = [MixSource("a", source="jsonl", path="a.jsonl"), MixSource("b", **{"source": "jsonl", "path": "a.jsonl"} | changes)]
    config = DataConfig(source="mix", mix=mix, seq_len=64)
    training = load_training(config, BytesTokenizer())
    if is_rejected:
        with pytest.raises(ConfigError, match="a and b read some of the same text"):
            load_held_out(config, BytesTokenizer(), training)
    else:
        assert load_held_out(config, BytesTokenizer(), training) is not None


def test_a_source_that_cannot_be_read_is_named(tmp_path):
    mix = [MixSource("code"), MixSource("web", source="jsonl", path=str(tmp_path / "none.jsonl"))]
    with pytest.raises(ConfigError, match=r"data.mix: web: data.path=\S+ matches no file"):
        load_training(DataConfig(source="mix", mix=mix), BytesTokenizer())
