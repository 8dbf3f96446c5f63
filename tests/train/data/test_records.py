"""Records: their packing into sequences, their labels, and training on them."""

import itertools
import json
import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringattn.train import setup as run_setup
from ringattn.train import step
from ringattn.train.data import workers
from ringattn.train.data.packing import load, load_held_out
from ringattn.train.data.records import RecordDataset, pack_whole, split_records
from ringattn.train.data.shards import Documents
from ringattn.train.data.targets import Targets
from ringattn.train.data.tokenizer import BytesTokenizer, JsonTokenizer, load_tokenizer
from ringattn.train.model.loss import IGNORE
from ringattn.train.settings.config import Config, ConfigError, DataConfig, check, with_settings
from tests.train.chats import chat_job, conversation, write_chat_corpus, write_chats
from tests.train.data.rows import Rows

lengths_of_records = st.lists(st.integers(1, 20), min_size=1, max_size=40)


def records_of(lengths: list[int]) -> Documents:
    """Records whose tokens are 100 times the number of the record plus their position. Every third token has a loss. Padding is
    0, so records are numbered from 1 on.
    """
    rows = [[100 * i + j if j % 3 == 2 else ~(100 * i + j) for j in range(length)] for i, length in enumerate(lengths, 1)]
    return Documents.of(Rows(rows))


@settings(max_examples=60)
@given(lengths_of_records, st.integers(20, 30))
def test_every_record_is_in_one_sequence(lengths, seq_len):
    sequences = pack_whole(np.array(lengths), seq_len)
    assert sorted(itertools.chain(*sequences)) == list(range(len(lengths)))
    space = [seq_len - sum(lengths[i] for i in members) for members in sequences]
    assert min(space) >= 0
    for free, later in zip(space, range(1, len(sequences) + 1), strict=True):
        assert all(lengths[i] > free for members in sequences[later:] for i in members), "a later record would still fit"


@settings(max_examples=25, deadline=None)
@given(lengths_of_records, st.integers(1, 25), st.integers(0, 3), st.integers(1, 3))
def test_an_epoch_contains_every_short_record_once(lengths, seq_len, seed, group_size):
    """No record is divided, and only tokens with a loss are labels."""
    short = [i for i, length in enumerate(lengths) if length <= seq_len]
    if not short:
        with pytest.raises(ConfigError, match=f"records have more than data.seq_len={seq_len} tokens, the shortest one"):
            RecordDataset(records_of(lengths), seq_len, seed)
        return
    dataset = RecordDataset(records_of(lengths), seq_len, seed, group_size)
    assert dataset.num_dropped == len(lengths) - len(short)
    count = dataset.sequences_per_epoch
    for epoch in (0, 2):
        found = []
        batch = dataset.batch(range(epoch * count, (epoch + 1) * count))
        for tokens, labels, documents in zip(batch.tokens.tolist(), batch.labels.tolist(), batch.documents, strict=True):
            assert sum(documents) == seq_len
            begin = 0
            for length in documents:
                part, marked = tokens[begin : begin + length], labels[begin : begin + length]
                begin += length
                number = part[0] // 100 - 1
                if begin == seq_len and part == [0] * length:
                    assert marked == [IGNORE] * length
                    continue
                assert part == list(range(100 * number + 100, 100 * number + 100 + lengths[number]))
                assert marked == [t + 1 if t % 100 % 3 == 1 else IGNORE for t in part[:-1]] + [IGNORE]
                found.append(number)
        assert len(found) == len(set(found))
        if dataset.group_size == 1:
            assert sorted(found) == short


def test_sequences_depend_only_on_their_number():
    lengths = [3 + i % 17 for i in range(200)]
    first, second = (RecordDataset(records_of(lengths), 20, seed=1, group_size=2) for _ in range(2))
    second.sequence(5 * second.sequences_per_epoch)
    second = pickle.loads(pickle.dumps(second))  # as the loader process receives it
    numbers = [0, 7, first.sequences_per_epoch + 3, 2]
    a, b = first.batch(numbers), second.batch(numbers)
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.labels, b.labels)
    assert a.documents == b.documents
    assert first.fingerprint == second.fingerprint
    orders = {tuple(RecordDataset(records_of(lengths), 20, seed)._order_of(epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    costs = [[sum(n**2 for n in first.sequence(i)[2]) for i in range(j, j + 2)] for j in range(0, first.sequences_per_epoch, 2)]
    assert np.abs(np.diff(costs)).mean() < 10, "a group has similar costs"


def test_held_out_records_are_whole():
    records = records_of([5] * 40)
    training, held_out = split_records(records, 0.1)
    assert (len(training), len(held_out)) == (36, 4)
    parts = [[part[i].tolist() for i in range(len(part))] for part in (training, held_out, records)]
    assert sorted(parts[0] + parts[1]) == sorted(parts[2])
    assert [len(part) for part in split_records(records_of([1, 1]), 0.99)] == [1, 1]
    with pytest.raises(ConfigError, match="has one record"):
        split_records(records_of([5]), 0.1)


@pytest.mark.parametrize("length", [4, 9, 20])
def test_targets_of_an_evaluation_are_labels(length):
    """The targets are the same at every length, and do not depend on `seq_len`."""
    lengths = [20, 9, 3, 14, 40, 8, 17]
    found = []
    for seq_len in (20, 25):
        dataset = RecordDataset(records_of(lengths), seq_len, seed=0)
        targets = Targets(dataset, seq_len, [length], 1000, mask_documents=True)
        batch, groups = targets.batch(range(targets.num_sequences))
        labels = batch.labels[batch.labels != IGNORE]
        assert (groups < targets.num_groups).sum() == len(labels) == targets.tokens.sum()
        found.append((sorted(labels.tolist()), targets.checksum))
    assert found[0] == found[1]
    assert found[0][0] == [100 * i + j for i, n in enumerate(lengths, 1) if n <= 20 for j in range(2, n, 3)]
    for count in (1, 4, 8, 12):
        few = Targets(RecordDataset(records_of(lengths), 20, seed=0), 20, [length], count, mask_documents=True)
        assert count <= few.tokens.sum() < count + 6, "whole records, each with at most 6 labels"


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_records_of_files(source, tmp_path, caplog):
    """All records are loaded once, the long one is dropped and counted, and a blank line does not count."""
    folder = write_chat_corpus(tmp_path / "chat")
    rows = [conversation(number) for number in range(60)]
    config = DataConfig(
        source=source, path=str(folder / f"chats.{source}"), format="chat", tokenizer=f"{folder}/tokenizer.json", seq_len=61
    )
    if source == "parquet":
        messages = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
        table = pyarrow.table({"messages": messages, "id": range(61)})
        pyarrow.parquet.write_table(table, config.path)
    else:
        with open(config.path, "a") as file:
            file.write("\n")
    tokenizer = load_tokenizer(config.tokenizer)
    assert isinstance(tokenizer, JsonTokenizer)
    workers.log_once.cache_clear()
    with caplog.at_level("INFO"):
        data = load(config, tokenizer)
        held_out = load_held_out(config, tokenizer, data)
    assert isinstance(data, RecordDataset)
    assert isinstance(held_out, RecordDataset)
    assert data.num_dropped + held_out.num_dropped == 1
    assert "dropped     1 of" in caplog.text
    assert "records of data.source=" in caplog.text
    assert len(data.lengths) + len(held_out.lengths) == len(rows) + 1
    assert tokenizer.decode(held_out.beginning(30)).startswith("user\nsay ")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ x.y }}"}')
    with pytest.raises(ConfigError, match=f"^{config.path}, (line|row) 1: the chat template"):
        load(config, tokenizer)


def test_columns_of_records(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1", "completion": "2", "x": 0}\n{"prompt": "1", "answer": "2"}\n')
    config = DataConfig(source="jsonl", path=str(path), format="prompt_completion", eval_fraction=0.0)
    with pytest.raises(ConfigError, match="line 2 has no column 'completion': rename one of prompt, answer"):
        load(config, BytesTokenizer())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1"], "answer": ["2"]}), tmp_path / "a.parquet")
    values = {"source": "parquet", "path": str(tmp_path / "a.parquet"), "format": "chat", "messages_column": "chat"}
    config = DataConfig(**values, tokenizer=str(write_chat_corpus(tmp_path / "chat") / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"a.parquet has no column 'chat': set data.messages_column to one of prompt, answer"):
        load(config, load_tokenizer(config.tokenizer))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "chat", "source": "text"}, "data.format=chat is impossible with data.source=text"),
        ({"format": "chat"}, "data.format=chat requires the chat template of a tokenizer"),
        ({"format": "chat", "tokenizer": "a", "mask_documents": False}, "data.mask_documents=false is impossible"),
        ({"format": "prompt_completion", "column": "a"}, "data.column=a has no effect if data.format=prompt_completion"),
        ({"messages_column": "a"}, "data.messages_column=a has no effect if data.format=text"),
        ({"format": "sharegpt"}, "unknown data.format=sharegpt: choose one of text, chat, prompt_completion"),
    ],
)
def test_contradicting_settings_are_rejected(settings, message):
    config = with_settings(Config(), {f"data.{name}": value for name, value in ({"source": "jsonl"} | settings).items()})
    with pytest.raises(ConfigError, match=message):
        check(config, 1)


def test_loss_is_the_mean_over_the_labels(tmp_path):
    """The loss of a step equals a float64 loss of the tokens of all answers. Labels of prompts would change nothing."""
    config = chat_job(write_chat_corpus(tmp_path / "chat"), 1, ring=1)
    run = run_setup.build(config)
    micro_steps = run.loader.get(0)
    sums, counts, hidden = [], [], []

    def collect(states, head, labels):
        hidden[:] = states, head
        return labels

    for micro_step in micro_steps:
        step.forward(run, micro_step.batch, micro_step.masks, micro_step.layout, collect)
        states, head = (x.detach() for x in hidden)
        logits = (states.double() @ head.double().T)[..., : run.tokenizer.vocab_size]
        is_answer = answers(run.tokenizer, micro_step.batch.tokens[0].tolist())
        rows = torch.tensor([i for i in range(60) if is_answer[i + 1]])
        assert len(rows)
        sums.append(-logits[0].log_softmax(-1)[rows, micro_step.batch.tokens[0, rows + 1]].sum())
        counts.append(len(rows))
    assert len(set(counts)) > 1, "the micro-steps have different numbers of labels"
    record, _ = step.take_step(run, 1, 0)
    assert record["loss"] == pytest.approx(float(sum(sums)) / sum(counts), rel=1e-6)


def answers(tokenizer: JsonTokenizer, tokens: list[int]) -> list[bool]:
    """Whether each token belongs to an answer, by the text of the tokens before it."""
    names = [tokenizer.token(token) for token in tokens]
    header = ["<|im_start|>", *(tokenizer.token(token) for token in tokenizer.encode("assistant\n").tolist())]
    result, inside = [], False
    for i, name in enumerate(names):
        result.append(inside)
        if name == "<|im_end|>":
            inside = False
        elif names[max(i + 1 - len(header), 0) : i + 1] == header:
            inside = True
    return result


def test_a_resumed_run_continues_bit_for_bit(tmp_path, monkeypatch):
    """A step that was prepared by a new dataset equals the one of the first launch."""
    config = chat_job(write_chat_corpus(tmp_path / "chat"), 1, ring=1)
    tokenizer = load_tokenizer(config.data.tokenizer)
    first = load(config.data, tokenizer)
    monkeypatch.setattr(JsonTokenizer, "encode_spans", pytest.fail)  # The second launch reads the cache.
    second = load(config.data, tokenizer)
    for consumed in (0, 4, 3 * first.sequences_per_epoch + 1):
        a, b = (data.batch(range(consumed, consumed + 4)) for data in (first, second))
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.labels, b.labels)


def test_prompts_and_completions_train(tmp_path):
    path = write_chats(tmp_path / "unused.jsonl", 1)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i % 7}?", "completion": f"{i % 7}!"}) + "\n" for i in range(99)))
    values = {"source": "jsonl", "path": str(path), "format": "prompt_completion", "seq_len": 61, "eval_fraction": 0.1}
    values = {f"data.{name}": value for name, value in values.items()} | {"data.tokenizer": "bytes"}
    values |= {"model.layers": 1, "trainer.accumulate": 1, "optim.lr": 0.01, "optim.warmup_steps": 0}
    config = with_settings(chat_job(tmp_path, 1, ring=1), values)
    run = run_setup.build(config)
    losses = [step.take_step(run, number, number - 1)[0]["loss"] for number in range(1, 9)]
    assert losses[-1] < 0.75 * losses[0]
