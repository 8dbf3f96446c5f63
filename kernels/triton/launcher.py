"""Launches of Triton kernels that start without asking each time what to compile."""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

_compiled: dict[tuple, CompiledKernel] = {}


def launch(
    kernel: JITFunction, programs: int, operands: Sequence[Any], numbers: Sequence[int | float], **constants: Hashable
) -> None:
    """kernel[(programs,)](*operands, *numbers, **constants) on the current device, without asking each time what to compile.

    Triton spends as long on that question as a short kernel runs. The launch hooks of its profiler are not called, nor is a
    tensor on another device than the kernel's found out.

    Args:
        operands: tensors, at least one; TMA descriptors, whose blocks follow from the constants; None.
        numbers: each always of one type, integers below 2**31; the kernel specializes none of them.
        constants: in the kernel's order.
    """
    key, arguments = [id(kernel), *constants.values()], []
    for x in operands:
        if isinstance(x, Tensor):
            tensor, address = x, x.data_ptr()
            key += x.dtype, address % 16
            # Triton asks the driver about each tensor, but takes an address as it is
            arguments.append(address)
        else:
            key.append(x and x.base.dtype)
            arguments.append(x)
    device = tensor.get_device()
    key = device, *key
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*operands, *numbers, **constants)
        return
    handles = driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata
    compiled.run(programs, 1, 1, *handles, None, None, None, *arguments, *numbers, *constants.values())
