"""Compare results row by row, because an error in a few rows would be invisible in the norm of a whole tensor."""

import torch
from torch import Tensor

# The allowed error of a row relative to its scale, by the dtype of the inputs: a few rounding errors of p, ds and the output.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
# The allowed error of m, l and lse, which are fp32 for all of these inputs.
SCALAR_TOLERANCE = 2e-5


def max_row_error(actual: Tensor, expected: Tensor, floor: float = 1e-30) -> float:
    """Return the largest |actual - expected| of a row, relative to the scale of the row; NaN counts as inf.

    A row is a vector along the last dimension. Its scale is its largest element, but at least `floor` and at least a tenth of
    the largest element of all rows, because the gradients of single rows may vanish.
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
    """Assert that every row is within `tolerance` of its scale, see `max_row_error`."""
    error = max_row_error(actual, expected, floor)
    assert error <= tolerance, f"{name}: row error {error:.2e} exceeds {tolerance:.0e}"


def assert_states_close(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float, scalars: float = SCALAR_TOLERANCE
) -> None:
    """Compare states (m, l, o) or results (out, lse). Scalars must be within the smaller tolerance, each on its own scale.

    The l and o of states are compared relative to the expected m, because a kernel may use another reference value as m.
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
    """Return `state` (m, l, o) in float64, relative to another `m`. A query that is empty only in `state` or only in `m` gets
    NaN.
    """
    own, l, o = (x.double() for x in state)
    factor = torch.exp(own - m).masked_fill(own == m, 1.0)
    factor = factor.masked_fill(own.isinf() != m.isinf(), float("nan"))
    return torch.where(own.isinf(), own, m.double()), factor * l, factor[..., None] * o


def assert_scalars_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Assert that elements differ by at most `tolerance` times 1 + their magnitude, and that infinities are equal."""
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}")
