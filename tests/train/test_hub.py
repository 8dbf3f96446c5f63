"""Tests of training on a dataset of the Hugging Face hub. A local server answers as the hub does."""

import datasets
import pytest

from ringattn.train.data import sources
from ringattn.train.data.stream import open_stream
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.settings.config import ConfigError, DataConfig
from tests.train.hub_server import start_server, use_server
from tests.train.launch import SMALL, launch_ranks

# Every subset and every split has its own number of tokens. A document has one token per byte and one EOS.
TEXTS = {
    subset: {split: [word * 63] * count for split, count in counts.items()}
    for subset, word, counts in (("small", "a", {"train": 20, "test": 3}), ("large", "b", {"train": 40, "test": 7}))
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with start_server(TEXTS) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        yield server


def train(directory, *arguments: str) -> tuple[bool, str, str]:
    text = "data=hub", "data.path=owner/corpus", "data.column=body", "data.eval_fraction=0.01"
    arguments = [*SMALL, *text, "trainer.steps=2", "name=a", *arguments]
    return launch_ranks(2, directory, *arguments, prepare=use_server)


def test_two_ranks_train_on_a_subset_and_a_split(hub, tmp_path):
    """The training text is half of 40 documents, and the held-out text consists of 7 documents. All of them have 64 tokens."""
    succeeded, stdout, stderr = train(tmp_path, "data.subset=large", "data.split='train[:50%]'", "data.eval_split=test")
    assert succeeded, stderr
    assert "owner/corpus" in stdout
    assert "19 sequences of 64 tokens per epoch, 6 held-out sequences" in stdout
    assert "step 2/2" in stdout
    assert "eval loss" in stdout
    assert {name for name in hub.read if name != "README.md"} == {"large/train.parquet", "large/test.parquet"}


def test_two_ranks_stream_and_resume(hub, tmp_path):
    """Streaming downloads only the splits that are read. The same command continues the run."""
    arguments = ["data.subset=large", "data.streaming=true", "data.eval_split=test", "parallel.ring=1", "trainer.eval_every=1"]
    succeeded, stdout, stderr = train(tmp_path, *arguments)
    assert succeeded, stderr
    assert "streamed by 2 readers, which shuffle 10,000 documents, 6 held-out sequences" in stdout
    assert {name for name in hub.read if name != "README.md"} == {"large/train.parquet", "large/test.parquet"}
    hub.read.clear()
    succeeded, resumed, stderr = train(tmp_path, *arguments, "trainer.steps=3")
    assert succeeded, stderr
    assert "step_00000002" in resumed
    assert "step 3/3" in resumed
    assert "large/train.parquet" in hub.read


def test_a_stream_of_the_hub_equals_its_documents(hub, tmp_path, monkeypatch):
    use_server()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    config = DataConfig("hub", path="owner/corpus", subset="small", split="train", column="body", seq_len=64, streaming=True)
    data = open_stream(config, BytesTokenizer())
    tokens = [data.sequence(index)[0].tolist() for index in range(12)]
    assert tokens == [[256, *b"a" * 63]] * 12
    saved = data.saved_positions([data.positions], 12)
    assert data.at(saved, 12).sequence(12)[0].tolist() == tokens[0]
    assert set(hub.read) == {"README.md", "small/train.parquet"}


def test_a_lost_connection_is_an_error_of_one_line(hub, monkeypatch):
    def lose(*_):
        raise ConnectionError("Server Disconnected")
        yield

    use_server()
    data = open_stream(DataConfig("hub", path="owner/corpus", subset="small", column="body", streaming=True), BytesTokenizer())
    monkeypatch.setattr(sources, "hub_rows", lose)
    with pytest.raises(
        ConfigError, match=r"owner/corpus cannot be read: ConnectionError: Server Disconnected; check .* the network"
    ):
        data.sequence(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["data.subset=huge"], ["small", "large"]),
        ([], ["Config name is missing", "check data.path, data.subset"]),
        (["data.subset=small", "data.split=validation"], ["validation", "train"]),
        (["data.subset=small", "data.column=text"], ["no column 'text'", "data.column to one of body"]),
        (["data.path=owner/other"], ["owner/other", "check data.path"]),
    ],
    ids=["unknown subset", "no subset", "unknown split", "unknown column", "unknown dataset"],
)
def test_mistakes_are_reported_in_one_line(arguments, named, hub, tmp_path):
    succeeded, _, stderr = train(tmp_path, *arguments)
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert not succeeded, stderr
    assert len(errors) == 1, stderr
    assert "Traceback" not in stderr, stderr
    assert [part for part in named if part not in errors[0]] == []
