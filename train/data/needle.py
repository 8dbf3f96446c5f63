"""Hide facts in a long text, and ask for them at its end.

    ... text ... | fact | ... text ... | question, and the beginning of the answer | answer

An answer is correct if each of its tokens has the largest logit, as in greedy decoding. The first fact is inserted at a given
depth of the text. All tasks except `needle` resemble tasks of RULER (Hsieh et al. 2024, arXiv:2404.06654).
"""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ringattn.train.data.batch import Batch
from ringattn.train.data.chat import load_template
from ringattn.train.data.packing import PackedDataset
from ringattn.train.data.tokenizer import JsonTokenizer, Tokenizer
from ringattn.train.model.loss import IGNORE
from ringattn.train.settings.config import ConfigError, DataConfig

NAMES = ("Berlin", "Cairo", "Delhi", "Lima", "London", "Madrid", "Nairobi", "Oslo", "Paris", "Rome", "Sydney", "Tokyo")
SEED = 2**61
MAX_COUNT = 9
NUM_DEPTHS = 6  # spread evenly from the beginning to the end of the text


class Task(NamedTuple):
    """Holds the facts in text order, and the question. The model reads `beginning` and predicts `answer`."""

    facts: list[str]
    question: str
    beginning: str
    answer: str


def _needles(names: list[str], values: list[str], count: int) -> Task:
    facts = [f"The secret number of {name} is {value}." for name, value in zip(names, values, strict=True)][:count]
    question = f"What is the secret number of {names[0]}?"
    return Task(facts, question, f"The secret number of {names[0]} is", values[0])


def _variables(names: list[str], values: list[str]) -> Task:
    facts = [f"The variable {names[0]} is {values[0]}."]
    facts += [f"The variable {name} equals the variable {earlier}." for earlier, name in itertools.pairwise(names[:4])]
    return Task(facts, f"What is the variable {names[3]}?", f"The variable {names[3]} is", values[0])


def _counting(names: list[str], values: list[str]) -> Task:
    count = 1 + int(values[0]) % MAX_COUNT
    question = f"How many times did the bell of {names[0]} ring?"
    return Task([f"The bell of {names[0]} rang."] * count, question, "The number of times that it rang is", str(count))


TASKS: dict[str, Callable[[list[str], list[str]], Task]] = {
    "needle": lambda names, values: _needles(names, values, 1),
    "needles": lambda names, values: _needles(names, values, 4),
    "variables": _variables,
    "counting": _counting,
}


@dataclass(frozen=True)
class NeedleDocuments:
    """The documents of a task."""

    task: str  # a key of TASKS
    text: PackedDataset  # the text that hides the facts
    tokenizer: Tokenizer  # the model's tokenizer
    before: list[int]  # the tokens that a chat template writes before the text
    after: list[int]  # the tokens that a chat template writes after the question

    @classmethod
    def of(cls, task: str, text: PackedDataset, tokenizer: Tokenizer, data: DataConfig) -> "NeedleDocuments":
        """Create the documents, with the chat template of the tokenizer if `data.format` is "chat"."""
        if data.format != "chat":
            return cls(task, text, tokenizer, [tokenizer.bos], [])
        messages, options = [{"role": "user", "content": "CONTENT"}], {"add_generation_prompt": True}
        before, _, after = load_template(data.tokenizer).render(messages, **options)[0].partition("CONTENT")
        parser = JsonTokenizer(data.tokenizer, data.eos_token, special_tokens="parse")
        return cls(task, text, tokenizer, parser.encode(before).tolist(), parser.encode(after).tolist())

    def batch(self, length: int, numbers: Iterable[int]) -> tuple[Batch, torch.Tensor]:
        """Return one document of `length` tokens per sequence, and an int64 tensor (B,) of depth indices.

        Document n has the depth index n modulo NUM_DEPTHS, and the same content in every call. Call `check` first.
        """
        rows = [self._document(length, number) for number in numbers]
        tokens = torch.from_numpy(np.array([row for row, _ in rows]))
        labels = torch.full_like(tokens, IGNORE)
        for i, (_, size) in enumerate(rows):
            labels[i, -size - 1 : -1] = tokens[i, -size:]
        return Batch(tokens, labels, ((length,),) * len(rows)), torch.from_numpy(np.array(numbers) % NUM_DEPTHS)

    def check(self, length: int, count: int) -> None:
        """Raise ConfigError if `length` is too small for one of the first `count` documents."""
        least = max(self._fixed_tokens(*self._parts(number)[1:3]) for number in range(count))
        if length < least:
            raise ConfigError(f"data.seq_len={length} must be at least {least} for evaluate={self.task} here: raise it")

    def _fixed_tokens(self, facts: list[list[int]], question: list[int]) -> int:
        return len(self.before) + sum(map(len, facts)) + len(question)

    def _parts(self, number: int) -> tuple[np.random.Philox, list[list[int]], list[int], int]:
        random = np.random.Philox(key=[SEED, number])
        names = [NAMES[i] for i in np.argsort(random.random_raw(len(NAMES)), kind="stable")]
        values = [str(10_000 + int(word % 90_000)) for word in random.random_raw(len(NAMES))]
        task = TASKS[self.task](names, values)
        encode = self.tokenizer.encode
        beginning, whole = encode(task.beginning).tolist(), encode(f"{task.beginning} {task.answer}").tolist()
        # A token that has characters of `beginning` and of the answer belongs to the answer.
        common = next((i for i, (a, b) in enumerate(zip(beginning, whole, strict=False)) if a != b), len(beginning))
        facts = [encode(f"\n{fact}\n").tolist() for fact in task.facts]
        question = [*encode(f"\n\n{task.question}" + "\n" * (not self.after)).tolist(), *self.after, *whole]
        return random, facts, question, len(whole) - common

    def _document(self, length: int, number: int) -> tuple[list[int], int]:
        random, facts, question, size = self._parts(number)
        space = length - self._fixed_tokens(facts, question)
        begin = random.random_raw() % (self.text.tokens_per_epoch - space)
        text = self.text.stream(begin, begin + space)[0] if space else np.zeros(0, np.int64)
        text = np.where(
            (text == self.tokenizer.eos) | (text == self.tokenizer.bos), self.tokenizer.encode("\n")[-1], text
        ).tolist()
        depth = number % NUM_DEPTHS / (NUM_DEPTHS - 1)
        # Insert the first fact at the given depth. Insert the other facts at random places after the first fact.
        places = sorted(depth + (1 - depth) * (int(word) / 2**64) for word in random.random_raw(len(facts) - 1))
        cuts = [0, *(int(place * space) for place in (depth, *places)), space]
        parts = [text[first:last] for first, last in itertools.pairwise(cuts)]
        tokens = [*self.before, *parts[0]]
        for fact, part in zip(facts, parts[1:], strict=True):
            tokens += fact + part
        return tokens + question, size
