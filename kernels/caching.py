"""What a function has answered before, for functions that compiled code may ask, too."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable)


def remembered(maxsize: int) -> Callable[[F], F]:
    """`functools.lru_cache`, of which `torch.compile` sees nothing: it would look through it, and warn."""

    def decorate(function: F) -> F:
        cached = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*args, **options):
            return function(*args, **options) if torch.compiler.is_compiling() else cached(*args, **options)

        call.cache_clear = cached.cache_clear
        return call

    return decorate
