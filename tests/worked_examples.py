"""Worked examples of attention with known answers, and checks of kernels and rings against these answers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringattn.kernels.reference import State
from tests.kernels.compare import relative_to
from tests.kernels.masks import full


def tokens(*values: list[float]) -> Tensor:
    """Return a float64 tensor (1, N, 1, D) of N vectors."""
    return torch.tensor(values, dtype=torch.float64)[None, :, None]


@dataclass(frozen=True)
class Example:
    """One problem with full attention, and its answer rounded to four digits after the point."""

    q: Tensor  # (1, Nq, 1, D)
    k: Tensor  # (1, Nk, 1, D)
    v: Tensor  # (1, Nk, 1, Dv)
    scale: float
    m: Tensor  # (1, Nq, 1)
    l: Tensor  # (1, Nq, 1)
    o: Tensor  # (1, Nq, 1, Dv)
    out: Tensor  # (1, Nq, 1, Dv)
    lse: Tensor  # (1, Nq, 1)

    def repeated(self, times: int) -> "Example":
        """Return the example with `times` copies of each key, which multiplies l and o by `times` and does not change out."""
        k, v = (x.repeat_interleave(times, 1) for x in (self.k, self.v))
        lse = self.lse + torch.tensor(times, dtype=torch.float64).log()
        return replace(self, k=k, v=v, l=times * self.l, o=times * self.o, lse=lse)

    def padded(self, dim: int) -> "Example":
        """Return the example with zeros appended to q, k and v, up to the head dim `dim`."""
        names = ("q", "k", "v", "o", "out")
        return replace(self, **{name: pad(x, (0, dim - x.shape[-1])) for name in names for x in [getattr(self, name)]})


def _scalars(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[None, :, None]


EXAMPLES = {
    # The row of docs/maths.md, with the scores [1, 3, 2, 5] and the values [1, 2, 3, 4].
    "row": Example(
        q=tokens([1]),
        k=tokens([1], [3], [2], [5]),
        v=tokens([1], [2], [3], [4]),
        scale=1.0,
        m=_scalars(5),
        l=_scalars(1.2034),
        o=tokens([4.4383]),
        out=tokens([3.6881]),
        lse=_scalars(5.1852),
    ),
    "two-blocks-of-keys": Example(
        q=tokens([1, 0, 2, 1]),
        k=tokens(
            [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0], [2, 1, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 1]
        ),
        v=tokens(
            [2, 1, 0, 3], [1, 0, 1, 2], [0, 2, 1, 1], [3, 1, 0, 0], [1, 3, 2, 0], [0, 1, 0, 2], [2, 0, 1, 1], [1, 0, 0, 3]
        ),
        scale=1.0,
        m=_scalars(5),
        l=_scalars(1.6577),
        o=tokens([1.5248, 3.8221, 2.5530, 0.7493]),
        out=tokens([0.9198, 2.3057, 1.5401, 0.4520]),
        lse=_scalars(5.5054),
    ),
    "five-tokens": Example(
        q=tokens([1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]),
        k=tokens([0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]),
        v=tokens([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]),
        scale=0.5,
        m=_scalars(1.0, 1.5, 1.0, 1.0, 0.75),
        l=_scalars(3.3597, 2.4840, 3.9919, 3.1875, 4.1152),
        o=tokens(
            [0.7573, 1.3894, 0.9959, 0.9959],
            [1.1433, 0.3664, 0.7498, 0.5111],
            [0.9959, 1.3894, 1.3894, 0.9959],
            [0.9098, 0.9098, 0.6711, 1.3033],
            [1.2788, 1.2788, 1.2788, 1.2788],
        ),
        out=tokens(
            [0.2254, 0.4135, 0.2964, 0.2964],
            [0.4602, 0.1475, 0.3018, 0.2058],
            [0.2495, 0.3481, 0.3481, 0.2495],
            [0.2854, 0.2854, 0.2106, 0.4089],
            [0.3108, 0.3108, 0.3108, 0.3108],
        ),
        lse=_scalars(2.2119, 2.4099, 2.3843, 2.1592, 2.1647),
    ),
}

# The answers are rounded to four digits after the point, and the smallest o is 0.37.
ROUNDING = 2e-4


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare with a rounded answer. `tolerance` is the relative error of the kernel itself."""
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=tolerance + ROUNDING, atol=ROUNDING)


def check_state(state: State, example: Example, tolerance: float) -> None:
    """Check m, l and o. A kernel may subtract another number than the maximum, so l and o are compared relative to m."""
    m, l, o = relative_to(tuple(x.cpu() for x in state), example.m)
    for actual, expected in ((m, example.m), (l, example.l), (o, example.o)):
        assert_close(actual, expected, tolerance)


def check_result(out: Tensor, lse: Tensor, example: Example, tolerance: float) -> None:
    """Check the output and the lse."""
    assert_close(out, example.out, tolerance)
    assert_close(lse, example.lse, tolerance)


def check_forward(
    example: Example, forward: ModuleType, dtype: torch.dtype, device: torch.device | str = "cpu", tolerance: float = 0.0
) -> None:
    """Check the state and the result of a kernel, in one call and in a chain of calls over two keys each."""
    q, k, v = (x.to(device, dtype) for x in (example.q, example.k, example.v))
    num_queries, num_keys = q.shape[1], k.shape[1]

    def attend(keys: slice, state: State | None = None, final: bool = False) -> tuple[Tensor, ...]:
        part = full(num_queries, len(range(num_keys)[keys]), device)
        return forward.forward(q, k[:, keys], v[:, keys], part, example.scale, state, final)

    check_state(attend(slice(None)), example, tolerance)
    check_result(*attend(slice(None), final=True), example, tolerance)
    state = None
    for first in range(0, num_keys, 2):
        if first + 2 >= num_keys:
            copy = None if state is None else tuple(x.clone() for x in state)
            check_result(*attend(slice(first, None), copy, final=True), example, tolerance)
        state = attend(slice(first, first + 2), state)
    check_state(state, example, tolerance)


def check_ring(example: Example, simulate_attention: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Check the out and lse that a ring computes for queries that are sharded in the same way as the keys.

    An example with fewer queries than keys is repeated for every key.
    """
    num_keys = example.k.shape[1]
    if example.q.shape[1] < num_keys:
        names = ("q", "m", "l", "o", "out", "lse")
        example = replace(example, **{name: getattr(example, name).repeat_interleave(num_keys, 1) for name in names})
    check_result(*simulate_attention(example.q, example.k, example.v), example, 0.0)
