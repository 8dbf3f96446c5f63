"""The forward for short intervals matches the reference. Without a GPU, the source of the kernel runs in an emulator, see
`tests.kernels.gluon_emulator`.
"""

from unittest import mock

import pytest
import torch
from triton.experimental.gluon import language as gl

from ringattn.kernels import reference
from ringattn.kernels.hopper import column_parts, epilogue, forward_short, softmax
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper import forward as hopper_forward
from ringattn.kernels.interval_mask import Intervals
from tests.kernels.compare import TOLERANCE, assert_states_close
from tests.kernels.gluon_emulator import emulated
from tests.kernels.masks import packed_intervals
from tests.kernels.problems import make_problem

KEYS = hopper_forward.SHORT_KEYS


def window(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    end = torch.arange(1, length + 1, dtype=torch.int32)[None]
    return (end - size).clamp(min=0), end


def empty_rows(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows without keys at both ends, and intervals of different lengths between them."""
    row = torch.arange(length, dtype=torch.int32)
    lo, hi = row - row % 7, (row + row % 5).clamp(max=length - 9)
    lo, hi = lo.cummax(0).values, hi.cummax(0).values
    hi[:11] = 0
    return lo[None], hi[None]


MASKS = {
    "window": window(1000, 128),
    "documents": packed_intervals([[100, 128, 3, 1, 64, 127, 60, 30]]),
    "empty rows": empty_rows(400),
    "one tile": window(40, 128),
}


@pytest.mark.parametrize(
    ("mask", "heads", "dim", "triton_version"),
    [
        ("empty rows", (4, 2), 64, (3, 7)),
        ("documents", (4, 1), 40, (3, 7)),
        ("documents", (4, 1), 64, (3, 9)),
        ("window", (8, 1), 64, (3, 7)),
        ("window", (8, 1), 64, (3, 9)),
    ],
)
def test_source_of_the_kernel_computes_attention(mask, heads, dim, triton_version, monkeypatch):
    """In float64, a missing key would change an output by far more than 1e-6."""
    monkeypatch.setattr(hopper_common, "TRITON_VERSION", triton_version)
    monkeypatch.setattr(hopper_common, "NEEDS_SLICES", gl.constexpr(triton_version >= (3, 9)))
    lo, hi = MASKS[mask]
    problem = make_problem(lo, hi, lo.shape[1], torch.float16, 1, heads, (dim, dim)).double()
    with emulated(hopper_forward, 3, [column_parts, softmax, epilogue, forward_short]):
        actual = problem.forward(hopper_forward, final=True)
    for x, expected in zip(actual, problem.forward(reference, final=True), strict=True):
        torch.testing.assert_close(x.double(), expected.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("triton_version", "packed_heads"), [((3, 7), 8), ((3, 8), 0), ((3, 9), 8)])
def test_kernel_is_not_used_if_triton_rejects_its_views(triton_version, packed_heads, monkeypatch):
    monkeypatch.setattr(hopper_common, "TRITON_VERSION", triton_version)
    assert hopper_forward._packed_heads((8, 1), Intervals.of(*MASKS["window"], 1000)) == packed_heads


@pytest.mark.parametrize("shares_sms", [False, True])
@pytest.mark.parametrize("heads", [(6, 6), (8, 2), (16, 2)], ids=str)
@pytest.mark.parametrize("dims", [(64, 64), (40, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype, dims, heads, shares_sms, hopper):
    lo, hi = MASKS[mask]
    problem = make_problem(lo, hi, lo.shape[1], dtype, 2, heads, dims, hopper)
    assert problem.intervals.longest_tile <= KEYS
    expected = problem.double().forward(reference, final=True)
    assert_states_close(problem.forward(hopper_forward, final=True, shares_sms=shares_sms), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [(8, 2), (16, 2)], ids=str)
def test_huge_scores_and_many_work_tiles_per_program(heads, hopper):
    problem = make_problem(*window(3000, 129), 3000, torch.bfloat16, 1, heads, (64, 64), hopper)
    problem.q *= 50
    assert problem.intervals.longest_tile == KEYS
    expected = problem.double().forward(reference, final=True)
    with mock.patch.object(hopper_common, "num_programs", return_value=7):
        assert_states_close(problem.forward(hopper_forward, final=True), expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("size", [300, 1024])
@pytest.mark.parametrize("factor", [1, 50])
def test_four_heads_share_the_keys_of_longer_windows(factor, size, hopper):
    """Scores of several hundred make rows overflow, so that there is a retry pass."""
    problem = make_problem(*window(2200, size), 2200, torch.bfloat16, 2, (16, 4), (64, 64), hopper)
    problem.q *= factor
    assert hopper_forward._uses_medium_tiles(problem.q, problem.v, problem.intervals)
    expected = problem.double().forward(reference, final=True)
    assert_states_close(problem.forward(hopper_forward, final=True), expected, TOLERANCE[torch.bfloat16])
