"""Compute fp32 matrix products in full precision, even if autocast, TF32 or bf16 products are enabled."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import torch

# PyTorch's private functions read and write settings 7 times as fast as the public attributes.
_SETTINGS = ("cuda", "matmul"), ("mkldnn", "matmul")
_get, _set = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
_lock = threading.Lock()
_num_users = 0  # active contexts, over all threads
_replaced: list[tuple[tuple[str, str], str]] = []  # the settings to restore, and their values


def under_autocast(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)


@contextmanager
def exact_products(device: torch.device) -> Generator[None]:
    """While this context manager is active, no other thread should read or change PyTorch's precision settings."""
    global _num_users
    with _lock:
        for setting in _SETTINGS:
            if (precision := _get(*setting)) in ("tf32", "bf16"):
                _replaced.append((setting, precision))
                _set(*setting, "ieee")
        _num_users += 1
    try:
        if under_autocast(device):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield
    finally:
        with _lock:
            _num_users -= 1
            while _replaced and not _num_users:
                setting, precision = _replaced.pop(0)
                _set(*setting, "none")
                if _get(*setting) != precision:
                    _set(*setting, precision)
