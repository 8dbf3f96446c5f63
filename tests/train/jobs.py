"""Settings of a small run, for tests that call the parts of the training code themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from matplotlib.figure import Figure

from ringattn.train.parallel.ranks import connect_ranks, disconnect_ranks
from ringattn.train.settings.config import (
    Config,
    DataConfig,
    LoggerConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainerConfig,
)
from tests.processes import save_blank_picture

STEPS = 20
SEQUENCES = 4  # per step
AUTO, RECOMPUTE, OFFLOAD = MemoryConfig(), MemoryConfig(activations="recompute"), MemoryConfig(activations="offload")
CHUNKED = MemoryConfig(activations="offload", chunk=5)


def job(corpus: str, dp: int, memory: MemoryConfig = AUTO, **parallel_settings: object) -> Config:
    """The settings of a run with four sequences per step, whatever the number of data-parallel ranks.

    Five sequences are held out. No ring of several ranks divides the 61 tokens of a sequence evenly.

    Args:
        corpus: the files to train on, as `write_corpus` returns them.
        dp: the number of data-parallel ranks.
        memory: the memory settings.
        parallel_settings: the settings of `ParallelConfig`.
    """
    trainer = TrainerConfig(
        steps=STEPS,
        batch_size=1,
        accumulate=SEQUENCES // dp,
        checkpoint_every=0,
        sample_tokens=0,
        device="cpu",
        eval_every=8,
        eval_tokens=5 * 61,
    )
    return Config(
        name="ranks",
        model=ModelConfig(layers=2, dim=32, heads=4, kv_heads=2, window=40),
        # Without groups, the order of the sequences does not depend on the number of data-parallel ranks.
        data=DataConfig(source="text", path=corpus, seq_len=61, split="train[:90%]", eval_split="train[90%:]", group_size=1),
        parallel=ParallelConfig(**parallel_settings),
        memory=memory,
        optim=OptimConfig(lr=3e-3, clip=1e9),
        trainer=trainer,
        logger=LoggerConfig(wandb="off"),
    )


@contextmanager
def one_rank() -> Iterator[None]:
    """A context in which this process is the only rank, and saves blank pictures."""
    connect_ranks()
    try:
        with patch.object(Figure, "savefig", save_blank_picture):
            yield
    finally:
        disconnect_ranks()
