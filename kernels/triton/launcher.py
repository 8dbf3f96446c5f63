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

    Triton inspects all arguments of a launch, which takes as long as a short kernel. This function finds the compiled kernel
    under a short key. This function calls no launch hooks and does not detect tensors on another device.

    Args:
        operands: tensors, TMA descriptors and None, with at least one tensor. The constants must determine the block shapes of
            the descriptors.
        numbers: integers below 2**31 and floats, always of the same types. The kernel must not specialize them.
        cooperative: whether the GPU must run all programs at the same time.
    """
    key, arguments = [id(kernel), cooperative, *constants.values()], []
    for x in operands:
        if isinstance(x, Tensor):
            tensor, address = x, x.data_ptr()
            # Triton compiles a special kernel for pointers that are multiples of 16.
            key += x.dtype, address % 16
            arguments.append(address)
        else:
            # The compiled kernel depends on the dtype of a TMA descriptor, and on operands that are None.
            key.append(x and x.base.dtype)
            arguments.append(x)
    device = tensor.get_device()
    key = device, *key
    compiled = _compiled.get(key)
    if compiled is None:
        # The first launch goes through Triton, which compiles the kernel.
        options = {"launch_cooperative_grid": True} if cooperative else {}
        _compiled[key] = kernel[(programs,)](*operands, *numbers, **constants, **options)
        return
    # The grid, the stream, the kernel, three launch hooks, which are disabled, and the arguments.
    handles = driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata
    compiled.run(programs, 1, 1, *handles, None, None, None, *arguments, *numbers, *constants.values())


class PreparedLaunch:
    """Launches of one kernel on one device, with even less work. Grid, numbers, constants, options and dtypes never change.

    The arguments are those of `launch`, with Triton's launch `options`.
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
        """Launch the kernel on the stream with this address. In every call, the same operands are None."""
        addresses = [None if x is None else x.data_ptr() for x in operands]
        address_bits = 0
        for address in addresses:
            address_bits |= address or 0
        compiled = self._compiled
        if compiled is None or address_bits % 16:
            compiled = self.kernel[self.grid](*operands, *self.fixed, **self.options)
            # Triton compiles a special kernel for addresses that are multiples of 16, and only this one is kept.
            self._compiled = self._compiled if address_bits % 16 else compiled
            return
        compiled.run(
            *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *self.fixed
        )  # fmt: skip
