"""Tests of the numbers of micro-steps and steps that follow from numbers of tokens."""

import pytest

from ringattn.train.settings.config import Config, ConfigError, with_settings
from ringattn.train.settings.token_budget import (
    check_sources,
    common_tokens_per_step,
    default_group_size,
    resolve_token_budget,
    resume_token_budget,
)


def config_with(seq_len: int = 64, ring: int | None = 1, **trainer: int) -> Config:
    """The default settings with other sizes."""
    values = {f"trainer.{name}": value for name, value in trainer.items()}
    return with_settings(Config(), values | {"data.seq_len": seq_len, "parallel.ring": ring})


@pytest.mark.parametrize(
    ("ring", "batch_size", "accumulate"),
    [(1, 1, 4), (1, 2, 2), (2, 1, 8), (4, 1, 16), (None, 2, 8)],
)
def test_micro_steps_follow_from_the_tokens_per_step(ring, batch_size, accumulate):
    """On four ranks, a step has 1,024 tokens, 16 sequences."""
    config = config_with(ring=ring, batch_size=batch_size, tokens_per_step=1024)
    config = resolve_token_budget(config, world_size=4)
    assert (config.trainer.accumulate, config.trainer.steps) == (accumulate, Config().trainer.steps)


@pytest.mark.parametrize(("total_tokens", "steps"), [(1024, 4), (1025, 5), (1, 1)])
def test_steps_follow_from_the_total_tokens(total_tokens, steps):
    """A step has two sequences on each of two ranks. The number of steps is rounded up."""
    config = config_with(accumulate=2, total_tokens=total_tokens)
    config = resolve_token_budget(config, world_size=2)
    assert (config.trainer.accumulate, config.trainer.steps) == (2, steps)


@pytest.mark.parametrize(("done", "consumed", "steps"), [(0, 0, 4), (2, 8, 4), (2, 4, 5), (3, 1, 7), (5, 20, 5)])
def test_a_resumed_run_has_the_same_total_tokens(done, consumed, steps):
    """A step has four sequences now, and the whole run 16. Earlier steps may have had other numbers of sequences."""
    config = config_with(accumulate=2, total_tokens=1024)
    assert resume_token_budget(config, 2, done, consumed).trainer.steps == steps
    assert resume_token_budget(Config(), 2, done, consumed) == Config()


@pytest.mark.parametrize(
    ("ring", "mask_documents", "source", "expected"),
    [
        (1, True, "stdlib", 12),
        (2, True, "stdlib", 6),
        (None, True, "stdlib", None),
        (1, False, "stdlib", None),
        (1, True, "recall", None),
    ],
)
def test_data_parallel_ranks_read_groups_of_the_size_of_a_micro_step(ring, mask_documents, source, expected):
    config = config_with(ring=ring, batch_size=3, accumulate=2)
    config = with_settings(config, {"data.mask_documents": mask_documents, "data.source": source})
    assert default_group_size(config, world_size=4) == expected


def test_every_length_has_the_same_numbers_of_tokens():
    totals = set()
    for seq_len in (16, 64, 256):
        config = config_with(seq_len, tokens_per_step=512, total_tokens=2560)
        config = resolve_token_budget(config, world_size=2)
        tokens_per_step = 2 * config.trainer.accumulate * seq_len
        totals.add((tokens_per_step, config.trainer.steps * tokens_per_step))
    assert totals == {(512, 2560)}


def test_resolving_twice_changes_nothing():
    """A resumed run resolves the settings of its checkpoint, which are resolved already."""
    config = config_with(tokens_per_step=1024, total_tokens=4096)
    for _ in range(2):
        config = resolve_token_budget(config, world_size=2)
        assert (config.trainer.accumulate, config.trainer.steps) == (8, 4)


@pytest.mark.parametrize("tokens", [32, 96, 1000])
def test_tokens_per_step_must_be_a_multiple_of_a_micro_step(tokens):
    with pytest.raises(ConfigError, match=f"tokens_per_step={tokens} .*multiple of 64"):
        resolve_token_budget(config_with(tokens_per_step=tokens), world_size=1)


def test_invalid_size_is_reported_first():
    with pytest.raises(ConfigError, match=r"data\.seq_len=0"):
        resolve_token_budget(config_with(seq_len=0, tokens_per_step=64), world_size=1)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"trainer.steps"}, "trainer.steps=1500 .*trainer.total_tokens=4096"),
        ({"trainer.accumulate"}, "trainer.accumulate=1 .*trainer.tokens_per_step=1024"),
    ],
)
def test_derived_settings_must_not_be_set(given, named):
    with pytest.raises(ConfigError, match=named):
        check_sources(config_with(tokens_per_step=1024, total_tokens=4096), given)
    check_sources(config_with(), given)
    check_sources(config_with(tokens_per_step=1024, total_tokens=4096), {"trainer.batch_size"})


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [([64, 128, 256], 256), ([256, 64], 256), ([100, 150], 300)],
    ids=["rising", "falling", "no multiple"],
)
def test_common_tokens_per_step_suit_all_lengths(lengths, tokens):
    """Three micro-steps of two sequences, on two data-parallel ranks."""
    config = config_with(batch_size=2, accumulate=3, ring=2)
    assert common_tokens_per_step(config, lengths, world_size=4) == tokens * 12
