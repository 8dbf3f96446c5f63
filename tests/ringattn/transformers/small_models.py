"""Small models and data, and runs of Trainer in one process and on all ranks, for the tests of this folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

SIZES = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
VOCAB = 128


def new_model(
    kind: str = "qwen3", std: float = 0.2, dtype: torch.dtype = torch.float32, attention: str = "eager", **settings: object
) -> torch.nn.Module:
    """Return a model of two layers, with random weights that are large enough for attention to matter."""
    import transformers

    torch.manual_seed(0)
    settings = SIZES | dict(num_hidden_layers=2) | settings
    config = transformers.AutoConfig.for_model(kind, **settings, pad_token_id=0, eos_token_id=1, bos_token_id=1)
    config.use_cache = False  # with a cache, transformers ignores positions that restart
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return model.to(dtype)


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def one_process() -> Iterator[None]:
    """Let accelerate behave in a rank as in one process."""
    from accelerate.state import AcceleratorState, GradientState

    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.update(hidden)


def all_processes() -> None:
    """Let accelerate find the process group of the ranks."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="localhost")


def packed_rows(num_rows: int, lengths: tuple[int, ...] = (23, 1, 30, 9)) -> list[dict]:
    """Rows of packed documents, whose positions restart."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = []
    for i in range(num_rows):
        tokens = random_tokens(sum(lengths), seed=i)
        labels = torch.where(positions == 0, -100, tokens)
        rows.append({"input_ids": tokens, "position_ids": positions, "labels": labels})
    return rows


def padded_rows(num_rows: int, side: str, length: int = 45) -> list[dict]:
    """Rows with padding on one side. As in Hugging Face collators, padding on the left predicts the first token."""
    rows = []
    for i in range(num_rows):
        count = length - (7 * i) % 30
        tokens, mask = random_tokens(length, seed=i), torch.zeros(length, dtype=torch.int64)
        own = slice(length - count, None) if side == "left" else slice(count)
        mask[own] = 1
        labels = torch.where(mask == 1, tokens, -100)
        rows.append({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})
    return rows


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length, which several workers share."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict]:
        worker = torch.utils.data.get_worker_info()
        return iter(self.rows if worker is None else self.rows[worker.id :: worker.num_workers])


def training_arguments(folder: Path, cls: type | None = None, **settings: object):
    from transformers import TrainingArguments

    quiet = dict(report_to=[], disable_tqdm=True, logging_steps=1, save_strategy="no", use_cpu=True)
    small = dict(per_device_train_batch_size=2, per_device_eval_batch_size=2, learning_rate=1e-2, max_steps=4)
    return (cls or TrainingArguments)(output_dir=str(folder), **quiet | small | settings)


def losses_of(trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ':' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
)


def chat_tokenizer():
    """Return a tokenizer of bytes with a chat template that marks the answers of the assistant."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i + 2 for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={"<pad>": 0, "<eos>": 1} | vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = dict(pad_token="<pad>", eos_token="<eos>")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, chat_template=CHAT_TEMPLATE)
