"""Functions of the CUDA driver that torch does not offer: copies by copy engines, and flags that a stream sets or waits for.

None of these operations occupies an SM, and all of them run in the order of a stream. Addresses refer to device memory,
including memory of other GPUs that is mapped in this process. Streams are raw handles, `torch.cuda.Stream.cuda_stream`. A flag
is a 32-bit word.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache

_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_WORD_MASK = 0xFFFFFFFF
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
# A wait compares for equality (CU_STREAM_WAIT_VALUE_EQ). A write uses the default, which is visible to all devices.
_OPERATION_FLAGS = {_WAIT: 1, _WRITE: 0}
# The driver accepts fewer than 256 operations per call. An even number keeps a wait together with the write that clears its
# flag.
_MAX_OPERATIONS = 254


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, 48 bytes: one operation that waits for a 32-bit value or writes a 32-bit value."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("_padding", ctypes.c_uint64 * 2),
    ]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D, the description of a strided copy between two device addresses."""

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
    # The library is loaded on first use, because machines without a GPU have no driver.
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, stream, uint = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint
    # ctypes would pass addresses as 32-bit integers without these types. All functions return an error code, an int.
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
    """Copy `count` pieces of `width` bytes with a copy engine. Consecutive pieces are one pitch apart on each side."""
    # Contiguous pieces are one plain copy, which is cheaper to describe and to execute.
    if target_pitch == source_pitch == width or count == 1:
        return copy(target, source, count * width, stream)
    # The cached description must not be modified, because other copies use
    # it as well. Therefore the addresses are written into a copy of it.
    description = _Copy2D.from_buffer_copy(_copy_2d(target_pitch, source_pitch, width, count))
    description.target, description.source = target, source
    _check("to copy rows", _driver().cuMemcpy2DAsync_v2(description, stream))


@lru_cache(maxsize=1024)
def _copy_2d(target_pitch: int, source_pitch: int, width: int, count: int) -> _Copy2D:
    """Return the description of a copy, without the addresses of the source and the target.

    The description is cached, because filling in all of its fields takes as long as the call of the driver.
    """
    pitches = {"target_pitch": target_pitch, "source_pitch": source_pitch}
    return _Copy2D(source_kind=_DEVICE, target_kind=_DEVICE, width=width, count=count, **pitches)


def write_flag(address: int, value: int, stream: int) -> None:
    """Write a flag once all earlier work of the stream has finished and is visible to every device."""
    # A flag has 32 bits. The number of a hop may exceed this range, so only its lowest 32 bits are written.
    _check("to write a flag", _driver().cuStreamWriteValue32_v2(stream, address, value & _WORD_MASK, 0))


def set_flags(addresses: Sequence[int], stream: int) -> None:
    """Set flags to 1, one after the other, once all earlier work of the stream has finished and is visible to every device."""
    _run_in_order([(_WRITE, address, 1) for address in addresses], stream)


def wait_and_clear_flags(addresses: Sequence[int], stream: int) -> None:
    """Let later work of the stream wait until each flag is 1, and reset each flag to 0."""
    _run_in_order([step for address in addresses for step in ((_WAIT, address, 1), (_WRITE, address, 0))], stream)


def _run_in_order(steps: Sequence[tuple[int, int, int]], stream: int) -> None:
    """Enqueue steps (_WAIT or _WRITE, address, value) with as few driver calls, and graph nodes, as possible."""
    for first in range(0, len(steps), _MAX_OPERATIONS):
        some = steps[first : first + _MAX_OPERATIONS]
        operations = [(kind, address, value, _OPERATION_FLAGS[kind]) for kind, address, value in some]
        code = _driver().cuStreamBatchMemOp_v2(stream, len(some), (_Operation * len(some))(*operations), 0)
        _check("to set or await flags", code)
