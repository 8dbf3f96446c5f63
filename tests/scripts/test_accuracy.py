"""Float64 results in parts equal those of the whole reference, and the error measures find small faults."""

import pytest
import torch

from ringattn import BlockMask, Mask
from ringattn.kernels import reference
from ringattn.kernels.interval_mask import Intervals
from scripts import accuracy
from scripts.accuracy import NAMES, float64_results, group_error, row_error, row_errors, row_limits


def random_inputs(length: int, heads: int, key_heads: int, dim: int, value_dim: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (heads, dim), (key_heads, dim), (key_heads, value_dim or dim), (heads, value_dim or dim)
    return [torch.randn(1, length, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


def test_results_in_parts_equal_the_reference_as_a_whole(monkeypatch):
    """Grouped heads, another value dim, and queries that are processed in groups of 128."""
    monkeypatch.setattr(accuracy, "MAX_SCORES", 1)
    q, k, v, dout = random_inputs(300, heads=4, key_heads=2, dim=8, value_dim=5)
    intervals = Intervals.of(*Mask.causal(window=90).intervals(300), 300)
    out, lse = reference.forward(q, k, v, intervals, 8**-0.5, final=True)
    grads = reference.backward(q, k, v, dout, lse, reference.row_delta(out, dout), intervals, 8**-0.5)

    results = float64_results(q, k, v, dout, intervals)

    for name, expected in zip(NAMES, (out, lse, *grads), strict=True):
        torch.testing.assert_close(results[name], expected, rtol=0, atol=1e-12)


def test_results_with_blocks_equal_the_reference_as_a_whole(monkeypatch):
    monkeypatch.setattr(accuracy, "MAX_SCORES", 1)
    q, k, v, dout = random_inputs(256, heads=2, key_heads=2, dim=8)
    intervals = Intervals.of(*Mask.full().intervals(256), 256)
    blocks = BlockMask(torch.tensor([[True, False], [True, True]])[None, None], 128)
    expected, _ = reference.forward(q, k, v, intervals, 8**-0.5, final=True, blocks=blocks)
    results = float64_results(q, k, v, dout, intervals, blocks)
    torch.testing.assert_close(results["out"], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_row_exceeds_its_limit(name):
    """An element is off by 1%, which is about the effect of leaving out one of 100 keys."""
    expected = float64_results(*random_inputs(100, 2, 2, 8), Intervals.of(*Mask.causal().intervals(100), 100))
    results = {key: x.float() for key, x in expected.items()}
    limits = row_limits(torch.float32)
    assert all(error <= limits[key] for key, error in row_errors(results, expected).items())
    row = expected[name].abs().flatten(2).amax(2).argmax()  # the largest row, whose scale is its own
    results[name][0, row] *= 1.01
    wrong = [key for key, error in row_errors(results, expected).items() if not error <= limits[key]]
    assert wrong == [name]


def test_nan_is_an_infinite_error():
    expected = torch.ones(1, 64, 1, 4, dtype=torch.float64)
    actual = expected.clone()
    actual[0, 3, 0, 1] = float("nan")
    assert row_error(actual, expected) == float("inf")
    assert group_error(actual, expected) == float("inf")


def test_errors_of_groups_are_relative_to_their_own_norm():
    """A small group with an error of 10% counts, although another group is a million times larger."""
    expected = torch.cat([torch.ones(1, 64, 1, 4), 1e6 * torch.ones(1, 64, 1, 4)], 1).double()
    actual = expected.clone()
    actual[:, :64] *= 1.1
    assert group_error(actual, expected).item() == pytest.approx(0.1)
