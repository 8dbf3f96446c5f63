"""Tests of streams: their sequences, their positions, and that they do not depend on the number of ranks."""

import gzip
import json
import pickle
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from ringattn.train.data import stream as streams
from ringattn.train.data.loader import AheadLoader, Loader, LoaderError, Preparation
from ringattn.train.data.stream import Position, StreamDataset, open_stream
from ringattn.train.data.tokenizer import BytesTokenizer, JsonTokenizer
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.settings.config import Config, ConfigError, DataConfig, check, with_settings
from tests.train.hub_models import write_tokenizer

EOS, EOS_SIGN = 256, ord("|")
SEQ_LEN, PER_STEP = 50, 12


def documents(files: int = 5, count: int = 30) -> list[list[str]]:
    """Different documents of up to 90 characters. The longest ones span several sequences."""
    generator = random.Random(0)
    return [[f"{file}.{i}:" + "x" * generator.randint(0, 90) for i in range(count)] for file in range(files)]


def write_files(folder: Path, texts: list[list[str]]) -> None:
    for number, lines in enumerate(texts):
        content = "".join(json.dumps({"text": text}) + "\n" for text in lines)
        (folder / f"{number}.jsonl").write_text(content)


def stream(folder: Path, **settings: object) -> StreamDataset:
    values = {"source": "jsonl", "path": str(folder), "seq_len": SEQ_LEN, "shuffle_buffer": 20, "eval_fraction": 0.0}
    return open_stream(DataConfig(streaming=True, **values | settings), BytesTokenizer())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Five files, each of which is one piece."""
    monkeypatch.setattr(streams, "MIN_PIECE_BYTES", 2500)
    (tmp_path / "text").mkdir()
    write_files(tmp_path / "text", documents())
    return tmp_path / "text"


def as_lists(sequences: list) -> list:
    return [(tokens.tolist(), labels.tolist(), lengths) for tokens, labels, lengths in sequences]


def test_readers_read_every_document_once_per_epoch(folder):
    data = stream(folder)
    assert data.num_readers == 4
    sequences = [data.sequence(index) for index in range(600)]
    found = Counter()
    for number in range(data.num_readers):
        own = sequences[number :: data.num_readers]
        tokens = np.concatenate([each[0] for each in own])
        labels = np.concatenate([each[1] for each in own])
        assert (labels[:-1] == tokens[1:]).all()
        edges = np.cumsum([length for each in own for length in each[2]])
        # A part of a document begins at every EOS, and at every sequence.
        starts = {*np.flatnonzero(tokens == EOS).tolist(), *range(0, len(tokens), SEQ_LEN)} - {0}
        assert sorted(starts) == edges[:-1].tolist()
        texts = bytes(np.where(tokens == EOS, EOS_SIGN, tokens).astype(np.uint8)).decode().split("|")[1:-1]
        expected = [text for lines in documents()[number :: data.num_readers] for text in lines]
        for start in range(0, len(texts) - len(expected), len(expected)):
            epoch = texts[start : start + len(expected)]
            assert sorted(epoch) == sorted(expected)
            assert epoch != expected
        found.update(texts[: len(expected)])
    assert found == Counter(text for lines in documents() for text in lines)


def test_the_seed_and_the_buffer_determine_the_order(folder):
    first = as_lists([stream(folder).sequence(index) for index in range(8)])
    assert as_lists([stream(folder).sequence(index) for index in range(8)]) == first
    assert as_lists([stream(folder, seed=1).sequence(index) for index in range(8)]) != first
    # A buffer of one document per reader does not shuffle the documents of a file.
    (folder / "4.jsonl").unlink()
    tokens = stream(folder, shuffle_buffer=4).sequence(1)[0].tolist()
    assert list("|".join(["", *documents()[1]]).encode()[:SEQ_LEN]) == [EOS_SIGN if x == EOS else x for x in tokens]


def test_every_block_has_an_order_of_its_own(folder):
    """Reader 1 reads the 30 documents of file 1 in blocks of 5 documents."""
    tokens = np.concatenate([stream(folder).sequence(index)[0] for index in range(1, 4 * 40, 4)])
    numbers = [int(number) for number in re.findall(r"1\.(\d+):", bytes(tokens[tokens != EOS].tolist()).decode())]
    blocks = np.array(numbers[:30]).reshape(6, 5) - np.arange(0, 30, 5)[:, None]
    assert (np.sort(blocks) == np.arange(5)).all()
    assert len(np.unique(blocks, axis=0)) > 3


def test_a_stream_resumes_from_any_position(folder):
    sequences = as_lists([stream(folder).sequence(index) for index in range(400)])
    for consumed in (1, 2, 3, 19, 100, 341):
        before = stream(folder)
        for index in range(consumed):
            before.sequence(index)
        saved = json.loads(json.dumps(before.saved_positions([before.positions], consumed)))
        resumed = pickle.loads(pickle.dumps(stream(folder).at(saved, consumed)))
        assert as_lists([resumed.sequence(index) for index in range(consumed, consumed + 40)]) == sequences[consumed:][:40]


def test_a_stream_resumes_again_and_again(folder):
    """Each launch reads from only three of the four readers."""
    sequences, consumed, data = as_lists([stream(folder).sequence(index) for index in range(200)]), 0, stream(folder)
    while consumed < 198:
        assert as_lists([data.sequence(consumed + index) for index in range(3)]) == sequences[consumed : consumed + 3]
        consumed += 3
        data = stream(folder).at(data.saved_positions([data.positions], consumed), consumed)


def preparations(data: StreamDataset, ranks: int) -> list[Preparation]:
    config = with_settings(Config(data=data.config), {"trainer.accumulate": PER_STEP // ranks})
    return [Preparation(config, replace(data), MeshShape(ranks, 1, 1), dp, ring=0) for dp in range(ranks)]


def read_step(loaders: list[Preparation], consumed: int) -> list:
    micro_steps = zip(*(loader.batches(consumed) for loader in loaders), strict=True)
    return [(x.tokens.tolist(), x.labels.tolist(), x.documents) for batches in micro_steps for x in batches]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_batches_do_not_depend_on_the_number_of_ranks(ranks, folder):
    """A run continues on another number of ranks. Three ranks do not divide the four readers evenly."""
    expected = [read_step(preparations(stream(folder), 1), consumed) for consumed in range(0, 10 * PER_STEP, PER_STEP)]
    data, loaders = stream(folder), preparations(stream(folder), ranks)
    for step in range(5):
        assert read_step(loaders, step * PER_STEP) == expected[step]
    runs = [set(loader.data.positions) for loader in loaders]
    if ranks != 3:
        assert runs == [set(range(rank, 4, ranks)) for rank in range(ranks)]
    saved = data.saved_positions([loader.data.positions for loader in loaders], 5 * PER_STEP)
    for others in (1, 2, 3, 4):
        resumed = preparations(data.at(saved, 5 * PER_STEP), others)
        for step in range(5, 10):
            assert read_step(resumed, step * PER_STEP) == expected[step]


def test_a_repetition_names_the_reader(folder):
    """The second reader has the shortest files, so it is the first one to begin again."""
    # The spaces make the file so large that it is a piece of its own.
    (folder / "1.jsonl").write_text("".join(json.dumps({"text": "x" * 20}) + " " * 220 + "\n" for _ in range(10)))
    data, before = stream(folder), dict[int, Position]()
    for index in range(24):
        data.sequence(index)
        found = data.repeated(before, data.positions)
        # 10 documents of 21 tokens fill four sequences and a part of the fifth.
        assert found == ("reader 1 of 4 (epoch 2)" if index == 17 else "")
        before = data.positions


def test_a_position_outside_the_text_is_rejected(folder):
    """Without an error, the reader would search for the position forever."""
    data = stream(folder)
    for index in range(10):
        data.sequence(index)
    saved = data.saved_positions([data.positions], 10)
    for field, value in (("document", 99), ("token", 999)):
        position = Position(*saved["2"])._replace(**{field: value})
        with pytest.raises(ConfigError, match="has changed since the checkpoint was saved"):
            data.at({**saved, "2": list(position)}, 10).sequence(10)


def test_incomplete_positions_are_rejected(folder):
    data = stream(folder)
    for index in range(10):
        data.sequence(index)
    saved = data.saved_positions([data.positions], 10)
    damaged = [None, {}, {**saved, "4": saved["3"]}, {n: saved[n] for n in "012"}, {**saved, "2": [9, *saved["2"][1:]]}]
    for each in [*damaged, {**saved, "1": saved["1"][:-1]}]:
        with pytest.raises(ConfigError, match=r"positions in the stream of data.source=jsonl .* are incomplete"):
            data.at(each, 10)
    with pytest.raises(ConfigError, match="incomplete after 14 sequences"):
        data.at(saved, 14)


def test_parquet_and_compressed_files_give_the_same_sequences(folder, tmp_path, monkeypatch):
    expected = as_lists([stream(folder).sequence(index) for index in range(100)])
    (tmp_path / "parquet").mkdir()
    for number, texts in enumerate(documents()):
        pa.parquet.write_table(pa.table({"text": texts}), tmp_path / "parquet" / f"{number}.parquet")
        file = folder / f"{number}.jsonl"
        file.with_name(f"{number}.jsonl.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    monkeypatch.setattr(streams, "MIN_PIECE_BYTES", 1)  # These files are smaller, and cannot be divided.
    for data in (stream(tmp_path / "parquet", source="parquet"), stream(folder)):
        assert as_lists([data.sequence(index) for index in range(100)]) == expected


def test_rows_without_text_are_skipped_and_empty_files_are_errors(folder):
    expected = as_lists([stream(folder).sequence(index) for index in range(100)])
    for file in folder.iterdir():
        lines = file.read_text().splitlines()
        file.write_text("\n".join([*lines[:7], "", '{"text": ""}', '{"text": null}', *lines[7:]]) + "\n")
    data = stream(folder)
    assert as_lists([data.sequence(index) for index in range(100)]) == expected
    (folder / "1.jsonl").write_text(f'{{"text": ""}}{" " * 800}\n' * 3)
    with pytest.raises(ConfigError, match="contains no text: remove empty files"):
        stream(folder).sequence(1)
    (folder / "1.jsonl").write_text(f'{{"text": 1}}{" " * 800}\n' * 3)
    with pytest.raises(ConfigError, match=r"no text, and its last fault is: .*1.jsonl, line 3: .* leave out data.streaming"):
        stream(folder, on_error="skip").sequence(1)


def test_a_fault_is_reported_with_its_line(folder):
    with (folder / "0.jsonl").open("ab") as file:
        file.write(b'{"text": "\xe9"}\n')
    loader = Loader()
    loader.begin(preparations(stream(folder), 1)[0])
    with pytest.raises(LoaderError, match=r"0.jsonl, line 31: the byte 0xe9 is not UTF-8"):
        for step in range(100):
            loader.get(step * PER_STEP)


def test_faulty_documents_are_skipped_and_counted(folder):
    """With `on_error=skip`, the sequences are those without the faulty lines, also after a resume."""
    expected = as_lists([stream(folder).sequence(index) for index in range(160)])
    with (folder / "0.jsonl").open("ab") as file:
        file.write(b'{"text": "\xe9"}\n{"text": 1}\n')
    data = stream(folder, on_error="skip")
    assert as_lists([data.sequence(index) for index in range(80)]) == expected[:80]
    data = stream(folder, on_error="skip").at(data.saved_positions([data.positions], 80), 80)
    assert as_lists([data.sequence(index) for index in range(80, 160)]) == expected[80:]
    count, fault = data.faults(data.positions)
    assert count == 2 * data.positions[0].epoch + 2 * (data.positions[0].piece > 0) > 0
    assert fault.startswith(f"{folder / '0.jsonl'}, line 3")
    resumed = data.at(data.saved_positions([data.positions], 160), 160)
    assert resumed.faults(resumed.positions) == (count, fault)


def test_a_stream_may_skip_faulty_documents(folder):
    check(Config(data=stream(folder, on_error="skip").config), world_size=1)


def test_a_file_that_changes_is_an_error(folder):
    data = stream(folder, shuffle_buffer=4)
    data.sequence(1)
    (folder / "1.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(ConfigError, match=r"1.jsonl has changed while it was read"):
        for index in range(1, 400, 4):
            data.sequence(index)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_a_large_file_is_divided_among_the_readers(source, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "MIN_PIECE_BYTES", 1000)
    texts = [f"{i}:" + "x" * 30 for i in range(300)]
    if source == "jsonl":
        (tmp_path / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        pa.parquet.write_table(pa.table({"text": texts}), tmp_path / "all.parquet", row_group_size=20)
    data = stream(tmp_path, source=source)
    assert data.num_readers == 8
    tokens = [np.concatenate([data.sequence(i)[0] for i in range(number, 8 * 40, 8)]) for number in range(8)]
    found = [bytes(each[each != EOS].astype(np.uint8)).decode().split("x" * 30) for each in tokens]
    assert sorted({text for part in found for text in part if ":" in text and "x" not in text}) == sorted(
        f"{i}:" for i in range(300)
    )
    assert all(len(set(found[0]) & set(part) - {""}) <= 1 for part in found[1:])


def test_a_line_that_is_longer_than_a_piece_has_one_reader(tmp_path, monkeypatch):
    """The line covers four pieces of 100 bytes, in three of which no line begins. The last piece has only an end of a line."""
    monkeypatch.setattr(streams, "MIN_PIECE_BYTES", 100)
    texts = ["a" * 20, "b" * 400, "c" * 80]
    (tmp_path / "all.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = stream(tmp_path)
    assert [piece.begin for piece in data.pieces] == [0, 400]
    assert {token for index in range(40) for token in data.sequence(index)[0].tolist()} == {EOS, *b"abc"}


def test_the_fingerprint_depends_on_the_text_and_the_settings(folder, tmp_path):
    before = stream(folder).fingerprint
    assert json.loads(json.dumps(before)) == before
    assert stream(folder, shuffle_buffer=21).fingerprint != before
    # Other documents or tokens would make the saved positions invalid.
    for settings in ({"column": "other"}, {"special_tokens": "parse"}, {"subset": "en"}):
        assert stream(folder, **settings).fingerprint != before
    assert stream(folder, max_document_mb=1).fingerprint == before
    skipping = [stream(folder, on_error="skip", max_document_mb=size).fingerprint for size in (1, 2)]
    assert skipping[0] != skipping[1]
    tokenizer = JsonTokenizer(write_tokenizer(tmp_path, adds_bos=False))
    assert replace(stream(folder), tokenizer=tokenizer).fingerprint != before
    folder.rename(tmp_path / "moved")
    assert stream(tmp_path / "moved").fingerprint == before
    with (tmp_path / "moved" / "0.jsonl").open("r+") as file:
        file.write('{"text": "1')
    assert stream(tmp_path / "moved").fingerprint != before


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"source": "stdlib"}, "impossible with data.source=stdlib"),
        ({"split": "train[:90%]"}, r"data.split=train\[:90%\] is impossible"),
        ({"exhausted": "end"}, "data.exhausted=end is impossible"),
        ({"eval_fraction": 0.01}, "set data.eval_path to other files"),
        ({"format": "prompt_completion"}, "impossible with data.format=prompt_completion"),
        ({"group_size": 2}, "data.group_size=2 has no effect with data.streaming"),
        ({"streaming": False, "shuffle_buffer": 5}, "data.shuffle_buffer=5 has no effect without data.streaming"),
    ],
)
def test_settings_that_a_stream_cannot_honour_are_rejected(settings, named):
    values = {"source": "jsonl", "path": "x", "streaming": True, "eval_fraction": 0.0} | settings
    values |= {"path": None} if values["source"] == "stdlib" else {}
    config = with_settings(Config(data=DataConfig(**values)), {"trainer.eval_every": 500})
    with pytest.raises(ConfigError, match=named):
        check(config, world_size=1)


def test_a_batch_of_texts_is_encoded_like_each_text(tmp_path):
    texts = ["ab ba", "", "a <|end_of_text|> the ring", "é" * 50]
    for tokenizer in (BytesTokenizer(), JsonTokenizer(write_tokenizer(tmp_path, adds_bos=False))):
        for text, tokens in zip(texts, tokenizer.encode_batch(texts), strict=True):
            assert tokens.dtype == np.int32
            assert tokens.tolist() == tokenizer.encode(text).tolist()


def test_blocks_end_at_a_number_of_characters(folder, monkeypatch):
    """A limit of one character makes blocks of one document, so the documents of a file are not shuffled."""
    expected = as_lists([stream(folder, shuffle_buffer=4).sequence(index) for index in range(40)])
    monkeypatch.setattr(streams, "BLOCK_CHARACTERS", 1)
    assert as_lists([stream(folder).sequence(index) for index in range(40)]) == expected


@pytest.mark.slow
def test_a_loader_process_streams_ahead(folder):
    """The process prepares the same steps, and knows the position after each step, although it has read further."""
    on_demand, ahead = Loader(), AheadLoader()
    try:
        on_demand.begin(preparations(stream(folder), 2)[1])
        ahead.begin(preparations(stream(folder), 2)[1])
        for consumed in range(0, 6 * PER_STEP, PER_STEP):
            for expected, found in zip(on_demand.get(consumed), ahead.get(consumed), strict=True):
                assert torch.equal(expected.batch.tokens, found.batch.tokens)
            assert on_demand.positions(consumed + PER_STEP) == ahead.positions(consumed + PER_STEP)
            assert all(isinstance(each, Position) for each in ahead.positions(consumed + PER_STEP).values())
    finally:
        ahead.close()
