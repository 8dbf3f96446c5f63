"""Run the source of warp-specialised Gluon kernels on the CPU in float64, to test their logic without a GPU.

Triton has no interpreter for Gluon. This module executes the Python source of a kernel with PyTorch instead. Every partition of
a program is a thread. The programs of a launch run at the same time if the launch is cooperative, and otherwise one after
another. Asynchronous operations take effect at the most unfavourable time that the hardware allows:

- TMA overwrites a tile of shared memory as soon as the load is issued. A tile that is released too early is therefore wrong.
- A product reads its operands in shared memory only when a partition waits for the product. An operand that is released before
  this wait is therefore wrong, too.
- TMA's reduce-add reads shared memory only when the thread waits for the read. TMA adds the values to global memory only when
  the thread waits for the completion of its bulk operations.
- Partitions pause at random times. Shared memory is filled with NaN at the start.

A barrier that gets too many arrivals raises an error, and so does a wait of more than TIMEOUT seconds. The emulator ignores
layouts, registers, fences and rounding.
"""

import inspect
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import ConstexprFunction

from ringattn.kernels.hopper import common as hopper_common

TIMEOUT = 20.0
LONGEST_ADDITION = 0.0  # seconds that an addition to global memory may take
FLOAT, INTEGER = torch.float64, torch.int64

_partition = threading.local()  # program, programs, and the products that this thread has issued and not completed
_changed = threading.Condition()  # notified when a barrier completes a phase


def _pause() -> None:
    """Let another partition run, at random times."""
    if random.random() < 0.05:
        time.sleep(random.random() * 0.002)


def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds. The caller holds the lock of `_changed`."""
    if not _changed.wait_for(condition, TIMEOUT):
        raise TimeoutError("a partition waits for a barrier that does not complete")


class Barrier:
    """An mbarrier. A phase completes when `count` arrivals have been counted and all expected bytes have been copied."""

    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, arrivals: int, more_bytes: int) -> None:
        with _changed:
            self.pending -= arrivals
            self.bytes += more_bytes
            assert self.pending >= 0, "too many partitions arrived at a barrier"
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                _changed.notify_all()

    def wait(self, parity: Any) -> None:
        """Wait until the last completed phase has this parity."""
        _pause()
        with _changed:
            _wait_until(lambda: self.phase % 2 != int(parity))


class NamedBarriers:
    """The hardware barriers of a program for bar.sync and bar.arrive with 256 threads, which are two partitions."""

    def __init__(self) -> None:
        self.arrived: dict[int, int] = {}

    def arrive(self, number: int, wait: bool) -> None:
        with _changed:
            index = self.arrived[number] = self.arrived.get(number, 0) + 1
            _changed.notify_all()
            if wait:
                _wait_until(lambda: self.arrived[number] >= index + index % 2)


class Shared:
    """A buffer in shared memory, or a part of one."""

    dtype = FLOAT

    def __init__(self, data: Tensor | list[Barrier]) -> None:
        self.data = data

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def index(self, i: Any) -> "Shared | Barrier":
        return self.data[int(i)] if isinstance(self.data, list) else Shared(self.data[int(i)])

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.data.permute(order))

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, start, length))

    def load(self, _layout: Any) -> Tensor:
        _pause()
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        _pause()
        self.data.copy_(value)


class Pointer:
    """A pointer to elements of a tensor, at one offset or at a tensor of offsets."""

    dtype = SimpleNamespace(element_ty=FLOAT)

    def __init__(self, memory: Tensor, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset - offset)

    def locate(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Return the offsets and the mask, with the same shape."""
        offsets, mask = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(True if mask is None else mask))
        inside = (offsets >= 0) & (offsets < self.memory.numel())
        assert inside[mask].all(), "a kernel accesses memory outside of a tensor"
        return offsets.clamp(0, self.memory.numel() - 1), mask


class Descriptor:
    """A TMA descriptor of a tensor, which loads blocks and fills elements outside of the tensor with zeros."""

    dtype, layout = FLOAT, None

    def __init__(self, tensor: Tensor, block: tuple[int, ...]) -> None:
        self.tensor, self.block = tensor, block
        self.block_type = SimpleNamespace(shape=block, nbytes=torch.Size(block).numel())

    def reduce_add(self, coordinates: list, source: Shared) -> None:
        """Start to add a tile (64, n), in the order in which the registers of a warpgroup hold it, to rows of 32 numbers."""
        _partition.sends.append([self.tensor.view(-1), int(coordinates[0]) * self.block[1], source])

    def store(self, coordinates: list, source: Shared) -> None:
        """Start to copy a tile to this tensor."""
        start = [int(x) for x in coordinates]
        part = self.tensor[tuple(slice(x, x + n) for x, n in zip(start, self.block, strict=True))]
        _partition.stores.append((part, source, self.block))

    def load(self, coordinates: list, barrier: Barrier, destination: Shared) -> None:
        _pause()
        start = [int(x) for x in coordinates]
        sizes = [min(x + n, total) - x for x, n, total in zip(start, self.block, self.tensor.shape, strict=True)]
        tile = torch.zeros(self.block, dtype=FLOAT)
        if min(sizes) > 0:
            part = self.tensor[tuple(slice(x, x + n) for x, n in zip(start, sizes, strict=True))]
            tile[tuple(map(slice, sizes))] = part.to(FLOAT)
        destination.data.copy_(tile.view(destination.data.shape))
        barrier.arrive(0, -self.block_type.nbytes)


def _wait_for_sources(in_flight: int) -> None:
    """Wait until TMA has read shared memory."""
    assert in_flight == 0
    _pause()
    for part, source, block in _partition.stores:
        part.copy_(source.data.view(block)[..., : part.shape[-1]])
    _partition.stores.clear()
    for send in _partition.sends:
        if isinstance(send[2], Shared):
            send[2] = send[2].data.view(4, 2, 8, -1, 4, 2).permute(3, 0, 2, 4, 1, 5).flatten()


def _wait_for_sends() -> None:
    """Wait until TMA has added everything to global memory."""
    _wait_for_sources(0)
    for memory, offset, values in _partition.sends:
        with _changed:
            memory[offset : offset + len(values)] += values
    _partition.sends.clear()


class Product:
    """A product in flight."""

    def __init__(self, left: Any, right: Shared, addend: Any, use_acc: bool) -> None:
        self.operands, self.result = (left, right, addend if use_acc else None), None

    def compute(self) -> None:
        left, right, addend = self.operands
        self.result = (left.data if isinstance(left, Shared) else left) @ right.data
        if addend is not None:
            self.result = self.result + _result(addend)


def _result(value: Any) -> Any:
    if not isinstance(value, Product):
        return value
    assert value.result is not None, "a partition reads a product without waiting for it"
    return value.result


def _issue(left: Any, right: Shared, addend: Any, *, use_acc: bool = True, is_async: bool) -> Product:
    assert is_async
    _partition.products.append(Product(left, right, addend, use_acc))
    return _partition.products[-1]


def _wait_for_products(in_flight: int, deps: tuple) -> Any:
    _pause()
    while len(_partition.products) > in_flight:
        _partition.products.pop(0).compute()
    results = tuple(map(_result, deps))
    return results if len(results) > 1 else results[0]


def _allocate(dtype: torch.dtype, shape: list[int], _layout: Any) -> Shared | Barrier:
    if dtype != INTEGER:
        return Shared(torch.full(shape, float("nan"), dtype=FLOAT))
    return Shared([Barrier() for _ in range(shape[0])]) if len(shape) > 1 else Barrier()


def _load(pointer: Pointer, mask: Any = None, other: float = 0) -> Tensor:
    offsets, mask = pointer.locate(mask)
    loaded = pointer.memory.view(-1)[offsets]
    return torch.where(mask, loaded, torch.as_tensor(other, dtype=loaded.dtype))


def _store(pointer: Pointer, value: Tensor, mask: Any = None) -> None:
    offsets, mask = pointer.locate(mask)
    pointer.memory.view(-1)[offsets[mask]] = value.expand(mask.shape)[mask].to(pointer.memory.dtype)


def _where(condition: Any, x: Any, y: Any) -> Tensor:
    dtype = next(value.dtype for value in (x, y) if isinstance(value, Tensor))
    return torch.where(torch.as_tensor(condition), *(torch.as_tensor(value, dtype=dtype) for value in (x, y)))


def _warp_specialize(partitions: list[tuple[Callable, tuple]], _warps: list[int], _registers: list[int]) -> None:
    """Run the partitions of the current program in threads, and raise the error of one of them."""
    program, errors = vars(_partition).copy(), []

    def run(function: Callable, arguments: tuple) -> None:
        vars(_partition).update(program, products=[], sends=[], stores=[])
        try:
            function(*arguments)
            _wait_for_sends()
            assert not _partition.products, "a partition ends before its products are complete"
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # A partition that fails lets the others time out, so prefer any other error.
        raise next((error for error in errors if not isinstance(error, TimeoutError)), errors[0])


def _execute(assembly: str) -> int:
    """Emulate the assembly instructions that the kernels execute: a move of 0, barriers, and the wait for TMA."""
    if assembly.startswith("cp.async.bulk.wait_group 0"):
        if random.random() < 0.2:
            time.sleep(random.random() * LONGEST_ADDITION)
        _wait_for_sends()
    if assembly.startswith(("mov.b32 $0, 0", "cp.async.bulk.wait_group 0", "bar.warp.sync")):
        return 0
    operation, number = re.match(r"bar\.(sync|arrive) (\d+), 256", assembly).groups()
    _partition.named_barriers.arrive(int(number), operation == "sync")
    return 0


def _reinterpret(buffer: Shared, _dtype: Any, shape: list[int], _layout: Any) -> Shared:
    """Return a view of the memory from the start of a buffer. The dtype stays float64."""
    return Shared(buffer.data.as_strided(shape, torch.empty(shape, device="meta").stride()))


def _tile_view(buffer: Shared, descriptor: Descriptor) -> Shared:
    size = descriptor.block_type.nbytes
    return buffer if buffer.data.numel() == size else _reinterpret(buffer, None, [size], None)


def _access(assembly: str, _constraints: str, operands: list, **_options: Any) -> Any:
    """Emulate the assembly instructions that load and store a number in global memory."""
    # A thread that polls a number must leave the processor to the thread that will change this number.
    time.sleep(0.001)
    memory, offset = operands[0].memory, int(operands[0].offset)
    with _changed:
        if assembly.startswith("st.release.gpu"):
            memory[offset] = int(operands[1])
        else:
            assert "ld.acquire.gpu" in assembly
        return memory[offset].clone()


def _atomic_add(pointer: Pointer, value: int, sem: str) -> Tensor:
    with _changed:
        before = pointer.memory[int(pointer.offset)].clone()
        pointer.memory[int(pointer.offset)] += value
    return before


def _nothing(*_arguments: Any, **_options: Any) -> None:
    """Stand for layouts and fences."""


LANGUAGE = SimpleNamespace(
    constexpr=lambda x: x, static_range=range, to_tensor=torch.tensor, exp2=torch.exp2, log2=torch.log2, where=_where,
    float32=FLOAT, int64=INTEGER, int32=INTEGER, uint32=INTEGER,
    minimum=lambda x, y: torch.minimum(torch.as_tensor(x), torch.as_tensor(y)),
    maximum=lambda x, y: torch.maximum(torch.as_tensor(x), torch.as_tensor(y)),
    zeros=lambda shape, _dtype, _layout: torch.zeros(shape, dtype=FLOAT),
    zeros_like=torch.zeros_like, full_like=torch.full_like, min=torch.amin, max=torch.amax, sum=torch.sum,
    join=lambda x, y: torch.stack((x, y), -1),
    full=lambda shape, value, _dtype, _layout: torch.full(shape, value, dtype=FLOAT),
    arange=lambda start, end, layout=None: torch.arange(start, end),
    convert_layout=lambda x, _layout: x, SliceLayout=_nothing, DotOperandLayout=_nothing,
    NVMMASharedLayout=SimpleNamespace(get_default_for=_nothing), SharedLinearLayout=_nothing, BlockedLayout=_nothing,
    inline_asm_elementwise=_access, atomic_add=_atomic_add,
    program_id=lambda _axis: torch.tensor(_partition.program), num_programs=lambda _axis: torch.tensor(_partition.programs),
    allocate_shared_memory=_allocate, load=_load, store=_store, warp_specialize=_warp_specialize,
)  # fmt: skip

MBARRIER = SimpleNamespace(
    init=lambda barrier, count: barrier.init(count), wait=Barrier.wait, MBarrierLayout=_nothing,
    arrive=lambda barrier, count: barrier.arrive(count, 0),
    # The predicate may be the inversion of a Python bool, which is -1 or -2.
    expect=lambda barrier, size, pred=True: barrier.arrive(1, size) if pred & 1 else None,
)  # fmt: skip


def source_functions(modules: list[ModuleType]) -> dict[str, Callable]:
    """Return the kernels and the device functions of these modules, which use the emulator in place of Gluon."""
    names: dict[str, Any] = dict(
        gl=LANGUAGE, tl=LANGUAGE, mbarrier=MBARRIER, hopper_common=SimpleNamespace(
            execute=_execute, tma_store_wait=_wait_for_sources, thread_barrier=_nothing, reinterpret=_reinterpret,
            NEEDS_SLICES=hopper_common.NEEDS_SLICES.value,
        ),
        execute=_execute,
        warpgroup_mma=_issue, warpgroup_mma_wait=_wait_for_products, fence_async_shared=_nothing, accumulator_layout=_nothing,
        tma_load=Descriptor.load, tma_store=Descriptor.store, tma_reduce_add=Descriptor.reduce_add,
        tile_view=_tile_view,
    )  # fmt: skip
    emulated = set(names)
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, gl.constexpr):
                names[name] = value.value
            elif isinstance(value, ConstexprFunction) and name not in emulated:
                names[name] = value.fn
            elif isinstance(value, ModuleType) and value in modules and name not in emulated:
                names[name] = SimpleNamespace(**{key: x for key, x in names.items() if key in vars(value)})
            elif hasattr(value, "fn") and name not in emulated:
                source = inspect.getsource(value.fn)
                # A tensor of PyTorch has no type with a layout, and no method expand_dims.
                source = source[source.index("def ") :].replace(".type.layout", ".layout").replace("expand_dims", "unsqueeze")
                exec(compile(source, f"{module.__name__}.{name}", "exec"), names)
    return names


@contextmanager
def emulated(module: ModuleType, programs: int, others: list[ModuleType] = ()) -> Iterator[None]:
    """Run the Gluon kernels that `module` launches in the emulator, with at most `programs` programs per launch.

    `others` are the modules whose device functions the kernels call. The tensors must be on the CPU. Plain Triton kernels run
    as usual, in Triton's interpreter. On machines with a GPU, where tests do not use the interpreter, the test is skipped.
    """
    if torch.cuda.is_available():
        pytest.skip("the emulator needs Triton's interpreter, which tests use only on machines without a GPU")
    functions = source_functions([hopper_common, *others, module])

    def run(
        kernel: Any,
        grid: int,
        operands: tuple,
        numbers: tuple,
        cooperative: bool = False,
        max_registers: Any = None,
        **constants: Any,
    ) -> None:
        if not isinstance(kernel, GluonJITFunction):
            kernel[(grid,)](*operands, *numbers, **constants)
            return
        arguments = [Descriptor(x.base, x.block) if hasattr(x, "block") else Pointer(x) for x in operands]
        numbers = [torch.tensor(x) if isinstance(x, int) else x for x in numbers]

        def run_program(program: int) -> None:
            vars(_partition).update(program=program, programs=grid, named_barriers=NamedBarriers())
            vars(_partition).update(products=[], sends=[], stores=[])
            functions[kernel.fn.__name__](*arguments, *numbers, *constants.values())

        with ThreadPoolExecutor(grid if cooperative else 1) as pool:
            list(pool.map(run_program, range(grid)))

    def describe(x: Tensor, rows: int, dim: int, heads: int = 1) -> SimpleNamespace:
        return SimpleNamespace(base=x, block=(1, rows, heads, dim))

    def with_base(descriptor: Any, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(base=x.view(-1), block=tuple(descriptor.block_shape))

    with (
        mock.patch.object(module, "launch", run),
        mock.patch.object(torch.cuda, "device_of", mock.MagicMock()),
        mock.patch.object(hopper_common, "num_programs", return_value=programs),
        mock.patch.object(hopper_common, "tma_descriptor", describe),
        mock.patch.object(hopper_common, "with_base", with_base),
    ):
        yield
