"""CUDA graphs replay with the addresses that a call had when it was captured: what it read there has to stay."""

import torch

_kept: dict[int, object] = {}  # by id


def keep_if_captured(thing: object, device: torch.device) -> None:
    """Never give back `thing`, which holds tensors on `device`, if a CUDA graph is being captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _kept[id(thing)] = thing
