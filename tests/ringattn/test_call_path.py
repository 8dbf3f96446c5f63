"""A reader who follows one forward pass from the public call to the kernel reads few files."""

import sys
from pathlib import Path

import torch

from ringattn import Layout, Mask, ring_attention, simulate

ROOT = Path(__file__).parents[2]
MAX_FILES = 12


def files_entered(rank: int, group: object) -> list[str]:
    """The files of this repository in which functions are called between ring_attention and the kernel, in order."""
    files: dict[str, None] = {}

    def record(frame, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("kernels", "ringattn"):
            files[str(path.relative_to(ROOT))] = None
            if path.name == "blockwise.py":
                sys.setprofile(None)

    layout = Layout.zigzag(16, 2)
    q, k, v = torch.randn(3, 1, 8, 2, 4)
    sys.setprofile(record)
    try:
        ring_attention(q, k, v, layout=layout, mask=Mask.causal(), group=group, backend=BACKEND)
    finally:
        sys.setprofile(None)
    return list(files)


def test_a_forward_pass_enters_few_files() -> None:
    """The second call of a training loop, for which the plan and the transport exist."""

    def twice(rank: int, group: object) -> list[str]:
        files_entered(rank, group)
        return files_entered(rank, group)

    for files in simulate(2, twice):
        assert files[0] == "ringattn/attention.py" and files[-1] == "kernels/blockwise.py"
        assert len(files) <= MAX_FILES, files
