"""The Hopper forward with FP8 inputs, compared with float64 attention on the same rounded inputs.

The kernel rounds probabilities to e4m3, so its results differ by a few percent from those of exact attention. A dropped key
among many keys could change the results by less. The strict tests therefore use queries of zeros. All probabilities are then
equal powers of two, which e4m3 represents exactly.
"""

import itertools
import random

import pytest
import torch
from torch import Tensor

from ringattn.kernels import fp8, reference
from ringattn.kernels.hopper import forward as hopper_forward
from ringattn.kernels.hopper import forward_fp8
from ringattn.kernels.interval_mask import Intervals
from tests.covering import every_pair
from tests.kernels.compare import assert_rows_close, assert_scalars_close, assert_states_close, max_row_error
from tests.kernels.masks import MASKS, intervals_of, random_intervals

DIMS = list(hopper_forward.FP8_TILES)
# The errors of outputs in bf16, relative to the largest element of a row: with exact and with rounded probabilities.
EXACT, ROUNDED = 6e-3, 0.1
# The error of lse with exact probabilities, and with rounded probabilities. The tensor cores add scores in about 14 bits.
EXACT_LSE, ROUNDED_LSE = 2e-5, 0.08
SHAPES = {  # (Nq, Nk), (Hq, Hkv), batch
    "one-pair": ((1, 1), (1, 1), 2),
    "one-query": ((1, 129), (2, 1), 1),
    "one-key": ((63, 1), (2, 1), 1),
    "128": ((128, 128), (2, 2), 1),
    "130x111": ((130, 111), (2, 2), 3),
    "385x1000": ((385, 1000), (4, 1), 1),
    "1000x385": ((1000, 385), (3, 1), 2),
}


class Problem:
    """FP8 inputs with standard normal values. The queries are multiplied by `spread`."""

    def __init__(self, lo, hi, num_keys, batch, heads, dim, device, spread=1.0):
        generator = torch.Generator().manual_seed(0)

        def normal(tokens: int, num_heads: int) -> Tensor:
            return torch.randn(batch, tokens, num_heads, dim, generator=generator).to(device)

        self.intervals, self.scale = Intervals.of(lo, hi, num_keys, device), dim**-0.5
        q, k, v = normal(lo.shape[1], heads[0]) * spread, normal(num_keys, heads[1]), normal(num_keys, heads[1])
        # The blocks of values have different scales.
        v *= torch.exp2(torch.arange(num_keys, device=device) // fp8.BLOCK % 5 - 2)[:, None, None]
        self.operands = fp8.quantize(q, k, v)
        sizes = lo.shape[1], num_keys, num_keys
        self.exact = [fp8.dequantize(x, torch.float64, size) for x, size in zip(self.operands, sizes, strict=True)]

    def expected(self, final=True):
        return reference.forward(*self.exact, self.intervals, self.scale, final=final)

    def forward(self, **options):
        return hopper_forward.forward_quantized(*self.operands, self.intervals, self.scale, **options)

    def chain(self, bounds: list[int], final: bool):
        """Call the kernel for the keys between each pair of neighbouring bounds, which are multiples of 128 or the last key."""
        q, k, v = self.operands
        state, num_keys = None, k.data.shape[1]
        for first, last in itertools.pairwise(bounds):
            blocks = slice(first // fp8.BLOCK, fp8.num_blocks(last))
            keys = fp8.QuantizedRows(k.data[:, first:last], k.scales[:, blocks])
            values = fp8.QuantizedValues(v.data[:, :, blocks], v.scales[:, blocks])
            part = self.intervals.restrict(slice(0, q.data.shape[1]), slice(first, last))
            options = dict(state=state, final=final and last == num_keys)
            state = hopper_forward.forward_quantized(q, keys, values, part, self.scale, **options)
        return state


def check_exact(problem: Problem, bounds: list[int] | None = None) -> None:
    """Check the output, the state, and, if `bounds` are given, the results of chains. The queries must be zeros."""
    for final in (False, True):
        expected = problem.expected(final)
        for results in [problem.forward(final=final), *([problem.chain(bounds, final)] if bounds else [])]:
            assert_states_close(results, expected, EXACT, EXACT_LSE)


@pytest.mark.parametrize("dim", DIMS)
def test_tiles_fit_into_shared_memory(dim):
    config = hopper_forward.configure((dim, dim), (8, 2), torch.float8_e4m3fn, False, True)
    bytes_used = config.queries * dim + 2 * config.stages * config.keys * dim + forward_fp8.SUM_COLUMNS.value * config.keys
    # The limit of sm_90 is 227 KiB per program. Barriers and flags need less than 1 KiB.
    assert bytes_used <= 226 * 1024
    assert config.num_parts * config.part_columns == dim
    assert config.group == 4


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_key_of_an_interval_has_the_same_weight(mask, dim, hopper):
    check_exact(Problem(*intervals_of(mask, 300, 300), 300, 2, (4, 2), dim, hopper, spread=0.0), [0, 128, 300])


@every_pair(shape=SHAPES, dim=DIMS)
def test_shapes(shape, dim, hopper):
    sizes, heads, batch = SHAPES[shape]
    check_exact(Problem(*intervals_of("window", *sizes), sizes[1], batch, heads, dim, hopper, spread=0.0))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("seed", range(6))
def test_random_intervals(seed, dim, hopper):
    source = random.Random(seed)
    num_queries, num_keys = source.randint(1, 700), source.randint(130, 700)
    lo, hi = random_intervals(num_queries, num_keys, seed, 2)
    check_exact(Problem(lo, hi, num_keys, 2, (2, 1), dim, hopper, spread=0.0), [0, 128, num_keys])


@pytest.mark.parametrize("dim", DIMS)
def test_many_work_tiles_per_program(dim, hopper, num_sms):
    """The ring of stages wraps around in every way: work tiles have one, two and more steps."""
    num_queries = 128 * 3 * num_sms // 2
    problem = Problem(*random_intervals(num_queries, 450, seed=3), 450, 1, (3, 1), dim, hopper, spread=0.0)
    check_exact(problem)
    for final in (False, True):
        results = [problem.forward(final=final, shares_sms=shared) for shared in (False, True)]
        # The bits of the results do not depend on the program that computes a work tile.
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_normal_inputs(dtype, dim, hopper):
    problem = Problem(*intervals_of("causal", 700, 900), 900, 2, (4, 2), dim, hopper)
    expected, expected_lse = problem.expected()
    for out, lse in (problem.forward(final=True, dtype=dtype), problem.chain([0, 256, 900], final=True)):
        assert_rows_close("out", out, expected, ROUNDED)
        assert_scalars_close("lse", lse, expected_lse, ROUNDED_LSE)
        assert ((out - expected).norm() / expected.norm()).item() < 0.035
    assert problem.forward(final=True, dtype=dtype)[0].dtype == dtype


@pytest.mark.parametrize("dim", DIMS)
def test_growing_scores_raise_the_reference_max(dim, hopper):
    """Scores of several hundred log2 units: nearly all of the probability is on one key, which may be in any step."""
    problem = Problem(*intervals_of("causal", 900, 900), 900, 1, (2, 1), dim, hopper, spread=60.0)
    out, lse = problem.forward(final=True)
    expected, expected_lse = problem.expected()
    assert ((out - expected).norm() / expected.norm()).item() < 0.05
    assert ((lse - expected_lse).abs() / (1 + expected_lse.abs())).max().item() < 5e-3


@pytest.mark.parametrize("dim", DIMS)
def test_many_small_probabilities_next_to_a_large_one(dim, hopper):
    """One key has about half of the probability, and 16,384 keys share the rest. The rest are subnormal e4m3 numbers."""
    num_keys = 2**14
    problem = Problem(*intervals_of("full", 64, num_keys), num_keys, 1, (1, 1), dim, hopper, spread=0.0)
    q, k, _ = problem.exact
    q[..., 0], k[:], k[:, 77, :, 0] = dim**0.5, 0.0, 10.0
    problem.operands = fp8.quantize_rows(q, rotate=False), fp8.quantize_rows(k, rotate=False), problem.operands[2]
    problem.exact[:2] = (fp8.dequantize(x, torch.float64, x.data.shape[1]) for x in problem.operands[:2])
    out, lse = problem.forward(final=True)
    expected, expected_lse = problem.expected()
    assert ((lse - expected_lse).abs()).max().item() < 0.2
    assert_rows_close("out", out, expected, 0.25)


@pytest.mark.parametrize("dim", DIMS)
def test_sums_of_many_positive_values_are_not_biased(dim, hopper):
    num_keys = 2**16
    problem = Problem(*intervals_of("full", 64, num_keys), num_keys, 1, (1, 1), dim, hopper)
    problem.operands = *problem.operands[:2], fp8.quantize_values(problem.exact[2].abs())
    problem.exact[2] = fp8.dequantize(problem.operands[2], torch.float64, num_keys)
    out, _ = problem.forward(final=True)
    expected, _ = problem.expected()
    assert abs((out.double().sum() / expected.sum()).item() - 1) < 3e-3


def test_a_dropped_key_would_be_noticed(hopper):
    lo, hi = intervals_of("causal", 300, 300)
    problem, faulty = (Problem(lo, x, 300, 1, (2, 1), 128, hopper, spread=0.0) for x in (hi, (hi - 1).clamp(min=0)))
    (out, lse), (expected, expected_lse) = faulty.forward(final=True), problem.expected()
    assert max_row_error(out[:, 2:], expected[:, 2:]) > EXACT
    assert (lse - expected_lse)[:, 2:].abs().min().item() > 100 * EXACT_LSE
