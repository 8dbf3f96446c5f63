"""The few calls of the CUDA driver that a ring needs beyond torch: copies and flags in the order of a stream, without any SM.

Addresses are those of device memory, a peer's mapped here included; streams are raw handles, `torch.cuda.Stream.cuda_stream`.
Flags are words of 32 bits.
"""

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache

_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_WORD = 0xFFFFFFFF
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_MOST_STEPS = 254  # of one call: fewer than 256, and an even number, for a wait and a write belong together
_HOW = {_WAIT: 1, _WRITE: 0}  # CU_STREAM_WAIT_VALUE_EQ; a write that all devices see


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams, 48 bytes, of a wait or a write of 32 bits."""

    _fields_ = [
        ("kind", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("_rest", ctypes.c_uint64 * 2),
    ]


class _Rows(ctypes.Structure):
    """CUDA_MEMCPY2D, of device memory on both sides."""

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
    ] + [("width", ctypes.c_size_t), ("rows", ctypes.c_size_t)]


@cache
def _functions() -> tuple:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, word = ctypes.c_uint64, ctypes.c_uint32
    signatures = {
        "cuMemcpyAsync": (pointer, pointer, ctypes.c_size_t, ctypes.c_void_p),
        "cuStreamWriteValue32_v2": (ctypes.c_void_p, pointer, word, ctypes.c_uint),
        "cuStreamBatchMemOp_v2": (ctypes.c_void_p, ctypes.c_uint, ctypes.POINTER(_Operation), ctypes.c_uint),
        "cuMemcpy2DAsync_v2": (ctypes.POINTER(_Rows), ctypes.c_void_p),
    }
    functions = []
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
        functions.append(function)
    return tuple(functions)


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"the CUDA driver refused {what}: error {code}")


def copy(target: int, source: int, count: int, stream: int) -> None:
    """Copy `count` bytes, by a copy engine."""
    _check("a copy", _functions()[0](target, source, count, stream))


def copy_rows(target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int, stream: int) -> None:
    """Copy `rows` pieces of `width` bytes that stand `pitch` bytes apart, by a copy engine."""
    if target_pitch == source_pitch == width or rows == 1:
        return copy(target, source, rows * width, stream)
    move = _Rows.from_buffer_copy(_rows(target_pitch, source_pitch, width, rows))
    move.target, move.source = target, source
    _check("a copy of rows", _functions()[3](move, stream))


@lru_cache(maxsize=1024)
def _rows(target_pitch: int, source_pitch: int, width: int, rows: int) -> _Rows:
    """The description of a copy from nowhere to nowhere; to fill one in anew takes as long as the call itself."""
    pitches = {"target_pitch": target_pitch, "source_pitch": source_pitch}
    return _Rows(source_kind=_DEVICE, target_kind=_DEVICE, width=width, rows=rows, **pitches)


def write_flag(address: int, value: int, stream: int) -> None:
    """Set a flag once all earlier work of the stream is done and seen by every device."""
    _check("to write a flag", _functions()[1](stream, address, value & _WORD, 0))


def raise_flags(addresses: Sequence[int], stream: int) -> None:
    """Set flags to 1, one after the other, once all earlier work of the stream is done and seen by every device."""
    _in_order([(_WRITE, address, 1) for address in addresses], stream)


def take_flags(addresses: Sequence[int], stream: int) -> None:
    """Let later work of the stream wait until each flag is 1, and put each back to 0."""
    _in_order([step for address in addresses for step in ((_WAIT, address, 1), (_WRITE, address, 0))], stream)


def _in_order(steps: Sequence[tuple[int, int, int]], stream: int) -> None:
    """(_WAIT or _WRITE, address, value), in as few calls, and nodes of a graph, as the driver takes."""
    for first in range(0, len(steps), _MOST_STEPS):
        some = steps[first : first + _MOST_STEPS]
        array = (_Operation * len(some))(*[(kind, address, value, _HOW[kind]) for kind, address, value in some])
        _check("flags", _functions()[2](stream, len(some), array, 0))
