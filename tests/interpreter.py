"""Make Triton's interpreter faster. The interpreter patches Triton's language at every call of a device function, which takes
0.5 ms.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_language_once_per_launch() -> None:
    """Let a launch patch the language for all functions that the kernel calls."""
    patch, everything = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def patch_once(_function: Callable) -> Any:
        return patch(everything) if tl.core.is_builtin(tl.load) else SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
