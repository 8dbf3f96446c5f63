"""Read the index of a checkpoint without running code from it.

torch.distributed.checkpoint (DCP) stores the index `.metadata` as a pickle, and loading a pickle may run any code.
"""

import io
import pickle
from collections.abc import Container
from enum import Enum

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

# The classes of objects that unpickling may create, because their creation has no side effects
_METADATA_CLASSES = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
    *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
)
# All classes that an index may contain, each with its module.
_ALLOWED_CLASSES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA_CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # the module and the name of PosixPath in Python 3.13 and later
}


def parse_index(content: bytes, files: Container[str]) -> Metadata:
    """Parse the content of an index. The argument `files` contains the names of the checkpoint's other files.

    Raises:
        Exception: the content is not an index, or the index names a file that is not in `files`. Reading a broken pickle may
            raise an error of any type.
    """
    index = _IndexUnpickler(io.BytesIO(content)).load()
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is a pickled object, but a checkpoint must contain only tensors")
    for info in index.storage_data.values():
        if info.relative_path not in files or info.transform_descriptors:
            raise ValueError(f"it refers to the file {info.relative_path}, which is not a file of this checkpoint")
    return index


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) == ("builtins", "getattr"):
            return _get_enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not allowed in a checkpoint")


def _get_enum_member(enum: object, name: str) -> Enum:
    """Return a member of an Enum. In pickles of Python 3.11.0 to 3.11.3, a member is a call of `getattr`."""
    if not (isinstance(enum, type) and issubclass(enum, Enum) and name in enum.__members__):
        raise pickle.UnpicklingError(f"it contains the attribute {name} of {enum}, which is not allowed in a checkpoint")
    return enum[name]
