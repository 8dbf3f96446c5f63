"""Launch Triton kernels without the host work that Triton repeats for every launch."""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

_compiled: dict[tuple, CompiledKernel] = {}


def launch(
    kernel: JITFunction, programs: int, operands: Sequence[Any], numbers: Sequence[int | float], **constants: Hashable
) -> None:
    """Launch kernel[(programs,)](*operands, *numbers, **constants) on the current device.

    Triton inspects all arguments of a launch to find the compiled kernel, which takes as long as a short kernel runs. This
    function caches the compiled kernel under a short key instead. It does not call the launch hooks of Triton's profiler, and
    it does not notice a tensor that is on another device than the rest.

    Args:
        kernel: the kernel; its parameters are the operands, then the numbers, then the constants.
        programs: number of programs in the grid.
        operands: tensors, TMA descriptors and None, with at least one tensor. The blocks of descriptors must follow from the
            constants.
        numbers: integers below 2**31 and floats. Each must have the same type in every launch, and the kernel must not
            specialize any of them.
        constants: the constexpr arguments, in the kernel's order.
    """
    key, arguments = [id(kernel), *constants.values()], []
    for x in operands:
        if isinstance(x, Tensor):
            tensor, address = x, x.data_ptr()
            # Triton compiles a special kernel for pointers that are multiples of 16, so the key contains the remainder.
            key += x.dtype, address % 16
            # Pass the address. For a tensor, Triton would ask the CUDA driver whether the pointer is on the device.
            arguments.append(address)
        else:
            # A TMA descriptor of another dtype needs another kernel, and so does an operand that is None.
            key.append(x and x.base.dtype)
            arguments.append(x)
    device = tensor.get_device()
    key = device, *key
    compiled = _compiled.get(key)
    if compiled is None:
        # The first launch goes through Triton, which compiles the kernel and launches it.
        _compiled[key] = kernel[(programs,)](*operands, *numbers, **constants)
        return
    # The arguments of `run` are the grid, the stream, the kernel, three values for launch hooks, and the arguments of the
    # kernel. The three values are None, so no hook is called.
    handles = driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata
    compiled.run(programs, 1, 1, *handles, None, None, None, *arguments, *numbers, *constants.values())
