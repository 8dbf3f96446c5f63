"""Documents with hidden facts: their length, the place of the facts, and the answer."""

import re

import pytest

from ringattn.train.data.needle import NUM_DEPTHS, TASKS, NeedleDocuments
from ringattn.train.data.packing import load
from ringattn.train.data.tokenizer import BytesTokenizer, load_tokenizer
from ringattn.train.model.loss import IGNORE
from ringattn.train.settings.config import ConfigError, DataConfig
from tests.train.chats import write_chat_tokenizer

LENGTH = 1200


def documents_of(task: str, tmp_path, **settings) -> NeedleDocuments:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} is a text. " * 400)
    data = DataConfig(source="text", path=f"{tmp_path}/*.txt", eval_fraction=0.0, seq_len=LENGTH, **settings)
    tokenizer = load_tokenizer(data.tokenizer)
    return NeedleDocuments.of(task, load(data, tokenizer, shuffle=False), tokenizer, data)


def solve(task: str, text: str) -> str:
    """The answer that follows from a text with its question."""
    name = re.findall(r"(?:number of|variable|bell of) (\w+)", text)[-1]
    if task == "counting":
        name = re.findall(r"bell of (\w+) ring\?", text)[0]
        return str(text.count(f"\nThe bell of {name} rang.\n"))
    while not (value := re.search(rf"(?:number of|variable) {name} is (\d+)\.", text)):
        (name,) = re.findall(rf"variable {name} equals the variable (\w+)\.", text)
    return value[1]


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_the_facts(task, tmp_path):
    documents = documents_of(task, tmp_path)
    batch, depths = documents.batch(LENGTH, range(2 * NUM_DEPTHS))
    assert batch.tokens.shape == (2 * NUM_DEPTHS, LENGTH)
    assert depths.tolist() == [*range(NUM_DEPTHS)] * 2
    texts = []
    for tokens, labels, depth in zip(batch.tokens, batch.labels, depths.tolist(), strict=True):
        assert tokens[0] == BytesTokenizer.bos
        assert (tokens == BytesTokenizer.bos).sum() == 1
        text, is_answer = bytes(tokens[1:].tolist()).decode(), labels != IGNORE
        answer = bytes(labels[is_answer].tolist()).decode()
        assert text.endswith(f"is{answer}")
        assert answer == f" {solve(task, text)}"
        assert is_answer.nonzero()[-1] == LENGTH - 2
        first = re.search(r"\nThe (secret|variable|bell)", text).start()
        assert first / LENGTH == pytest.approx(0.8 * depth / (NUM_DEPTHS - 1), abs=0.18)
        texts.append(text)
    assert len(set(texts)) == 2 * NUM_DEPTHS
    assert documents.batch(LENGTH, [3])[0].tokens.tolist() == [batch.tokens[3].tolist()]


@pytest.mark.parametrize("task", ["needles", "counting"])
def test_lengths_that_are_too_short_for_any_document_are_rejected(task, tmp_path):
    documents = documents_of(task, tmp_path)
    with pytest.raises(
        ConfigError, match=rf"^data.seq_len=64 must be at least \d+ for evaluate={task} here: raise it$"
    ) as error:
        documents.check(64, 96)
    needed = int(re.findall(r"least (\d+)", str(error.value))[0])
    documents.check(needed, 96)
    with pytest.raises(ConfigError, match=f"at least {needed} "):
        documents.check(needed - 1, 96)
    assert documents.batch(needed, range(96))[0].tokens.shape == (96, needed)


def test_chat_template_surrounds_the_text_and_the_question(tmp_path):
    tokenizer = write_chat_tokenizer(tmp_path / "chat")
    documents = documents_of("needle", tmp_path, tokenizer=tokenizer)
    chat = NeedleDocuments.of("needle", documents.text, documents.tokenizer, DataConfig(tokenizer=tokenizer, format="chat"))
    batch, _ = chat.batch(600, [2])
    text = load_tokenizer(tokenizer, special_tokens="parse").decode(batch.tokens[0].tolist())
    assert text.startswith("<|im_start|>user\n")
    assert re.search(
        r"\n\nWhat is the secret number of (\w+)\?<\|im_end\|>\n<\|im_start\|>assistant\nThe secret number of \1 is", text
    )
    assert documents.tokenizer.decode(batch.labels[batch.labels != IGNORE].tolist()).strip() == solve("needle", text)
