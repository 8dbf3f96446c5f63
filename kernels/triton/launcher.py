"""Launch Triton kernels faster, without the work that Triton repeats on the host for every launch."""

from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

_compiled: dict[tuple, CompiledKernel] = {}


def launch(
    kernel: JITFunction,
    programs: int,
    operands: Sequence[Any],
    numbers: Sequence[int | float],
    cooperative: bool = False,
    **constants: Hashable,
) -> None:
    """Launch kernel[(programs,)](*operands, *numbers, **constants) on the current device.

    Triton inspects all arguments of a launch to find the compiled kernel. This inspection takes as long as the run of a short
    kernel. This function caches the compiled kernel under a short key instead. This function does not call the launch hooks of
    Triton's profiler. It also does not detect a tensor that is on a different device than the other operands.

    Args:
        kernel: the kernel. Its parameters are the operands, followed by the numbers and the constants.
        programs: number of programs in the grid.
        operands: tensors, TMA descriptors and None, with at least one tensor. The constants must determine the block shapes of
            the descriptors.
        numbers: integers below 2**31 and floats. Each number must have the same type in every launch, and the kernel must not
            specialize any number.
        cooperative: whether the GPU must run all programs at the same time. The launch fails if they do not fit on the GPU.
        constants: the constexpr arguments, in the kernel's order.
    """
    key, arguments = [id(kernel), cooperative, *constants.values()], []
    for x in operands:
        if isinstance(x, Tensor):
            tensor, address = x, x.data_ptr()
            # Triton compiles a special kernel for pointers that are multiples of 16, so the key contains the address modulo 16.
            key += x.dtype, address % 16
            # Pass the address instead of the tensor. For a tensor, Triton would query the CUDA driver whether the pointer is on
            # the device.
            arguments.append(address)
        else:
            # The compiled kernel depends on the dtype of a TMA descriptor, and on whether an operand is None. The key therefore
            # contains the dtype, or None.
            key.append(x and x.base.dtype)
            arguments.append(x)
    device = tensor.get_device()
    key = device, *key
    compiled = _compiled.get(key)
    if compiled is None:
        # The first launch goes through Triton, which compiles the kernel and launches it.
        options = {"launch_cooperative_grid": True} if cooperative else {}
        _compiled[key] = kernel[(programs,)](*operands, *numbers, **constants, **options)
        return
    # The arguments of `run` are the grid, the stream, the kernel, three values for launch hooks, and the arguments of the
    # kernel. Passing None for these three values disables the hooks.
    handles = driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata
    compiled.run(programs, 1, 1, *handles, None, None, None, *arguments, *numbers, *constants.values())


class PreparedLaunch:
    """Launches of one kernel with the same grid, numbers, constants, options and dtypes, with even less work on the host.

    Use this class for kernels that run for only a few microseconds. Each object must be used on one device only.

    Args:
        kernel: the kernel. Its parameters are the operands, followed by the numbers and the constants.
        grid: the three dimensions of the grid.
        options: Triton's launch options, such as num_warps.
        numbers: as for `launch`.
        constants: the constexpr arguments, in the kernel's order.
    """

    def __init__(
        self,
        kernel: JITFunction,
        grid: tuple[int, int, int],
        options: dict[str, int],
        numbers: Sequence[int | float],
        **constants: Any,
    ) -> None:
        self.kernel, self.grid, self.options = kernel, grid, options
        self.fixed = *numbers, *constants.values()
        self._compiled: CompiledKernel | None = None  # compiled for addresses that are multiples of 16

    def __call__(self, stream: int | None, *operands: Tensor | None) -> None:
        """Launch the kernel on the current device.

        Args:
            stream: the address of the current stream of this device. The CPU, on which only Triton's interpreter runs, has no
                stream.
            operands: tensors and None. In every call, the same operands are None, and the others have the same dtypes.
        """
        addresses = [None if x is None else x.data_ptr() for x in operands]
        address_bits = 0
        for address in addresses:
            address_bits |= address or 0
        compiled = self._compiled
        if compiled is None or address_bits % 16:
            compiled = self.kernel[self.grid](*operands, *self.fixed, **self.options)
            # Triton compiles a special kernel for addresses that are multiples of 16. Only this kernel is kept.
            self._compiled = self._compiled if address_bits % 16 else compiled
            return
        compiled.run(
            *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *self.fixed
        )  # fmt: skip
