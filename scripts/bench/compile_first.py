"""Compile the kernels of a benchmark in several processes, before one process measures them.

The library flash-attn-4 compiles the kernels of one case for about 10 s on one core. A process that measures many cases would
compile for minutes while the GPU is idle. Therefore several processes compile first. The compiled kernels are stored in the
disk caches of Triton and flash-attn-4.
"""

import multiprocessing
import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

import torch

from scripts.bench import peers
from scripts.bench.cases import Case

MAX_LENGTH = 16384  # the kernels of longer sequences are the same


def use_disk_cache() -> None:
    """Enable the disk cache of flash-attn-4. Call this function before the import of the library.

    The variable FLASH_ATTENTION_CUTE_DSL_CACHE_DIR sets its folder.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


def distinct_cases(cases: Iterable[Case]) -> list[Case]:
    """Cases that differ only in length or window use the same kernels."""
    found = {}
    for case in cases:
        short = replace(case, length=min(case.length, MAX_LENGTH))
        grouped = case.heads // case.num_key_heads
        found.setdefault((case.kind, case.head_dim, case.out_dim, grouped), short)
    return list(found.values())


def compile_first(cases: Iterable[Case], names: list[str], workers: int) -> dict[tuple[str, Case], str]:
    """Compile the kernels of all cases in `workers` processes.

    Returns:
        A description of the error for each call that failed.
    """
    start = time.perf_counter()
    errors: dict[tuple[str, Case], str] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool:
        calls = {pool.submit(_call, name, case): (name, case) for case in distinct_cases(cases) for name in names}
        for call in as_completed(calls):
            if error := call.exception():
                errors[calls[call]] = f"{type(error).__name__}: {error}"
    print(f"compiled {len(calls)} calls in {time.perf_counter() - start:.0f} s, {len(errors)} failed", flush=True)
    return errors


def _call(name: str, case: Case) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    *inputs, dout = case.inputs(device)
    try:
        with peers.context(name):
            out = peers.IMPLEMENTATIONS[name](case, device)(*inputs)
            torch.autograd.grad(out, inputs, dout)
    except peers.Unsupported:
        return
    if device.type == "cuda":
        torch.cuda.synchronize()
