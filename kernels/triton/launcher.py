"""Launch Triton kernels without the work that Triton repeats on the host for every launch."""

import os
from collections.abc import Hashable, Sequence
from typing import Any

import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

# Triton 3.10 will no longer fuse multiplications and additions by default.
OPTIONS = {"enable_fp_fusion": True}
_compiled: dict[tuple, CompiledKernel] = {}


def launch_by_triton(kernel: JITFunction, grid: tuple[int, ...], is_cuda: bool, *arguments: Any, **options: Any) -> Any:
    """Launch kernel[grid](*arguments, **options). Compile kernels for Hopper GPUs with ptxas 12.9.

    Triton 3.9 contains ptxas 12.9, but uses ptxas 13 by default, which spills more registers. This function changes the default
    only during the launch. The environment variable TRITON_PTXAS_BLACKWELL_PATH chooses another assembler.
    """
    is_chosen = not triton.__version__.startswith("3.9.") or "TRITON_PTXAS_BLACKWELL_PATH" in os.environ
    if is_chosen or not is_cuda or driver.active.get_current_target().arch != 90:
        return kernel[grid](*arguments, **options)
    with triton.knobs.nvidia.scope():
        triton.knobs.nvidia.ptxas_blackwell = triton.knobs.nvidia.ptxas.path
        # Triton's cache key contains only the version of a process's first assembler. This option distinguishes the kernels.
        return kernel[grid](*arguments, **options, ptx_version=88)


def launch(
    kernel: JITFunction,
    programs: int,
    operands: Sequence[Any],
    numbers: Sequence[int | float],
    cooperative: bool = False,
    max_registers: int | None = None,
    **constants: Hashable,
) -> None:
    """Launch kernel[(programs,)](*operands, *numbers, **constants) on the current device.

    Triton inspects all arguments of a launch, which takes as long as a short kernel. Therefore `launch` looks up compiled
    kernels by a short key. Unlike Triton, `launch` calls no launch hooks and does not detect tensors on another device.

    Args:
        operands: tensors, TMA descriptors and None, with at least one tensor; the constants must determine the block shapes of
            the descriptors.
        numbers: integers below 2**31 and floats. Their types never change, and the kernel must not specialize them.
        cooperative: whether the GPU must run all programs at the same time.
        max_registers: the maximal number of registers per thread, or None if only the hardware limits it.
    """
    key, arguments = [id(kernel), cooperative, max_registers, *constants.values()], []
    for x in operands:
        if isinstance(x, Tensor):
            tensor, address = x, x.data_ptr()
            # Triton compiles a special kernel for addresses that are multiples of 16.
            key += x.dtype, address % 16
            arguments.append(address)
        else:
            key.append(x and x.base.dtype)
            arguments.append(x)
    device = tensor.get_device()
    key = device, *key
    compiled = _compiled.get(key)
    if compiled is None:
        options = OPTIONS | ({"launch_cooperative_grid": True} if cooperative else {})
        options |= {"maxnreg": max_registers} if max_registers else {}
        _compiled[key] = launch_by_triton(kernel, (programs,), tensor.is_cuda, *operands, *numbers, **constants, **options)
        return
    # The three None arguments disable Triton's launch hooks.
    handles = driver.active.get_current_stream(device), compiled.function, compiled.packed_metadata
    compiled.run(programs, 1, 1, *handles, None, None, None, *arguments, *numbers, *constants.values())


class PreparedLaunch:
    """Launch one kernel repeatedly, each time with other tensors of the same dtypes."""

    def __init__(
        self,
        kernel: JITFunction,
        grid: tuple[int, int, int],
        options: dict[str, int],
        numbers: Sequence[int | float],
        **constants: Any,
    ) -> None:
        self.kernel, self.grid, self.options = kernel, grid, OPTIONS | options
        self.fixed = *numbers, *constants.values()
        self._compiled: CompiledKernel | None = None  # compiled for addresses that are multiples of 16

    def __call__(self, stream: int | None, *operands: Tensor | None) -> None:
        """An operand that is None in one call must be None in all calls."""
        addresses = [None if x is None else x.data_ptr() for x in operands]
        address_bits = 0
        for address in addresses:
            address_bits |= address or 0
        compiled = self._compiled
        if compiled is None or address_bits % 16:
            compiled = launch_by_triton(self.kernel, self.grid, stream is not None, *operands, *self.fixed, **self.options)
            self._compiled = self._compiled if address_bits % 16 else compiled
            return
        compiled.run(
            *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *self.fixed
        )  # fmt: skip
