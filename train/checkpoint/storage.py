"""Whole-or-nothing sharded checkpoints that run no code when read.

    <directory>/step_00000010/     meta.json, and the tensors as torch.distributed.checkpoint (DCP) writes them
    <directory>/.step_...          being written or removed: never loaded, cleared by the next save

Every rank writes its own shards and reads the parts it needs, so a checkpoint resumes on any number of ranks; what is read is
held to the checksum that it was written with. The directory is one that all ranks see. All state is tensors: DCP would store
anything else as a pickle, and unpickling runs whatever the file says. Its index is a pickle all the same; it is read with an
allow-list.
"""

import io
import json
import os
import pickle
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import IO, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ringattn.train.config import ConfigError

T = TypeVar("T")

STEP = re.compile(r"step_\d{8}")

# The classes that make up DCP's index, and nothing that acts on being called.
_INDEX_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written or read: the message names the path, what is wrong and what to do."""


def save(directory: Path, step: int, tensors: dict[str, Tensor], meta: dict, keep: int) -> Path:
    """Write `directory/step_<step>` whole or not at all, and keep the newest `keep` (at least 1). All ranks call it.

    tensors: DTensors are written by the ranks that hold them; a plain tensor once, by one of the ranks that name it.
    meta: JSON; `step`, the sizes of the files and the checksum of the index are added to it.
    Raises CheckpointError, on every rank, when a file cannot be written.
    """
    target = Path(directory) / f"step_{step:08d}"
    temporary = target.with_name(f".{target.name}.tmp")
    meta = {**meta, "step": step}
    try:
        _together(temporary, lambda: _prepare(temporary) if _rank() == 0 else None)
        _together(temporary, lambda: _write_tensors(temporary, tensors))
        _together(target, lambda: _publish(temporary, target, meta, max(keep, 1)) if _rank() == 0 else None)
    except CheckpointError:
        if _rank() == 0:  # a full disk stays full otherwise
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def turn_back(directory: Path, step: int) -> None:
    """Remove the checkpoints of later steps, which a run that goes on after `step` does anew. One rank calls it."""
    for path in _steps(Path(directory)):
        if path > Path(directory) / f"step_{step:08d}":
            _hide(path)
    _clear(Path(directory))


def latest(directory: Path) -> Path | None:
    """The checkpoint of the highest step in `directory`, or None."""
    return max(_steps(Path(directory)), default=None)


def read_meta(path: Path) -> dict:
    """What `save` was given as `meta`, with `step`, `files` (name: bytes) and the checksum of the index.

    Raises CheckpointError.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint: no such directory; give the path of a step_... directory")
    if not (path / "meta.json").exists() and not STEP.fullmatch(path.name):
        raise CheckpointError(f"{path} is no checkpoint: give the path of a step_... directory")
    try:
        meta = json.loads((path / "meta.json").read_text())
        if not isinstance(meta["step"], int) or not all(isinstance(size, int) for size in meta["files"].values()):
            raise ValueError("step or files is not what save() writes")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(_unreadable(path, "meta.json", error)) from error
    return meta


def load(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` in place, resharding DTensors as needed. All ranks call it.

    Names, shapes and dtypes are compared before anything is read. The names under one prefix ("model.", "optim.")
    must be all of that prefix in the checkpoint; a prefix not asked for is left alone.
    Raises CheckpointError, on every rank.
    """
    path = Path(path)
    _together(path, lambda: _read_tensors(path, tensors))


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers as "model.<name>"; a shared one once, under its first name."""
    return {f"model.{name}": tensor.detach() for name, tensor in _model_tensors(model).items()}


def train_state(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """`model_state`, and "optim.<parameter>.<exp_avg | exp_avg_sq | step>"; the tensors themselves, not copies.

    An optimizer that has not stepped is given the zero state that its first step would make.
    """
    names = {id(tensor): name for name, tensor in _model_tensors(model).items()}
    tensors = model_state(model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state.update(_zero_state(parameter, on_device=bool(group["fused"] or group["capturable"])))
            tensors |= {f"optim.{names[id(parameter)]}.{key}": value for key, value in state.items()}
    return tensors


def rng_state() -> dict[str, Tensor]:
    """This rank's generators as uint8 tensors: "rng.rank<r>.cpu", and "rng.rank<r>.cuda" when CUDA is in use."""
    state = {f"rng.rank{_rank()}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state[f"rng.rank{_rank()}.cuda"] = torch.cuda.get_rng_state()
    return state


def load_rng(path: Path) -> bool:
    """Restore this rank's generators, those in use now and then. False, and nothing done, for another number of ranks."""
    path, state = Path(path), rng_state()
    saved = _together(path, lambda: _read_index(path).state_dict_metadata)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if [f"rng.rank{rank}.cpu" in saved for rank in range(ranks + 1)] != [True] * ranks + [False]:
        return False
    state = {name: generator for name, generator in state.items() if name in saved}
    load(path, state)
    for name, generator in state.items():
        (torch.cuda if name.endswith("cuda") else torch).set_rng_state(generator)
    return True


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    tensors, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():  # unlike named_parameters, it makes FSDP reshard
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def _zero_state(parameter: Tensor, on_device: bool) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu"),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def _prepare(temporary: Path) -> None:
    temporary.parent.mkdir(parents=True, exist_ok=True)
    _clear(temporary.parent)
    temporary.mkdir()


def _write_tensors(temporary: Path, tensors: dict[str, Tensor]) -> None:
    others = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if others:
        raise TypeError(f"{others[0]} is not a tensor")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a single process is not distributed
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(temporary, sync_files=True),
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=not dist.is_initialized(),
        )


def _publish(temporary: Path, target: Path, meta: dict, keep: int) -> None:
    """Finish the directory, give it its name, then drop what it replaces."""
    meta = {**meta, "files": {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}}
    meta["index"] = zlib.crc32((temporary / ".metadata").read_bytes())
    with open(temporary / "meta.json", "w") as file:
        file.write(json.dumps(meta, indent=2))
        file.flush()
        os.fsync(file.fileno())
    _sync(temporary)
    if target.exists():
        _hide(target)
    os.rename(temporary, target)
    _sync(target.parent)
    for path in _steps(target.parent)[:-keep]:
        _hide(path)
    _clear(target.parent)


def _hide(checkpoint: Path) -> None:
    """Removing takes time: under a name that is never loaded, half a checkpoint does no harm."""
    os.rename(checkpoint, checkpoint.with_name(f".{checkpoint.name}.old"))


def _clear(directory: Path) -> None:
    for leftover in directory.glob(".step_*"):
        shutil.rmtree(leftover)


def _steps(directory: Path) -> list[Path]:
    """The finished checkpoints, oldest first: eight digits sort by name."""
    return sorted(path for path in directory.glob("step_*") if STEP.fullmatch(path.name))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _enum_member(of: type, name: str) -> Enum:
    """What Python 3.11.0 to 3.11.3, which write a member of an enumeration as an attribute of its class, ask getattr for."""
    if not (isinstance(of, type) and issubclass(of, Enum) and name in of.__members__):
        raise pickle.UnpicklingError(f"it asks for {name} of {of}, which is no member of an enumeration")
    return of[name]


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _INDEX_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


class _Reader(dcp.FileSystemReader):
    """Reads tensors (torch.load with weights_only=True) by an index that has been checked."""

    def __init__(self, path: Path, index: Metadata):
        super().__init__(path)
        self._index = index

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._index

    def _slice_file(self, file: IO[bytes], where: object) -> IO[bytes]:
        """A tensor as it was written, a zip archive, whose checksums torch.load does not look at."""
        content = io.BytesIO(super()._slice_file(file, where).read())
        try:
            with zipfile.ZipFile(content) as archive:
                if (name := archive.testzip()) is not None:
                    raise zipfile.BadZipFile(f"{name} is not what was written")
        except zipfile.BadZipFile as error:
            raise CheckpointError(_unreadable(Path(self.path), Path(file.name).name, error)) from error
        content.seek(0)
        return content


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: object, value: object) -> None:
        raise CheckpointError("a pickled object in a checkpoint is never loaded")


def _read_index(path: Path) -> Metadata:
    """DCP's index of the checkpoint: names, shapes, dtypes and where they lie, consistent with the files."""
    meta = read_meta(path)
    sizes = meta["files"]
    for name, size in sizes.items():
        if Path(name).name != name or not (path / name).is_file() or (path / name).stat().st_size != size:
            raise CheckpointError(_unreadable(path, name, ValueError(f"it is missing or not of {size} bytes")))
    try:
        written = (path / ".metadata").read_bytes()
        if zlib.crc32(written) != meta.get("index", zlib.crc32(written)):  # which those of earlier versions do not know
            raise ValueError("it is not what was written")
        index = _IndexUnpickler(io.BytesIO(written)).load()
        for name, entry in index.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise ValueError(f"{name} is a pickled object, not a tensor")
        for info in index.storage_data.values():
            if info.relative_path not in sizes or info.transform_descriptors:
                raise ValueError(f"it names the file {info.relative_path}, which save() did not write")
    except Exception as error:  # a broken pickle raises anything
        raise CheckpointError(_unreadable(path, ".metadata", error)) from error
    return index


def _read_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    index = _read_index(path)
    _check(path, index.state_dict_metadata, tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that each rank reads by itself
        dcp.load(
            dict(tensors),
            storage_reader=_Reader(path, index),
            planner=_Planner(flatten_state_dict=False, flatten_sharded_tensors=False),
            no_dist=True,
        )


def _check(path: Path, saved: dict[str, TensorStorageMetadata], tensors: dict[str, Tensor]) -> None:
    """Raise CheckpointError for the first tensor that is missing, of another shape or dtype, or left over."""
    advice = "resume with the configuration it was saved with, or start a new run under another name"
    for name, tensor in tensors.items():
        if name not in saved:
            raise CheckpointError(f"{path} has no {name}, which this run has: {advice}")
        shape, dtype = tuple(saved[name].size), saved[name].properties.dtype
        if shape != tuple(tensor.shape):
            raise CheckpointError(f"{path}: {name} has shape {shape}, in this run {tuple(tensor.shape)}: {advice}")
        if dtype != tensor.dtype:
            raise CheckpointError(f"{path}: {name} is {dtype}, in this run {tensor.dtype}: {advice}")
    prefixes = {name.split(".")[0] for name in tensors} & {"model", "optim"}
    for name in saved:
        if name not in tensors and name.split(".")[0] in prefixes:
            raise CheckpointError(f"{path} has {name}, which this run has not: {advice}")


def _together(path: Path, action: Callable[[], T]) -> T:
    """What `action` returns; where it fails on any rank, all of them raise the first failure as CheckpointError."""
    result, failure, cause = None, None, None
    try:
        result = action()
    except CheckpointError as error:
        failure, cause = str(error), error
    except (Exception, CheckpointException) as error:  # whatever the disk raises; DCP's is no Exception
        known = isinstance(_first(error), CheckpointError)
        failure = str(_first(error)) if known else f"{path} failed: {_reason(error)}; check the disk and the files"
        cause = error
    failures = [failure]
    if dist.is_initialized():
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
    first = next(filter(None, failures), None)
    if first:
        raise CheckpointError(first) from cause
    return result


def _unreadable(path: Path, name: str, error: Exception) -> str:
    return f"{path} is damaged: {name}: {_reason(error)}; remove the directory to resume from the one before"


def _first(error: BaseException) -> BaseException:
    """The error, or the first rank's when DCP has gathered them."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _reason(error: BaseException) -> str:
    """Its first line."""
    error = _first(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '').rstrip('.')}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
