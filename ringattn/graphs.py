"""CUDA graphs replay with the addresses that a call had when it was captured: what it read there has to stay."""

from typing import TypeVar

import torch

T = TypeVar("T")

_kept: dict[int, object] = {}  # by id


def keep_if_captured(thing: T, device: torch.device) -> T:
    """`thing`, which holds tensors on `device`, never to be given back if a CUDA graph is being captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _kept[id(thing)] = thing
    return thing
