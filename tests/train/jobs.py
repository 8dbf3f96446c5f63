"""Jobs of a small model, for tests that call the parts of the training loop themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ringattn.train.config import Config, DataConfig, LoggerConfig, ModelConfig, OptimConfig, ParallelConfig, TrainerConfig
from ringattn.train.parallel import mesh as parallel

STEPS = 20
SEQUENCES = 4  # a step


def job(corpus: str, dp: int, **settings) -> Config:
    """Four sequences a step, whatever the number of data-parallel ranks, and five held out; 61 tokens divide by no ring."""
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
        data=DataConfig(source="text", path=corpus, seq_len=61, split="train[:90%]", eval_split="train[90%:]"),
        parallel=ParallelConfig(**settings),
        optim=OptimConfig(lr=3e-3, clip=1e9),
        trainer=trainer,
        logger=LoggerConfig(wandb="off"),
    )


@contextmanager
def one_rank() -> Iterator[None]:
    """Jobs inside run in this process, which is the only rank."""
    threads = torch.get_num_threads()
    parallel.start()
    try:
        yield
    finally:
        parallel.stop()
        torch.set_num_threads(threads)
