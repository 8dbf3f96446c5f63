"""The index of a checkpoint is a pickle, but reading it runs no code."""

import io
import json
import os
import pickle
import warnings
import zlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ringattn.train.checkpoint import storage
from ringattn.train.checkpoint.index import parse_index


class MakeDirectory:
    """Creates a directory when it is unpickled in the usual way."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.path),)


class ReadAttribute:
    """Calls getattr, but not for a member of an enumeration, when it is unpickled."""

    def __reduce__(self) -> tuple[Callable, tuple]:
        return getattr, (torch.Size, "numel")


class OldPickler(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value: object) -> object:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return storage.save(tmp_path / "checkpoints", 1, {"model.w": torch.arange(6.0)}, {}, keep=1)


def replace_index(path: Path, content: bytes) -> None:
    """Replace the index of a checkpoint, with a size and a checksum that agree with it. meta.json then has no checksum."""
    (path / ".metadata").write_bytes(content)
    meta = json.loads((path / "meta.json").read_text())
    meta["files"][".metadata"], meta["index"] = len(content), zlib.crc32(content)
    meta["format"], meta["checksum"] = 1, None
    (path / "meta.json").write_text(json.dumps(meta))


def load_weight(path: Path) -> torch.Tensor:
    weight = torch.zeros(6)
    storage.load(path, {"model.w": weight})
    return weight


def test_an_index_lists_the_tensors_and_their_files(checkpoint):
    index = parse_index((checkpoint / ".metadata").read_bytes(), files={"__0_0.distcp"})
    assert list(index.state_dict_metadata) == ["model.w"]
    assert index.state_dict_metadata["model.w"].size == (6,)


def test_a_file_outside_the_checkpoint_is_rejected(checkpoint):
    with pytest.raises(ValueError, match=r"refers to the file __0_0\.distcp"):
        parse_index((checkpoint / ".metadata").read_bytes(), files={"another.distcp"})


@pytest.mark.parametrize("name", ["load", "float32.fget", "nn.Linear"])
def test_other_objects_of_torch_are_rejected(name):
    """Only the dtypes of torch are allowed, because functions such as torch.load run code."""
    protocol_0 = f"ctorch\n{name}\n.".encode()
    with pytest.raises(pickle.UnpicklingError, match=f"torch.{name}, which is not allowed"):
        parse_index(protocol_0, files=set())


def test_code_in_an_index_is_not_run(checkpoint, tmp_path):
    replace_index(checkpoint, pickle.dumps(MakeDirectory(tmp_path / "made")))
    with pytest.raises(storage.CheckpointError, match=r"posix\.mkdir, which is not allowed"):
        load_weight(checkpoint)
    with pytest.raises(storage.CheckpointError, match=r"posix\.mkdir"):
        storage.read_tensor_names(checkpoint)
    assert not (tmp_path / "made").exists()

    # The usual unpickler would have run it.
    pickle.loads((checkpoint / ".metadata").read_bytes())
    assert (tmp_path / "made").exists()


def test_code_in_an_entry_is_not_run(tmp_path):
    path = tmp_path / "step_00000001"
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model.w": MakeDirectory(tmp_path / "made")}, checkpoint_id=path)
    files = {file.name: file.stat().st_size for file in path.iterdir()}
    (path / "meta.json").write_text(json.dumps({"step": 1, "files": files}))
    with pytest.raises(storage.CheckpointError, match=r"model\.w is a pickled object"):
        load_weight(path)
    assert not (tmp_path / "made").exists()


def test_an_index_of_an_early_python_3_11_can_be_read(checkpoint):
    content = io.BytesIO()
    OldPickler(content).dump(pickle.loads((checkpoint / ".metadata").read_bytes()))
    assert b"getattr" in content.getvalue()
    replace_index(checkpoint, content.getvalue())
    assert torch.equal(load_weight(checkpoint), torch.arange(6.0))


def test_getattr_reads_only_members_of_enumerations(checkpoint):
    replace_index(checkpoint, pickle.dumps(ReadAttribute()))
    with pytest.raises(storage.CheckpointError, match=r"the attribute numel of <class 'torch\.Size'>, which is not allowed"):
        load_weight(checkpoint)


@pytest.mark.parametrize(
    ("content", "error"),
    [(pickle.dumps({"a": 1}), "AttributeError"), (b"\x80\x04garbage", "UnpicklingError")],
    ids=["another object", "not a pickle"],
)
def test_a_file_that_is_not_an_index_is_an_error(content, error, checkpoint):
    replace_index(checkpoint, content)
    with pytest.raises(storage.CheckpointError, match=rf"\.metadata: {error}.*remove the directory"):
        load_weight(checkpoint)
