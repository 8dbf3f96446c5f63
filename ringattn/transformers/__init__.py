"""Train models of Hugging Face's transformers on sequences that are sharded over a ring of ranks.

trainer = RingTrainer(model=model, args=args, train_dataset=dataset)  # in place of transformers.Trainer
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringattn.transformers.batch import shard_batch
    from ringattn.transformers.loader import RingLoader
    from ringattn.transformers.logprobs import token_logprobs
    from ringattn.transformers.model import put_on_ring
    from ringattn.transformers.trainer import RingMixin, RingTrainer

__all__ = ["RingLoader", "RingMixin", "RingTrainer", "put_on_ring", "shard_batch", "token_logprobs"]

# Each name is imported at its first use. Importing this package therefore does not import transformers.
_MODULES = {
    "RingLoader": "loader",
    "RingMixin": "trainer",
    "RingTrainer": "trainer",
    "put_on_ring": "model",
    "shard_batch": "batch",
    "token_logprobs": "logprobs",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'ringattn.transformers' has no attribute {name!r}")
    import_module("ringattn.transformers.attention")  # registers attn_implementation="ring"
    value = globals()[name] = getattr(import_module(f"ringattn.transformers.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
