"""Where documents come from, and one-line errors for files, columns and rows that cannot be used."""

import bz2
import gzip
import json
import logging
import lzma
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from ringattn.train.data import sources
from ringattn.train.data.packing import load, load_held_out
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.settings.config import ConfigError, DataConfig
from tests.train.data.rows import read_documents


def config(source: str, **settings: object) -> DataConfig:
    return DataConfig(source=source, seq_len=4, eval_fraction=0.0, **settings)


def lengths(config: DataConfig) -> list[int]:
    """The number of tokens in every document. A document has one EOS and one token per byte."""
    return load(config, BytesTokenizer()).lengths.tolist()


def assert_one_line_error(config: DataConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(config, BytesTokenizer())
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_standard_library_excludes_tests_and_installed_packages():
    files = sources.library_files()
    assert files == sorted(files)
    assert any(file.endswith("/json/decoder.py") for file in files)
    assert not [file for file in files if "/site-packages/" in file or "/test/" in file or "/idlelib/" in file]


def test_installed_packages_are_not_searched(tmp_path, monkeypatch):
    """The folder site-packages may contain so many files that a search takes many seconds."""
    for name in ("b.py", "a/c.py", "a/c.txt", "site-packages/torch/d.py", "a/test/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    searched, scandir = [], os.scandir
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(os, "scandir", lambda path: searched.append(str(path)) or scandir(path))
    assert sources.library_files() == [f"{tmp_path}/a/c.py", f"{tmp_path}/b.py"]
    assert searched == [str(tmp_path), f"{tmp_path}/a"]


def test_every_package_of_the_standard_library_is_a_document(tmp_path, monkeypatch):
    for name in ("one/a.py", "one/part/b.py", "two.py", "test/c.py", "zip/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(tmp_path))
    documents, _ = read_documents(config("packages"))
    assert [text for _, text in documents] == ["# one/a.py\n# one/part/b.py", "# two.py", "# zip/d.py"]
    assert lengths(config("packages", split="train[:2]")) == [27, 9]
    with pytest.raises(ConfigError, match="the training text contains some of the held-out text"):
        load_held_out(config("packages", eval_split="train[1:]"), BytesTokenizer(), load(config("packages"), BytesTokenizer()))


def test_every_text_file_is_a_document(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "one.txt").write_text("first\n\nstill first")
    (tmp_path / "folder" / "two [2].txt").write_text("zweites é")
    (tmp_path / "empty.txt").write_text("\ufeff")  # A byte-order mark alone is not text.
    corpus = config("text", path=f"{tmp_path}/**/*.txt")
    assert sorted(lengths(corpus)) == [11, 19]
    documents, _ = read_documents(corpus)
    assert sorted(text for _, text in documents) == ["", "first\n\nstill first", "zweites é"]


JOINED = {"a/one.py": "1\n", "a/part/two.py": "2", "a/empty.py": "", "a-b/three.py": "3", "b.py": "4"}


def write_files(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


@pytest.mark.parametrize("source", ["text", "stdlib"])
@pytest.mark.parametrize("piece_bytes", [1, 2**26])
def test_the_files_of_a_folder_are_one_document(source, piece_bytes, tmp_path, monkeypatch):
    """A process reads whole folders, also if they are larger than a piece."""
    root = tmp_path / "text"
    write_files(root, {name: text.encode() for name, text in JOINED.items()})
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: str(root))
    monkeypatch.setattr(sources, "PIECE_BYTES", piece_bytes)
    corpus = config(source, path=str(root) if source == "text" else None, join="folder")
    documents, _ = read_documents(corpus)
    joined = "===== a/one.py =====\n1\n\n===== a/part/two.py =====\n2"
    expected = ["===== a-b/three.py =====\n3", joined, "===== b.py =====\n4"]
    assert [text for _, text in documents] == expected
    assert lengths(corpus) == [1 + len(text) for text in expected]
    # The cache of the tokens depends on the names.
    (root / "a").rename(root / "aa")
    assert load(corpus, BytesTokenizer()).beginning(14) == list(b"===== aa/one.p")


def test_a_linked_folder_is_one_document(tmp_path):
    write_files(tmp_path / "elsewhere" / "repo", {"one.txt": b"1", "part/two.txt": b"2"})
    write_files(tmp_path / "text", {"a/three.txt": b"3"})
    (tmp_path / "text" / "link").symlink_to(tmp_path / "elsewhere" / "repo")
    documents, _ = read_documents(config("text", path=str(tmp_path / "text"), join="folder"))
    linked = "===== repo/one.txt =====\n1\n===== repo/part/two.txt =====\n2"
    assert [text for _, text in documents] == [linked, "===== a/three.txt =====\n3"]


@pytest.mark.parametrize("path", ["", "**/*.txt", "**", "*/**/?.txt", "**/**/b.txt"])
def test_links_that_form_a_cycle_do_not_multiply_the_files(path, tmp_path):
    write_files(tmp_path, {"one/a.txt": b"1", "two/b.txt": b"2", "two/.hidden/c.txt": b"3"})
    for folder in ("one", "two"):
        (tmp_path / folder / "up").symlink_to("..")
    expected = ["two/b.txt"] if "b" in path else ["one/a.txt", "two/b.txt"]
    assert sources.files(config("text", path=str(tmp_path / path))) == [str(tmp_path / name) for name in expected]


def test_faults_of_joined_files(tmp_path):
    """A faulty file is skipped, but not its folder. A folder may not be larger than a document."""
    root, large = tmp_path / "text", b"x" * 600_000
    write_files(root, {"a/bad.txt": b"\xff", "a/good.txt": b"good", "big/1": large, "big/2": large})
    settings = {"path": str(root), "join": "folder", "max_document_mb": 1}
    assert_one_line_error(config("text", **settings), "a/bad.txt, line 1: the byte 0xff is not UTF-8")
    assert lengths(config("text", on_error="skip", **settings)) == [1 + len("===== a/good.txt =====\ngood")]
    (root / "a" / "bad.txt").unlink()
    assert_one_line_error(config("text", **settings), "big has more than data.max_document_mb=1 MB")
    assert_one_line_error(config("text", path=f"{root}/a/good*", join="folder"), "is not a folder, but data.join=folder")


@pytest.fixture(params=["jsonl", "parquet"])
def rows(request, tmp_path) -> tuple[str, str]:
    """A source, and the path of a file with two rows of text and a row without text."""
    texts = ["alpha", None, "beta"]
    if request.param == "jsonl":
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"body": t, "id": 1}) + "\n" for t in texts))
    else:
        pa.parquet.write_table(pa.table({"body": texts, "id": [1, 2, 3]}), tmp_path / "rows.parquet")
    return request.param, str(tmp_path / f"rows.{request.param}")


def test_every_row_with_text_is_a_document(rows):
    source, path = rows
    corpus = load(config(source, path=path, column="body"), BytesTokenizer())
    assert corpus.lengths.tolist() == [6, 5]
    assert corpus.batch([0]).tokens.tolist() in ([[256, *b"alp"]], [[256, *b"bet"]])


def test_a_split_selects_rows(rows):
    source, path = rows
    assert lengths(config(source, path=path, column="body", split="train[:1]")) == [6]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"column": "text"}, "no column 'text': set data.column to one of body, id", id="missing column"),
        pytest.param({"column": "id"}, "column 'id' contains (int64|1), but text is required", id="column of numbers"),
        pytest.param({"column": "body", "split": "test"}, "cannot be read: .*test", id="missing split"),
    ],
)
def test_rows_that_cannot_be_used_are_an_error(rows, settings, message):
    source, path = rows
    assert_one_line_error(config(source, path=path, **settings), message)


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_a_path_must_match_a_file(source, tmp_path):
    assert_one_line_error(config(source, path=f"{tmp_path}/*.none"), "matches no file")
    assert_one_line_error(config(source, path=str(tmp_path)), "is a folder without a file \\*")
    assert_one_line_error(config(source), "requires data.path")


def test_an_empty_file_of_rows_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    assert_one_line_error(config("jsonl", path=str(tmp_path / "a.jsonl")), "a.jsonl is empty: download it again")


def parquet(table: pa.Table, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink, **options)
    return sink.getvalue().to_pybytes()


TEXTS = pa.table({"text": ["one", None, "three"]})


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("text", b"one\ntwo caf\xe9\n", "line 2: the byte 0xe9 is not UTF-8: convert"),
        ("text", b"\xff\xfet\x00", "line 1: the byte 0xff is not UTF-8"),
        ("text", gzip.compress(b"text")[:-9], " cannot be read: EOFError"),
        ("text", gzip.compress(b"caf\xe9"), "line 1: the byte 0xe9 is not UTF-8"),
        ("text", lzma.compress(b"x" * 999)[:-20], " cannot be read: EOFError"),
        ("text", pa.compress(b"x" * 999, "zstd", asbytes=True)[:-5], " cannot be read: OSError: Truncated compressed stream"),
        ("jsonl", b'{"text": "a"}\n\n{"text": "\\ud800"}\n', r"line 3 contains \\ud800, half of a surrogate pair"),
        ("jsonl", b'{"text": "a"}\r\n{"text": "x\\udc00y"}', r"line 2 contains \\udc00, half of a surrogate pair"),
        ("jsonl", '{"text": "a"}\n{"text": "café"}\n'.encode("latin-1"), "line 2: the byte 0xe9 is not UTF-8"),
        ("jsonl", '{"text": "a"}\n'.encode("utf-16"), "line 1: the byte 0xff is not UTF-8"),
        ("jsonl", b'{"text": "a"}\n{"text": "a"\n', 'line 2 is not valid JSON .*, which begins with \'{"text": "a"\''),
        ("jsonl", b"[" * 100_000, "line 1 is not valid JSON .maximum recursion depth"),
        ("jsonl", b'{"text": ' + b"1" * 5000 + b"}", "line 1 is not valid JSON .Exceeds the limit"),
        ("jsonl", b"\x00" * 50, "line 1 is not valid JSON"),
        ("jsonl", b'\n{"text": "a"}\n[1]', "line 3 is not a JSON object"),
        ("jsonl", b'{"body": "a"}', "line 1 has no column 'text': set data.column to one of body"),
        ("jsonl", b'{"text": ["a"]}', "line 1: column 'text' contains .'a'., but text is required"),
        ("jsonl", gzip.compress(b'{"text": "a"}\n' * 9)[:-9], " cannot be read: EOFError"),
        ("parquet", parquet(TEXTS)[:-9], " cannot be read: ArrowInvalid"),
        ("parquet", parquet(TEXTS)[:40], " cannot be read: ArrowInvalid"),
        ("parquet", b"", " cannot be read: ArrowInvalid"),
        ("parquet", parquet(pa.table({"body": ["a"]})), " has no column 'text': set data.column to one of body"),
        ("parquet", parquet(pa.table({"text": [[1]]})), ": column 'text' contains list<.*>, but text is required"),
        (
            "parquet",
            parquet(TEXTS, write_page_checksum=True, compression="none").replace(b"three", b"thrie"),
            " cannot be read: OSError: could not verify page integrity",
        ),
        ("parquet", parquet(TEXTS).replace(b"three", b"th\xffee"), ", row 3: the byte 0xff is not UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "content",
)
def test_an_error_names_the_file_and_the_line_or_row(source, content, message, tmp_path):
    """One of many files is wrong. The other files are correct."""
    correct = {"text": b"text", "jsonl": b'{"text": "text"}', "parquet": parquet(TEXTS)}[source]
    for name in ("a", "b", "d"):
        (tmp_path / f"{name}.{source}").write_bytes(correct)
    (tmp_path / f"c.{source}").write_bytes(content)
    assert_one_line_error(config(source, path=f"{tmp_path}/*.{source}"), f"^{tmp_path}/c.{source}(, )?{message}")
    (tmp_path / f"c.{source}").unlink()
    assert len(lengths(config(source, path=f"{tmp_path}/*.{source}"))) in (3, 6)


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.TGZ", "a.7z", "a.tar.zst"])
@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_an_archive_is_an_error(source, name, tmp_path):
    (tmp_path / name).touch()
    assert_one_line_error(config(source, path=f"{tmp_path}/{name}"), f"{name} is an archive: extract it")


COMPRESSORS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_files_are_read_completely(suffix, tmp_path):
    """Nothing must be installed for this. A file may consist of several compressed parts."""
    compress = COMPRESSORS[suffix]
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(compress(b'{"text": "one"}\n') + compress(b'{"text": "three"}\n'))
    (tmp_path / f"b.{suffix}").write_bytes(compress(b"one\n") + compress(b"three"))
    assert lengths(config("jsonl", path=f"{tmp_path}/*.jsonl.{suffix}")) == [4, 6]
    assert lengths(config("text", path=f"{tmp_path}/b.{suffix}")) == [10]


@pytest.mark.parametrize("text", ["a\r\nb", "a\rb\r", "a\nb\n", "\r\n", "a\x0bb\x85\u2028c", "BZhang 91"])
def test_text_keeps_its_line_ends(text, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    documents, _ = read_documents(config("text", path=f"{tmp_path}/a.txt"))
    assert [found for _, found in documents] == [text]


@pytest.mark.parametrize(("num_pieces", "min_bytes", "expected"), [(1, 1, 1), (10, 1, 10), (10, 5000, 2)])
def test_a_small_text_is_divided_into_pieces(num_pieces, min_bytes, expected, tmp_path):
    (tmp_path / "a.jsonl").write_text("x" * 10_000)
    path = str(tmp_path / "a.jsonl")
    assert len(sources.Corpus(config("jsonl", path=path), num_pieces, min_bytes).pieces) == expected


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_only_a_file_has_a_byte_order_mark(source, tmp_path):
    """The same character at the beginning of a text is a part of the text."""
    texts, file = ["\ufeffone", "\ufeff"], tmp_path / f"rows.{source}"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    file.write_bytes(f"\ufeff{lines}".encode() if source == "jsonl" else parquet(pa.table({"text": texts})))
    documents, _ = read_documents(config(source, path=str(file)))
    assert [text for _, text in documents] == texts


def documents_and_faults(config: DataConfig) -> tuple[list[sources.Entry], list[ConfigError]]:
    corpus = sources.Corpus(config)
    entries = [entry for piece in corpus.pieces for entry in corpus.read(piece)]
    faults = [content for _, content in entries if isinstance(content, ConfigError)]
    return [entry for entry in entries if entry[1] not in faults], faults


def test_a_damaged_row_group_costs_only_its_own_rows(tmp_path):
    """Each of four row groups has 100 rows. The second one is damaged, which is one fault."""
    table = pa.table({"text": [f"{i:03}" for i in range(400)]})
    options = {"row_group_size": 100, "write_page_checksum": True, "compression": "none", "use_dictionary": False}
    (tmp_path / "a.parquet").write_bytes(parquet(table, **options).replace(b"150", b"xyz"))
    documents, faults = documents_and_faults(config("parquet", path=f"{tmp_path}/a.parquet"))
    rows = [int(text) for _, text in documents]
    assert rows == [number for number in range(400) if number not in range(100, 200)]
    assert [place for place, _ in documents[99:101]] == [f"{tmp_path}/a.parquet, row {number}" for number in (100, 201)]
    assert len(faults) == 1


def test_a_record_with_a_wrong_byte_is_faulty(tmp_path):
    table = pa.table({"prompt": ["a", "b", "c"], "completion": ["one", "three", "four"]})
    (tmp_path / "a.parquet").write_bytes(parquet(table).replace(b"three", b"th\xffee"))
    settings = {"path": f"{tmp_path}/a.parquet", "format": "prompt_completion"}
    assert_one_line_error(config("parquet", **settings), "a.parquet, row 2: the byte 0xff is not UTF-8: convert")
    documents, faults = documents_and_faults(config("parquet", **settings))
    assert [record["completion"] for _, record in documents] == ["one", "four"]
    assert len(faults) == 1


def test_parquet_files_without_rows_are_faulty(tmp_path):
    for name, table in (("a", pa.table({})), ("b", TEXTS), ("c", TEXTS[:0]), ("d", pa.table({"text": [None]})), ("e", TEXTS)):
        (tmp_path / f"{name}.parquet").write_bytes(parquet(table))
    assert lengths(config("parquet", path=f"{tmp_path}/*.parquet", on_error="skip")) == [4, 6, 4, 6]
    for names, message in (("ab", "a.parquet is empty"), ("bc", "c.parquet is empty"), ("d", "contains no text")):
        assert_one_line_error(config("parquet", path=f"{tmp_path}/[{names}].parquet"), message)


def test_a_folder_stands_for_its_files(tmp_path):
    tmp_path /= "corpus"
    (tmp_path / "sub[1]").mkdir(parents=True)
    (tmp_path / "README.md").write_text("readme")
    (tmp_path / ".hidden").write_text("hidden!")
    (tmp_path / "sub[1]" / "a.parquet").write_bytes(parquet(TEXTS))
    for name in ("a.jsonl", "b.json", "sub[1]/c.ndjson"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "gzip"}'))
    assert lengths(config("jsonl", path=str(tmp_path))) == [8, 7, 5, 16]
    assert lengths(config("parquet", path=f"{tmp_path}/")) == [4, 6]
    assert len(sources.files(config("text", path=str(tmp_path)))) == 6


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_a_document_that_is_too_large_is_an_error(source, tmp_path):
    """The limit itself is allowed. For a line of JSON, the names and quotes count as well."""
    for size, is_allowed in ((10**6 - 12, True), (10**6, source != "jsonl"), (10**6 + 1, False)):
        text = "x" * size
        content = {"text": text.encode(), "jsonl": json.dumps({"text": text}).encode() + b"\r\n"}.get(source)
        (tmp_path / "a").write_bytes(content or parquet(pa.table({"text": ["b", text]})))
        corpus = config(source, path=str(tmp_path / "a"), max_document_mb=1)
        if is_allowed:
            assert lengths(corpus)[-1] == size + 1
        else:
            where = {"text": "/a", "jsonl": "/a, line 1", "parquet": "/a, row 2"}[source]
            assert_one_line_error(corpus, f"{where} has more than data.max_document_mb=1 MB: split this document, or raise")


@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_a_file_of_nul_bytes_ends_with_an_error(source, tmp_path):
    """The file has 60 MB, but takes no space on the disk. No more than the limit is kept in memory."""
    with open(tmp_path / "a", "wb") as file:
        file.truncate(6 * 10**7)
    tracemalloc.start()
    assert_one_line_error(config(source, path=str(tmp_path / "a"), max_document_mb=2), "has more than data.max_document_mb=2")
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_rows_without_text_are_counted(tmp_path, caplog):
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n{"text": null}\n{"text": ""}\n{"text": "four"}\n \n')
    with caplog.at_level(logging.INFO):
        assert lengths(config("jsonl", path=f"{tmp_path}/a.jsonl")) == [6, 5]
        assert lengths(config("jsonl", path=f"{tmp_path}/a.jsonl", split="train[:2]")) == [6]
        lengths(config("jsonl", path=f"{tmp_path}/a.jsonl"))
    assert [record.message.split(" of data")[0] for record in caplog.records if "skipped" in record.message] == [
        "skipped     4 of 6 lines",
        "skipped     2 of 3 lines",
    ]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train[:50%]", [3, 4]),
        ("train[50%:]", [5, 6]),
        ("train[-1:]", [6]),
        ("train[:1]+train[3:]", [3, 6]),
        ("all", [3, 4, 5, 6]),
    ],
)
def test_blank_lines_are_not_entries_of_a_split(split, expected, tmp_path):
    lines = [json.dumps({"text": "x" * length}) for length in (2, 3, 4, 5)]
    (tmp_path / "a.jsonl").write_text("\n\n\n" + "\n \t\n".join(lines) + "\n\n")
    corpus = load(config("jsonl", path=str(tmp_path / "a.jsonl"), split=split), BytesTokenizer())
    assert corpus.lengths.tolist() == expected
    assert corpus.splits == {"train": 4}


def test_file_of_blank_lines_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    assert_one_line_error(config("jsonl", path=str(tmp_path / "a.jsonl")), "contains no text")


def test_parts_of_a_file_with_blank_lines_are_disjoint(tmp_path):
    """With the blank lines, the first 50% would be two lines, and the held-out line would be one of them."""
    (tmp_path / "a.jsonl").write_text("\n\n" + '{"text": "abcdef"}\n' * 2)
    training = config("jsonl", path=str(tmp_path / "a.jsonl"), split="train[:50%]", eval_split="train[1:]")
    assert load_held_out(training, BytesTokenizer(), load(training, BytesTokenizer())).lengths.tolist() == [7]


def test_files_may_differ_in_other_columns(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\u2028b", "meta": {"n": 1}}\n\n')
    (tmp_path / "b.jsonl").write_text('{"other": [1, 2], "text": "four"}\n{"text": null, "meta": "x"}\n')
    pa.parquet.write_table(pa.table({"text": ["ab"], "n": [1]}), tmp_path / "a.parquet")
    pa.parquet.write_table(pa.table({"m": ["x"], "text": ["four"], "n": ["x"]}), tmp_path / "b.parquet")
    assert lengths(config("jsonl", path=f"{tmp_path}/*.jsonl")) == [6, 5]
    assert lengths(config("parquet", path=f"{tmp_path}/*.parquet")) == [3, 5]


def test_an_unreachable_hub_is_an_error(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert_one_line_error(config("hub", path="someone/no-such-corpus"), "cannot be read: .*check data.path, data.subset")


@pytest.mark.parametrize("path", [None, "pandas", "a/b/c", "https://host/file"], ids=str)
def test_a_dataset_of_the_hub_has_an_owner_and_a_name(path):
    assert_one_line_error(config("hub", path=path), "the form owner/name")


def test_a_local_folder_is_not_a_dataset_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert_one_line_error(config("hub", path="owner/name"), "the form owner/name")


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ("train", "test", False),
        ("train+test[:1]", "test", True),
        ("all", "test[8:]", True),
        ("train[:90%]", "train[90%:]", False),
        ("train[:90%]", "train[-1:]", False),
        ("train[:9]", "train[8:]", True),
    ],
)
def test_splits_overlap_if_they_have_a_row_in_common(first, second, overlap):
    assert sources.splits_overlap(first, second, {"train": 10, "test": 9}) == overlap


@pytest.mark.parametrize(
    ("training", "held_out", "disjoint"),
    [
        pytest.param(("a*.txt", "train[1:]"), ("b*.txt", "train"), True, id="other files"),
        pytest.param(("*.txt", "train[:50%]"), ("./*.txt", "train[50%:]"), True, id="two parts of the same files"),
        pytest.param(("*.txt", "train[:50%]"), ("./*.txt", "train"), False, id="overlapping parts of the same files"),
        pytest.param(("*.txt", "train[1:]"), ("a*.txt", "train[:1]"), False, id="one file in common"),
    ],
)
def test_corpora_are_disjoint_if_no_document_is_in_both(training, held_out, disjoint, tmp_path):
    for name in ("a1", "a2", "b1"):
        (tmp_path / f"{name}.txt").write_text(name)
    first, second = (config("text", path=f"{tmp_path}/{path}", split=split) for path, split in (training, held_out))
    assert sources.are_disjoint(first, second, {"train": 3}) == disjoint


def test_other_datasets_of_the_hub_are_disjoint():
    first, second = (config("hub", path=path, split="train") for path in ("owner/a", "owner/b"))
    assert sources.are_disjoint(first, second, {"train": 3})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),  # the same documents
        ({"split": "validation"}, False),
        ({"split": "train[:50%]"}, True),
        ({"split": "validation+train"}, True),
        ({"subset": "de"}, False),
        ({"column": "other"}, False),
        ({"path": "owner/other"}, False),
    ],
)
def test_overlap_of_two_parts_of_a_hub_dataset(changes, expected):
    first = DataConfig(source="hub", path="owner/name", subset="en")
    assert sources.overlap(first, replace(first, **changes), {"train": 10}) == expected
