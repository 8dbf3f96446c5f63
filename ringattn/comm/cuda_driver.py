"""Call functions of the CUDA driver that torch lacks: copies by copy engines, and operations on flags.

A flag is a 32-bit word. A stream sets flags, and waits for flags, in order with its other operations. An address may be in the
memory of any GPU. A stream argument is the raw handle `torch.cuda.Stream.cuda_stream`. No function occupies SMs.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache

_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_WORD_MASK = 0xFFFFFFFF
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
# CU_STREAM_WAIT_VALUE_EQ and CU_STREAM_WRITE_VALUE_DEFAULT. By default, earlier work of the stream becomes visible to all
# devices before the driver writes the value.
_OPERATION_FLAGS = {_WAIT: 1, _WRITE: 0}
# The driver accepts fewer than 256 operations per call. A driver call that waits for a flag must also clear the flag.
_MAX_OPERATIONS = 254


class _Operation(ctypes.Structure):
    """The driver's CUstreamBatchMemOpParams (48 bytes)."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("_padding", ctypes.c_uint64 * 2),
    ]


class _Copy2D(ctypes.Structure):
    """The driver's CUDA_MEMCPY2D."""

    _fields_ = [
        (f"{side}{name}", kind)
        for side in ("source", "target")
        for name, kind in (
            ("_x", ctypes.c_size_t),
            ("_y", ctypes.c_size_t),
            ("_kind", ctypes.c_uint),
            ("_host", ctypes.c_void_p),
            ("", ctypes.c_uint64),
            ("_array", ctypes.c_void_p),
            ("_pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("count", ctypes.c_size_t)]


@cache
def _driver() -> ctypes.CDLL:
    # Load the driver lazily, because machines without a GPU have none.
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, stream, uint = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint
    # Without `argtypes`, ctypes would pass addresses as 32-bit integers.
    driver.cuMemcpyAsync.argtypes = pointer, pointer, ctypes.c_size_t, stream
    driver.cuMemcpy2DAsync_v2.argtypes = ctypes.POINTER(_Copy2D), stream
    driver.cuStreamWriteValue32_v2.argtypes = stream, pointer, ctypes.c_uint32, uint
    driver.cuStreamBatchMemOp_v2.argtypes = stream, uint, ctypes.POINTER(_Operation), uint
    return driver


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver failed {what}: error {code}")


def copy(target: int, source: int, count: int, stream: int) -> None:
    """Copy `count` bytes with a copy engine."""
    _check("to copy", _driver().cuMemcpyAsync(target, source, count, stream))


def copy_rows(target: int, target_pitch: int, source: int, source_pitch: int, width: int, count: int, stream: int) -> None:
    """Copy `count` rows of `width` bytes with a copy engine. A pitch is the distance in bytes from one row to the next."""
    # For contiguous rows, a plain copy is faster than a strided copy, on the host and on the GPU.
    if target_pitch == source_pitch == width or count == 1:
        return copy(target, source, count * width, stream)
    description = _Copy2D.from_buffer_copy(_copy_2d(target_pitch, source_pitch, width, count))
    description.target, description.source = target, source
    _check("to copy rows", _driver().cuMemcpy2DAsync_v2(description, stream))


@lru_cache(maxsize=1024)
def _copy_2d(target_pitch: int, source_pitch: int, width: int, count: int) -> _Copy2D:
    pitches = {"target_pitch": target_pitch, "source_pitch": source_pitch}
    return _Copy2D(source_kind=_DEVICE, target_kind=_DEVICE, width=width, count=count, **pitches)


def write_flag(address: int, value: int, stream: int) -> None:
    """Write a flag when all earlier work of the stream is visible to every device."""
    # Hop numbers can exceed 32 bits.
    _check("to write a flag", _driver().cuStreamWriteValue32_v2(stream, address, value & _WORD_MASK, 0))


def set_flags(addresses: Sequence[int], stream: int) -> None:
    """Set flags to 1 in order, after all earlier work of the stream is visible to every device."""
    _run_in_order(_writes(tuple(addresses)), stream)


def wait_and_clear_flags(addresses: Sequence[int], stream: int) -> None:
    """Make the stream wait until each flag is 1, and then reset the flag to 0."""
    _run_in_order(_waits(tuple(addresses)), stream)


# Lists of operations are cached, because creating a list takes as long as a driver call.
@lru_cache(maxsize=4096)
def _writes(addresses: tuple[int, ...]) -> list["ctypes.Array[_Operation]"]:
    return _batches([(_WRITE, address, 1) for address in addresses])


@lru_cache(maxsize=4096)
def _waits(addresses: tuple[int, ...]) -> list["ctypes.Array[_Operation]"]:
    return _batches([step for address in addresses for step in ((_WAIT, address, 1), (_WRITE, address, 0))])


def _batches(steps: Sequence[tuple[int, int, int]]) -> list["ctypes.Array[_Operation]"]:
    """Combine operations (_WAIT or _WRITE, address, value) into as few driver calls as possible."""
    operations = [_Operation(kind, address, value, _OPERATION_FLAGS[kind]) for kind, address, value in steps]
    parts = (operations[first : first + _MAX_OPERATIONS] for first in range(0, len(operations), _MAX_OPERATIONS))
    return [(_Operation * len(part))(*part) for part in parts]


def _run_in_order(batches: Sequence["ctypes.Array[_Operation]"], stream: int) -> None:
    for operations in batches:
        code = _driver().cuStreamBatchMemOp_v2(stream, len(operations), operations, 0)
        _check("to set or await flags", code)
