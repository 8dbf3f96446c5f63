"""Sharded checkpoints that are written completely or not at all.

    <directory>/step_00000010/     the tensors, as torch.distributed.checkpoint (DCP) writes them, and meta.json
    <directory>/.step_...          a checkpoint that is being written or removed; the next save removes what is left of it

Every rank writes its own shards and reads the parts that it needs, so a run can resume on any number of ranks. The directory
must be visible to all ranks. Everything that is read is compared with the checksum that was written with it.

A checkpoint contains only tensors. DCP would store any other object as a pickle, and loading a pickle may run any code. DCP's
index is a pickle nevertheless, so `ringattn.train.checkpoint.index` reads it with a list of allowed classes.
"""

import io
import json
import os
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ringattn.train.checkpoint.index import parse_index
from ringattn.train.config import ConfigError
from ringattn.train.parallel.ranks import sync_errors

CHECKPOINT_NAME = re.compile(r"step_\d{8}")

# DCP stores every tensor under the name that we give it, and does not add a table of nested names to the index.
PLANNER_OPTIONS = dict(flatten_state_dict=False, flatten_sharded_tensors=False)


class CheckpointError(ConfigError):
    """A checkpoint cannot be written or read. The message names the path, the reason and what to do."""


def save(directory: Path, step: int, tensors: dict[str, Tensor], meta: dict, keep: int) -> Path:
    """Write the checkpoint `directory/step_<step>`, and remove all but the newest `keep` checkpoints.

    All ranks call this function. If it fails or is interrupted, the earlier checkpoints are unchanged.

    Args:
        directory: the directory of the run's checkpoints.
        step: the number of completed steps.
        tensors: the tensors by name. Every rank writes its own shards of a DTensor. One of the ranks writes a plain tensor.
        meta: additional data that JSON can represent. `step`, the sizes of the files and the checksum of the index are added.
        keep: how many checkpoints to keep, at least 1.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: on every rank, if a file cannot be written.
    """
    target = directory / f"step_{step:08d}"
    temporary = target.with_name(f".{target.name}.tmp")
    is_rank_0 = not dist.is_initialized() or dist.get_rank() == 0
    try:
        with _sync_checkpoint_errors(temporary):
            if is_rank_0:
                _remove_hidden(directory)
        with _sync_checkpoint_errors(temporary):
            _write_tensors(temporary, tensors)
        with _sync_checkpoint_errors(target):
            if is_rank_0:
                _write_meta(temporary, {**meta, "step": step})
                _publish(temporary, target)
                _remove(directory, _list_checkpoints(directory)[: -max(keep, 1)])
    except CheckpointError:
        if is_rank_0:  # If the disk is full, the files of this attempt would keep it full.
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def delete_later_checkpoints(directory: Path, step: int) -> None:
    """Remove the checkpoints of steps after `step`. One rank calls this function."""
    _remove(directory, [path for path in _list_checkpoints(directory) if path.name > f"step_{step:08d}"])


def latest(directory: Path) -> Path | None:
    """Return the checkpoint of the highest step in `directory`, or None if there is no checkpoint."""
    return max(_list_checkpoints(directory), default=None)


def read_meta(path: Path) -> dict:
    """Return the `meta` of `save`, with the additional entries `step`, `files` (bytes by file name) and `index` (a checksum).

    Raises:
        CheckpointError: `path` is not a checkpoint, or it is damaged.
    """
    if not path.is_dir() or not (CHECKPOINT_NAME.fullmatch(path.name) or (path / "meta.json").exists()):
        found = "another directory" if path.is_dir() else "no such directory"
        raise CheckpointError(f"{path} is not a checkpoint ({found}): give the path of a step_... directory")
    with _report_damage(path, "meta.json"):
        meta = json.loads((path / "meta.json").read_text())
        if not isinstance(meta["step"], int) or not all(isinstance(size, int) for size in meta["files"].values()):
            raise ValueError("step and the sizes of files must be integers")
    return meta


def read_tensor_names(path: Path) -> set[str]:
    """Return the names of all tensors in the checkpoint at `path`. All ranks call this function.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be read.
    """
    with _sync_checkpoint_errors(path):
        return set(_read_index(path).state_dict_metadata)


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place with the values in the checkpoint at `path`. All ranks call this function.

    DTensors may be sharded in another way than in the checkpoint. Names, shapes and dtypes are compared before anything is
    read. If `tensors` contains a name that begins with "model." or "optim.", it must contain all names in the checkpoint that
    begin in the same way.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be read or does not fit.
    """
    with _sync_checkpoint_errors(path):
        index = _read_index(path)
        _check_tensors(path, index.state_dict_metadata, tensors)
        # DCP warns that every rank reads by itself, which is intended.
        with warnings.catch_warnings(action="ignore"):
            dcp.load(tensors, storage_reader=_Reader(path, index), planner=DefaultLoadPlanner(**PLANNER_OPTIONS), no_dist=True)


@contextmanager
def _convert_errors(problem: str, advice: str) -> Iterator[None]:
    """Report every error of the body as a CheckpointError of one line: the problem, the first error, and the advice."""
    try:
        yield
    # CheckpointException is not a subclass of Exception.
    except (Exception, CheckpointException) as error:
        # DCP gathers the errors of all ranks in a CheckpointException. The error of the lowest rank that failed is reported.
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        if isinstance(first, CheckpointError):
            raise first from None
        reason = next(iter(str(first).splitlines()), "").rstrip(".")
        raise CheckpointError(f"{problem}: {type(first).__name__}: {reason}; {advice}") from error


@contextmanager
def _sync_checkpoint_errors(path: Path) -> Iterator[None]:
    """Report every error of the body as a CheckpointError, and raise it on all ranks."""
    with sync_errors(), _convert_errors(f"{path} failed", "check the disk and the files"):
        yield


def _report_damage(path: Path, name: str) -> AbstractContextManager[None]:
    """Report every error of the body as damage to the file `name` of the checkpoint at `path`."""
    return _convert_errors(f"{path} is damaged: {name}", "remove the directory to resume from the previous checkpoint")


def _write_tensors(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Write the tensors and their index to `directory`, which DCP creates."""
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is not a tensor")
    writer = dcp.FileSystemWriter(directory, sync_files=True)
    # DCP warns if there is no process group.
    with warnings.catch_warnings(action="ignore"):
        dcp.save(tensors, storage_writer=writer, planner=DefaultSavePlanner(**PLANNER_OPTIONS))


def _write_meta(directory: Path, meta: dict) -> None:
    meta["files"] = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    meta["index"] = zlib.crc32((directory / ".metadata").read_bytes())
    (directory / "meta.json").write_text(json.dumps(meta, indent=2))
    _fsync(directory / "meta.json")


def _publish(temporary: Path, target: Path) -> None:
    """Give a completely written checkpoint its name."""
    # The files must be on the disk before the directory has its name. Otherwise a power failure could leave a checkpoint that
    # has a valid name but lacks some of its contents.
    _fsync(temporary)
    if target.exists():
        _hide(target)
    os.rename(temporary, target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    """Wait until a file, or the list of the files in a directory, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _list_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints, the oldest first.

    Step numbers have eight digits, so the order of names is that of steps.
    """
    return sorted(path for path in directory.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name))


def _remove(directory: Path, checkpoints: list[Path]) -> None:
    for path in checkpoints:
        _hide(path)
    _remove_hidden(directory)


def _hide(checkpoint: Path) -> None:
    """Rename a checkpoint before it is removed. If the removal is interrupted, the incomplete checkpoint is never loaded."""
    os.rename(checkpoint, checkpoint.with_name(f".{checkpoint.name}.old"))


def _remove_hidden(directory: Path) -> None:
    for path in directory.glob(".step_*"):
        shutil.rmtree(path)


class _Reader(dcp.FileSystemReader):
    """Reads tensors by means of an index that has been checked. torch.load reads them with weights_only=True."""

    def __init__(self, path: Path, index: Metadata):
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._index

    def _slice_file(self, file: IO[bytes], info: object) -> IO[bytes]:
        """Read a tensor, which is stored as a zip archive, and check its checksums. torch.load does not check them."""
        content = io.BytesIO(super()._slice_file(file, info).read())
        with _report_damage(Path(self.path), Path(file.name).name), zipfile.ZipFile(content) as archive:
            if (name := archive.testzip()) is not None:
                raise zipfile.BadZipFile(f"the checksum of {name} is wrong")
        content.seek(0)
        return content


def _read_index(path: Path) -> Metadata:
    """Return DCP's index of the checkpoint: names, shapes and dtypes of the tensors, and their positions in the files.

    Raises:
        CheckpointError: the index is damaged, or it does not agree with the files.
    """
    meta = read_meta(path)
    for name, size in meta["files"].items():
        with _report_damage(path, name):
            if Path(name).name != name or not (path / name).is_file() or (path / name).stat().st_size != size:
                raise ValueError(f"the file is missing, or its size is not {size} bytes")
    with _report_damage(path, ".metadata"):
        content = (path / ".metadata").read_bytes()
        # The first versions of ringattn did not write a checksum of the index.
        if zlib.crc32(content) != meta.get("index", zlib.crc32(content)):
            raise ValueError("the checksum is wrong")
        return parse_index(content, files=meta["files"])


def _check_tensors(path: Path, saved: dict[str, TensorStorageMetadata], tensors: dict[str, Tensor]) -> None:
    """Compare the tensors of a checkpoint with those of the run.

    Raises:
        CheckpointError: a tensor is missing in the checkpoint or in the run, or it has another shape or dtype.
    """
    prefixes = {name.split(".")[0] for name in tensors} & {"model", "optim"}
    found = {name: f"{entry.properties.dtype} of shape {tuple(entry.size)}" for name, entry in saved.items()}
    expected = {name: f"{tensor.dtype} of shape {tuple(tensor.shape)}" for name, tensor in tensors.items()}
    for name in expected | found:
        is_compared = name in expected or name.split(".")[0] in prefixes
        if is_compared and found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{path}: {name} is {found.get(name, 'missing')}, but {expected.get(name, 'missing')} in this run: resume with "
                "the configuration of the checkpoint, or start a new run under another name"
            )
