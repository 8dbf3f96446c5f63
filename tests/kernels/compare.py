"""Comparison row by row: an error in a few rows would hide in the norm of the whole."""

import torch
from torch import Tensor

# allowed error of a row relative to its scale, by the dtype of the inputs: some units of rounding of p, ds and the output
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
SCALAR_TOLERANCE = 2e-5  # of m, l and lse, which are fp32 whatever the inputs


def max_row_error(actual: Tensor, expected: Tensor, floor: float = 1e-30) -> float:
    """Largest over rows (all but the last dimension) of |actual - expected| relative to the row's scale; NaN counts as inf.

    A row's scale is its largest element, but at least `floor` and a tenth of the largest element of all: the gradients of
    single rows may vanish.
    """
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    if expected.numel() == 0:
        return 0.0
    expected = expected.detach().double()
    scale = expected.abs().amax(-1)
    scale = scale.clamp(min=max(floor, 0.1 * scale.max().item()))
    error = (actual.detach().double() - expected).abs().amax(-1) / scale
    return error.nan_to_num(nan=float("inf")).max().item()


def assert_rows_close(name: str, actual: Tensor, expected: Tensor, tolerance: float, floor: float = 1e-30) -> None:
    """Fail unless every row is within `tolerance` of its scale, see `max_row_error`."""
    error = max_row_error(actual, expected, floor)
    assert error <= tolerance, f"{name}: row error {error:.2e} exceeds {tolerance:.0e}"


def assert_states_close(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float, scalars: float = SCALAR_TOLERANCE
) -> None:
    """Compare (m, l, o), or (out, lse), part by part; scalars within the smaller tolerance, each on its own scale.

    Of states, l and o are compared relative to the expected m: what a kernel takes as m is its own matter.
    """
    names = ("m", "l", "o") if len(expected) == 3 else ("out", "lse")
    if len(expected) == 3:
        actual = relative_to(actual, expected[0])
    for name, x, y in zip(names, actual, expected, strict=True):
        if name in ("m", "l", "lse"):
            assert_scalars_close(name, x, y, min(tolerance, scalars))
        else:
            assert_rows_close(name, x, y, tolerance)


def relative_to(state: tuple[Tensor, ...], m: Tensor) -> tuple[Tensor, ...]:
    """`state` (m, l, o) in float64, relative to another `m`; a row that only one of the two has as empty gets NaN."""
    own, l, o = (x.double() for x in state)
    factor = torch.exp(own - m).masked_fill(own == m, 1.0)
    factor = factor.masked_fill(own.isinf() != m.isinf(), float("nan"))
    return torch.where(own.isinf(), own, m.double()), factor * l, factor[..., None] * o


def assert_scalars_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Elements within `tolerance` times 1 + their magnitude; infinities must agree."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")
