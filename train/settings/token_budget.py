"""Derive the numbers of micro-steps and steps from numbers of tokens.

Runs at different sequence lengths are comparable if they have equal tokens per step and equal total tokens. The settings are
`trainer.tokens_per_step` and `trainer.total_tokens`. Other modules read only `trainer.accumulate` and `trainer.steps`.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

import torch.distributed as dist

from ringattn.train.settings.config import Config, ConfigError, check_values

# Maps each derived setting to the setting that determines it.
SOURCES = {"accumulate": "tokens_per_step", "steps": "total_tokens"}


def resolve_token_budget(config: Config, world_size: int) -> Config:
    """Compute `trainer.accumulate` and `trainer.steps` from numbers of tokens. Return the new settings.

    Raises:
        ConfigError: a setting is outside its range, or `trainer.tokens_per_step` is not a whole number of micro-steps.
    """
    check_values(config)
    trainer, ranks = config.trainer, num_data_parallel_ranks(config, world_size)
    tokens = config.data.seq_len * trainer.batch_size * ranks
    accumulate, steps = trainer.accumulate, trainer.steps
    if trainer.tokens_per_step is not None:
        accumulate, rest = divmod(trainer.tokens_per_step, tokens)
        if rest or accumulate == 0:
            raise ConfigError(
                f"trainer.tokens_per_step={trainer.tokens_per_step} must be a multiple of {tokens}, the tokens of a micro-step "
                f"(data.seq_len={config.data.seq_len} x trainer.batch_size={trainer.batch_size} x {ranks} data-parallel "
                "ranks): change one of them"
            )
    if trainer.total_tokens is not None:
        steps = -(-trainer.total_tokens // (tokens * accumulate))
    return replace(config, trainer=replace(trainer, accumulate=accumulate, steps=steps))


def resume_token_budget(config: Config, world_size: int, done: int, consumed: int) -> Config:
    """Compute `trainer.steps` from `trainer.total_tokens` for a run that has taken `done` steps with `consumed` sequences."""
    trainer, seq_len = config.trainer, config.data.seq_len
    if trainer.total_tokens is None:
        return config
    per_step = seq_len * trainer.batch_size * trainer.accumulate * num_data_parallel_ranks(config, world_size)
    remaining = max(trainer.total_tokens - consumed * seq_len, 0)
    return replace(config, trainer=replace(trainer, steps=done + -(-remaining // per_step)))


def by_ranks(value: int, ranks: int | None = None) -> int:
    """Return `value` x `ranks`. Recipes use this function. By default, `ranks` is the number of launched ranks."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    return value * (ranks or world_size)


def num_data_parallel_ranks(config: Config, world_size: int) -> int:
    """Call `config.check` first, because it checks `parallel.ring`."""
    return max(world_size // (config.parallel.ring or world_size), 1)


def default_group_size(config: Config, world_size: int) -> int | None:
    """Return the default `data.group_size` of a new run.

    By default, a group contains the sequences of one micro-step. Mixtures and streams have no groups, so that any number of
    ranks reads the same sequences.
    """
    ranks = num_data_parallel_ranks(config, world_size)
    is_needed = ranks > 1 and config.data.mask_documents and config.data.source not in ("recall", "mix")
    is_needed = is_needed and not config.data.streaming
    return ranks * config.trainer.batch_size if is_needed else None


def check_sources(config: Config, given: Collection[str]) -> None:
    """Check that the command line does not contradict derived settings.

    `given` contains the names of the settings that the command line sets, such as "trainer.steps".

    Raises:
        ConfigError: the user sets both a derived setting and its source.
    """
    trainer, parallel = config.trainer, config.parallel
    for name in ("ring", "ulysses"):
        if f"parallel.{name}" in given and parallel.mesh == "fastest":
            raise ConfigError(
                f"parallel.{name}={getattr(parallel, name)} contradicts parallel.mesh=fastest, which chooses parallel.{name}: "
                "leave one of them out"
            )
    for derived, source in SOURCES.items():
        if f"trainer.{derived}" in given and (tokens := getattr(trainer, source)) is not None:
            raise ConfigError(
                f"trainer.{derived}={getattr(trainer, derived)} contradicts trainer.{source}={tokens}, from which it is "
                f"derived: change trainer.{source}, or set trainer.{source}=null"
            )


def common_tokens_per_step(config: Config, lengths: Iterable[int], world_size: int) -> int:
    """Return the smallest number of tokens per step that suits all sequence lengths of a sweep."""
    trainer = config.trainer
    return math.lcm(*lengths) * trainer.batch_size * trainer.accumulate * num_data_parallel_ranks(config, world_size)
