"""A cache for functions that torch.compile may also trace.

This decorator has a module of its own, because both `ringattn.layout` and `ringattn.kernels.dispatch` use it. `ringattn.layout`
must not import the code that selects kernels.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import torch

F = TypeVar("F", bound=Callable)


def cached(maxsize: int) -> Callable[[F], F]:
    """Return a decorator like `functools.lru_cache(maxsize)` that bypasses the cache while torch.compile traces the function.

    If torch.compile traced an `lru_cache`, it would ignore the cache and print a warning.
    """

    def decorate(function: F) -> F:
        cache = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*args, **options):
            return function(*args, **options) if torch.compiler.is_compiling() else cache(*args, **options)

        call.cache_clear = cache.cache_clear
        return call

    return decorate
