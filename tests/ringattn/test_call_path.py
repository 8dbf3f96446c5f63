"""Tests of how many source files one forward pass goes through, which are the files that a newcomer must read to follow it."""

import sys
from pathlib import Path
from types import FrameType

import torch

from ringattn import Layout, Mask, ring_attention, simulate

ROOT = Path(__file__).resolve().parents[2]
MAX_FILES_ON_THE_STACK = 12  # between ring_attention and the kernel
MAX_FILES_ENTERED = 24  # with everything that is called on the way: validation, plan, transport, packing of messages


def relative_path(frame: FrameType) -> str:
    """The path of the source file of a frame in this repository, or an empty string."""
    path = Path(frame.f_code.co_filename).resolve()
    path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(".")
    return str(path) if path.parts and path.parts[0] in ("kernels", "ringattn") else ""


def trace_forward(rank: int, group: object) -> tuple[list[str], list[str]]:
    """Run one forward pass; return the files on the stack when the kernel is called, and all files entered before that."""
    entered: dict[str, None] = {}
    stack: list[str] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        path = relative_path(frame)
        if event != "call" or not path or stack:
            return
        entered[path] = None
        if path == "kernels/blockwise.py":
            caller: FrameType | None = frame
            while caller is not None:
                stack.append(relative_path(caller))
                caller = caller.f_back

    layout, mask = Layout.zigzag(16, 2), Mask.causal()
    q, k, v = torch.randn(3, 1, 8, 2, 4)
    sys.setprofile(record)
    try:
        ring_attention(q, k, v, layout=layout, mask=mask, group=group, backend="blockwise")
    finally:
        sys.setprofile(None)
    # Outermost file first. The stack begins with the threads of the simulated ring, which are not part of the call.
    files = list(dict.fromkeys(path for path in reversed(stack) if path))
    return files[files.index("ringattn/attention.py") :], list(entered)


def test_a_forward_pass_goes_through_few_files() -> None:
    """This is the second call of a training loop, when the plan and the transport exist."""

    def call_twice(rank: int, group: object) -> tuple[list[str], list[str]]:
        trace_forward(rank, group)
        return trace_forward(rank, group)

    for stack, entered in simulate(2, call_twice):
        assert stack[0] == "ringattn/attention.py"
        assert stack[-1] == "kernels/blockwise.py"
        assert len(stack) <= MAX_FILES_ON_THE_STACK, stack
        assert len(entered) <= MAX_FILES_ENTERED, entered
