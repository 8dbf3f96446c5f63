"""Save and load sharded checkpoints. A checkpoint is written either completely or not at all.

    <directory>/step_00000010/     the tensors, as torch.distributed.checkpoint (DCP) writes them, and meta.json
    <directory>/.step_...          a checkpoint that is being written or removed; the next save deletes it

Every rank writes its own shards to a directory that all ranks see. When a run resumes, each rank reads the parts that it needs,
so the number of ranks may change. Every read compares checksums. The file meta.json contains its own checksum and the checksum
of the index. The index contains the checksum of every shard. Checkpoints of earlier versions lack some checksums.

`save` accepts only tensors, because DCP would pickle any other object, and loading a pickle may run any code. DCP's index is a
pickle as well, which `ringattn.train.checkpoint.index` reads safely.
"""

import errno
import io
import json
import logging
import os
import re
import shutil
import time
import warnings
import zipfile
import zlib
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ringattn.train.checkpoint.index import parse_index
from ringattn.train.checkpoint.progress import bytes_on_disk, local_bytes, show_progress
from ringattn.train.data.shards import FULL_DISK
from ringattn.train.parallel.memory.capacity import format_size
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.settings.config import ConfigError

log = logging.getLogger(__name__)

# The version of the format. Increase FORMAT if older code cannot read new checkpoints. Version 2 added checksums of meta.json
# and of every shard.
FORMAT = 2

CHECKPOINT_NAME = re.compile(r"step_\d{8}")

# Options that make DCP keep the given tensor names
PLANNER_OPTIONS = dict(flatten_state_dict=False, flatten_sharded_tensors=False)

# The maximum number of bytes that DCP's archive adds to a shard
ARCHIVE_BYTES = 2048

# The maximum seconds until a file of another host is visible. NFS caches names and sizes for up to 60 s.
VISIBLE_S = 70.0

# Some network file systems cannot sync a directory.
NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP)


class CheckpointError(ConfigError):
    """A checkpoint cannot be written or read."""


class DiskFullError(CheckpointError):
    """A checkpoint cannot be written, because the disk is full."""


def save(
    directory: Path,
    step: int,
    tensors: dict[str, Tensor],
    meta: dict[str, Any],
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write the checkpoint `directory/step_<step>`, and remove all but the newest `keep` checkpoints. All ranks call this
    function.

    Earlier checkpoints stay unchanged until the new checkpoint has its final name.

    Args:
        directory: the directory of the run's checkpoints.
        step: the number of completed steps.
        tensors: the tensors by name. Every rank writes its shards of DTensors. Any other tensor is written by one rank.
        meta: values that JSON can represent. `save` adds `format`, `step`, the file sizes and the checksums.
        keep: how many checkpoints to keep, at least 1.
        group: a group of all ranks for the collectives of a background thread. None: the default group.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: on every rank, if a file cannot be written; a DiskFullError if the disk is full.
    """
    target = directory / _name(step)
    temporary = target.with_name(f".{target.name}.tmp")
    is_rank_0 = not dist.is_initialized() or dist.get_rank() == 0
    try:
        with _sync_checkpoint_errors(temporary, group):
            if others := [name for name, value in tensors.items() if not torch.is_tensor(value)]:
                raise TypeError(f"{others[0]} is not a tensor")
            if is_rank_0:
                _remove_hidden(directory)
        with _show_save(target, temporary, tensors):
            with _sync_checkpoint_errors(temporary, group):
                files = _write_tensors(temporary, tensors, group)
            with _sync_checkpoint_errors(target, group):
                if is_rank_0:
                    _wait_for_files(temporary, files)
                    _write_meta(temporary, {**meta, "format": FORMAT, "step": step, "files": files})
                    _publish(temporary, target)
        with _sync_checkpoint_errors(target, group):
            if is_rank_0:
                _wait_for_files(target, files)
                _remove(directory, _list_checkpoints(directory)[: -max(keep, 1)])
    except CheckpointError as error:
        with sync_errors(group):
            if is_rank_0:  # Incomplete files of a failed save would keep the disk full.
                shutil.rmtree(temporary, ignore_errors=True)
                if isinstance(error, DiskFullError):
                    raise _describe_full_disk(target, tensors) from error
        raise
    return target


def _show_save(target: Path, temporary: Path, tensors: dict[str, Tensor]) -> AbstractContextManager[None]:
    size = estimate_size(tensors.values())

    def next_launch() -> str:
        if newest := latest(target.parent):
            return f"the next launch then resumes from {newest}"
        return "the next launch then starts from the beginning, because there is no complete checkpoint"

    return show_progress(("saving", "saved"), target, size, lambda: bytes_on_disk(temporary) / size, next_launch)


def estimate_size(tensors: Iterable[Tensor]) -> int:
    """Return the approximate size of a checkpoint in bytes, over all ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    # `numel` of a DTensor counts the whole tensor.
    return sum(tensor.numel() * tensor.element_size() + ranks * ARCHIVE_BYTES for tensor in tensors)


def check_space(directory: Path, step: int, needed: int, keep: int, saves: int) -> None:
    """Check before the first step that the disk has space for the checkpoints. Only one rank calls this function.

    If the disk has space for some but not all checkpoints, log a warning. The run will remove checkpoints of steps after
    `step`, so their space counts as free.

    Args:
        directory: the directory of the run's checkpoints, which may not exist yet.
        needed: the bytes of one checkpoint.
        keep: how many checkpoints the run keeps.
        saves: how many checkpoints the run writes.

    Raises:
        ConfigError: the disk does not have enough space for one checkpoint.
    """
    later = _later_checkpoints(directory, step)
    free = _free_space(directory) + sum(map(bytes_on_disk, [*later, *directory.glob(".step_*")]))
    # A save writes the new checkpoint before it removes the oldest one.
    added = min(saves, max(keep + 1 - len(_list_checkpoints(directory)) + len(later), 1))
    sizes = f"needs about {format_size(needed)}, and {directory} has {format_size(free)} free"
    if free < needed:
        raise ConfigError(
            f"the disk is too full for a checkpoint: each {sizes}; free some space, or choose another hydra.run.dir"
        )
    if free < added * needed:
        log.warning(
            f"{'disk':<12}the disk has too little space for {added} more checkpoints: each {sizes}; free some space, or lower "
            f"trainer.keep_checkpoints={keep}"
        )


def delete_later_checkpoints(directory: Path, step: int) -> None:
    """Remove the checkpoints of steps after `step`. Only one rank calls this function."""
    _remove(directory, _later_checkpoints(directory, step))


def latest(directory: Path) -> Path | None:
    """Return the checkpoint with the highest step in `directory`, or None."""
    return max(_list_checkpoints(directory), default=None)


def read_meta(path: Path) -> dict[str, Any]:
    """Return the `meta` of a checkpoint, with the entries that `save` has added.

    Raises:
        CheckpointError: `path` is not a checkpoint, its meta.json is damaged, or a newer version saved the checkpoint.
    """
    if not path.is_dir() or not (CHECKPOINT_NAME.fullmatch(path.name) or (path / "meta.json").exists()):
        found = "another directory" if path.is_dir() else "no such directory"
        raise CheckpointError(f"{path} is not a checkpoint ({found}): give the path of a step_... directory")
    with _report_damage(path, "meta.json"):
        meta = json.loads((path / "meta.json").read_text())
        if is_count(version := meta.get("format", 1)) and version > FORMAT:
            raise CheckpointError(
                f"{path} has the format {version} of a newer version of ringattn, but this version reads formats up to "
                f"{FORMAT}: use the version that saved the checkpoint"
            )
        saved = meta.pop("checksum", None)
        if (saved is not None or version != 1) and saved != _meta_checksum(meta):
            raise ValueError("the checksum is wrong, because the file was edited or damaged")
        if not all(map(is_count, [meta["step"], *meta["files"].values()])):
            raise ValueError("step and the sizes of files must be integers of at least 0")
        if CHECKPOINT_NAME.fullmatch(path.name) and path.name != _name(meta["step"]):
            raise ValueError(f"the file belongs to step {meta['step']}")
    return meta


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def read_tensor_names(path: Path) -> set[str]:
    """Return the names of all tensors in a checkpoint. All ranks call this function.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be read.
    """
    with _sync_checkpoint_errors(path):
        return set(_read_index(path).state_dict_metadata)


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place with the values in a checkpoint. All ranks call this function.

    A DTensor may be sharded differently than in the checkpoint. Names, shapes and dtypes are compared before any tensor is
    read. Pass the model and the optimizer state either completely or not at all.

    Raises:
        CheckpointError: on every rank, if the checkpoint cannot be read or does not match `tensors`.
    """
    size, own, planner = estimate_size(tensors.values()), local_bytes(tensors.values()), _LoadPlanner(**PLANNER_OPTIONS)
    with _sync_checkpoint_errors(path), show_progress(("loading", "loaded"), path, size, lambda: planner.loaded / max(own, 1)):
        index = _read_index(path)
        if not all(hasattr(info, "checksum") for info in index.storage_data.values()):
            _log_missing_checksums(path)
        _check_tensors(path, index.state_dict_metadata, tensors)
        # DCP warns that ranks read independently of each other, which is intended here.
        with warnings.catch_warnings(action="ignore"):
            dcp.load(tensors, storage_reader=_Reader(path, index), planner=planner, no_dist=True)


@cache
def _log_missing_checksums(path: Path) -> None:
    log.info(f"{'checksums':<12}missing in {path}, because an earlier version saved it")


@contextmanager
def _convert_errors(problem: str, advice: str) -> Generator[None]:
    try:
        yield
    # CheckpointException derives from BaseException, so `except Exception` would miss it.
    except (Exception, CheckpointException) as error:
        errors = [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        first = errors[0]
        if isinstance(first, CheckpointError):
            raise first from None
        reason = next(iter(str(first).splitlines()), "").rstrip(".")
        kind = DiskFullError if any(map(_is_full_disk, errors)) else CheckpointError
        raise kind(f"{problem}: {type(first).__name__}: {reason}; {advice}") from error


def _is_full_disk(error: BaseException | None) -> bool:
    """Return whether the disk is full, which torch may report as "unexpected pos" instead of an OSError."""
    if isinstance(error, OSError):
        return error.errno in FULL_DISK
    if error is not None and error.__context__ is not None:
        return _is_full_disk(error.__context__)
    return "unexpected pos" in str(error)


def _describe_full_disk(target: Path, tensors: dict[str, Tensor]) -> DiskFullError:
    needed = estimate_size(tensors.values())
    free, newest = _free_space(target.parent), latest(target.parent)
    remaining = f"the latest checkpoint that remains is {newest}" if newest else "there is no earlier checkpoint"
    return DiskFullError(
        f"the disk or its quota is full: {target} needs about {format_size(needed)}, and {format_size(free)} are free; "
        f"{remaining}: free some space, then launch the same name again"
    )


def _free_space(directory: Path) -> float:
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    usage = shutil.disk_usage(existing)
    return usage.free if usage.total else float("inf")


@contextmanager
def _sync_checkpoint_errors(path: Path, group: dist.ProcessGroup | None = None) -> Generator[None]:
    with sync_errors(group), _convert_errors(f"saving or loading {path} failed", "check the disk and the files"):
        yield


def _report_damage(path: Path, name: str) -> AbstractContextManager[None]:
    return _convert_errors(f"{path} is damaged: {name}", "remove the directory to resume from the previous checkpoint")


def _write_tensors(directory: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, int]:
    """Return the size in bytes of each written file on rank 0, and {} on other ranks."""
    writer = _Writer(directory, sync_files=True)
    # DCP warns if there is no process group. A background thread must not call `catch_warnings`, which is not thread-safe.
    with nullcontext() if dist.is_initialized() else warnings.catch_warnings(action="ignore"):
        dcp.save(tensors, storage_writer=writer, planner=_SavePlanner(**PLANNER_OPTIONS), process_group=group)
    return getattr(writer, "sizes", {})


def _find_incomplete(path: Path, files: dict[str, int]) -> str | None:
    for name, size in files.items():
        if Path(name).name != name or not (path / name).is_file() or (path / name).stat().st_size != size:
            return name
    return None


def _wait_for_files(path: Path, files: dict[str, int]) -> None:
    """Wait for up to VISIBLE_S seconds until rank 0 sees the files of all ranks."""
    deadline = time.monotonic() + VISIBLE_S
    while (name := _find_incomplete(path, files)) is not None:
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"{path / name} is missing or incomplete for rank 0, although a rank has written it: write to a directory that "
                "all hosts share"
            )
        time.sleep(0.1)


def _write_meta(directory: Path, meta: dict[str, Any]) -> None:
    meta["index"] = zlib.crc32((directory / ".metadata").read_bytes())
    meta["checksum"] = _meta_checksum(meta)
    (directory / "meta.json").write_text(json.dumps(meta, indent=2))
    _fsync(directory / "meta.json")


def _meta_checksum(meta: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(json.loads(json.dumps(meta)), sort_keys=True).encode())


def _publish(temporary: Path, target: Path) -> None:
    # Sync the contents first. Without the sync, a power failure could leave an incomplete checkpoint under its final name.
    _fsync(temporary)
    if target.exists():
        _hide(target)
    os.rename(temporary, target)
    _fsync(target.parent)


def _fsync(path: Path) -> None:
    """Wait until a file's content, or a directory's list of files, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def _list_checkpoints(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("step_*") if CHECKPOINT_NAME.fullmatch(path.name))


def _later_checkpoints(directory: Path, step: int) -> list[Path]:
    return [path for path in _list_checkpoints(directory) if path.name > _name(step)]


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _remove(directory: Path, checkpoints: list[Path]) -> None:
    for path in checkpoints:
        _hide(path)
    _remove_hidden(directory)


def _hide(checkpoint: Path) -> None:
    os.rename(checkpoint, checkpoint.with_name(f".{checkpoint.name}.old"))


def _remove_hidden(directory: Path) -> None:
    for path in directory.glob(".step_*"):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


class _HashingStream(io.IOBase):  # passes bytes on to another stream
    def __init__(self, stream: io.IOBase):
        self._stream, self.hash = stream, xxhash.xxh3_64()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        return self._stream.write(data)

    def flush(self) -> None:  # `close` calls this function, and leaves the other stream open for the next tensor.
        self._stream.flush()


class _Writer(dcp.FileSystemWriter):
    """Adds the attribute `checksum` to the index entry of each shard."""

    sizes: dict[str, int]  # on rank 0, after a save: the sizes of the files

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.sizes = {".metadata": Path(self.path, ".metadata").stat().st_size}
        # In some releases of torch, `super().finish` fills a copy of `metadata`. Therefore read the shards from `results`.
        for info in (result.storage_data for of_rank in results for result in of_rank):
            # The shards of a file follow each other without gaps.
            self.sizes[info.relative_path] = max(self.sizes.get(info.relative_path, 0), info.offset + info.length)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        transforms: Any = self
        self.transforms = transforms
        self._hashes: dict[Any, xxhash.xxh3_64] = {}
        results = super().write_data(plan, planner)
        for result in results.value():
            result.storage_data.checksum = self._hashes[result.index].hexdigest()
        return results

    def transform_save_stream(self, entry: WriteItem, stream: io.IOBase) -> tuple[io.IOBase, list[str]]:
        transformed = _HashingStream(stream)
        self._hashes[entry.index] = transformed.hash
        return transformed, []


class _SavePlanner(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.pin_memory = False
        return plan


class _LoadPlanner(DefaultLoadPlanner):
    loaded = 0  # bytes on this rank

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        self.loaded += tensor.nbytes


class _Reader(dcp.FileSystemReader):
    """Reads tensors with an index that was already checked. DCP calls torch.load with weights_only=True."""

    def __init__(self, path: Path, index: Metadata):
        super().__init__(path)
        self._index = index

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        return self._index

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """Read a shard of a tensor and check its checksum.

        Earlier versions saved no checksums of shards. If a shard has no checksum, check the checksums in its zip archive, which
        torch.load ignores.
        """
        content = super()._slice_file(file, sinfo).read()
        with _report_damage(Path(self.path), Path(file.name).name):
            if hasattr(sinfo, "checksum"):
                is_correct = xxhash.xxh3_64(content).hexdigest() == sinfo.checksum
            else:
                with zipfile.ZipFile(io.BytesIO(content)) as archive:
                    is_correct = archive.testzip() is None
            if not is_correct:
                raise ValueError("a checksum is wrong, because the file is damaged or belongs to another checkpoint")
        return io.BytesIO(content)


def _read_index(path: Path) -> Metadata:
    """Return DCP's index: the name, shape, dtype and position of each tensor.

    Raises:
        CheckpointError: the index is damaged, or does not match the files.
    """
    meta = read_meta(path)
    if (name := _find_incomplete(path, meta["files"])) is not None:
        with _report_damage(path, name):
            raise ValueError(f"the file is missing, or its size is not {meta['files'][name]} bytes")
    with _report_damage(path, ".metadata"):
        content = (path / ".metadata").read_bytes()
        if zlib.crc32(content) != meta.get("index", zlib.crc32(content)):
            raise ValueError("the checksum is wrong")
        return parse_index(content, files=meta["files"])


def _check_tensors(path: Path, saved: dict[str, Any], tensors: dict[str, Tensor]) -> None:
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
