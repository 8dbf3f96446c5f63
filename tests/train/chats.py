"""A tokenizer with a chat template, and conversations, for tests of chat data."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ringattn.train.settings.config import Config, with_settings
from tests.train.jobs import job

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}" + PROMPT
# The same text, with marks around the turns of the assistant.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}" + PROMPT
)


def write_chat_tokenizer(folder: Path, template: str = CHATML) -> str:
    """Write a tokenizer of bytes with a chat template, and return the path of its tokenizer.json."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[*SPECIAL], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(["the ring of the ranks, assistant and user"] * 9, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": template}))
    return str(folder / "tokenizer.json")


def conversation(number: int) -> list[dict[str, Any]]:
    """A conversation with one or two answers, which repeat the question."""
    words = [f"{'ring'[number % 4] * (3 + number % 5)}", "the ranks"][: 1 + number % 2]
    return [
        message
        for word in words
        for message in ({"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word})
    ]


def write_chats(path: Path, count: int, longest: int = 0) -> str:
    """Write conversations as JSON lines, the last one with an answer of `longest` words, and return the path."""
    rows = [conversation(number) for number in range(count)]
    if longest:
        rows.append([{"role": "user", "content": "go"}, {"role": "assistant", "content": "word " * longest}])
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return str(path)


def chat_job(folder: Path, dp: int, **parallel_settings: object) -> Config:
    """The settings of `jobs.job` for conversations, which `write_chat_corpus` has written to a folder."""
    values = {"path": f"{folder}/chats.jsonl", "tokenizer": f"{folder}/tokenizer.json", "source": "jsonl", "format": "chat"}
    values |= {"split": "train", "eval_split": None, "eval_fraction": 0.1}
    config = job("", dp, **parallel_settings)
    return with_settings(config, {f"data.{name}": value for name, value in values.items()} | {"model.window": None})


def write_chat_corpus(folder: Path, template: str = CHATML) -> Path:
    """Write a tokenizer and conversations, of which the last one has more than 61 tokens."""
    write_chat_tokenizer(folder, template)
    write_chats(folder / "chats.jsonl", 60, longest=60)
    return folder
