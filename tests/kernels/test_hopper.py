"""The Hopper kernels against the float64 reference, on a Hopper GPU."""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import reference
from tests.kernels.compare import TOLERANCE, assert_rows_close, assert_states_close, check_kernels, max_row_error
from tests.kernels.masks import MASKS, intervals_of, random_intervals
from tests.kernels.problems import STRIDED, Problem, make_problem, strided

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_HOPPER, reason="needs an sm_90 GPU")]
if ON_HOPPER:
    from kernels import hopper_backward, hopper_forward

DTYPES = [torch.float16, torch.bfloat16]
SHAPES = {  # (Nq, Nk), (Hq, Hkv), (D, Dv), batch
    "one-query": ((1, 63), (2, 1), (64, 64), 1),
    "one-key": ((63, 1), (2, 1), (64, 64), 1),
    "one-pair": ((1, 1), (1, 1), (128, 128), 2),
    "63": ((63, 63), (4, 2), (16, 16), 2),
    "111x130": ((111, 130), (3, 1), (80, 80), 1),
    "130x111": ((130, 111), (2, 2), (64, 48), 3),
    "129": ((129, 129), (8, 2), (128, 128), 1),
    "385x1000": ((385, 1000), (2, 1), (64, 64), 1),
    "1000x385": ((1000, 385), (2, 1), (128, 128), 1),
    "value-dim-wider": ((65, 65), (2, 1), (16, 96), 1),
    "value-dim-narrower": ((165, 65), (2, 1), (96, 8), 1),
}


def check_all(problem: Problem, floor: float = 1e-30) -> None:
    check_kernels(problem, hopper_forward, hopper_backward, floor)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dtype, dim, device):
    check_all(make_problem(*intervals_of(mask, 500, 630), 630, dtype, dims=(dim, dim), device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, dtype, device):
    rows, heads, dims, batch = SHAPES[shape]
    problem = make_problem(*intervals_of("window", *rows), rows[1], dtype, batch, heads, dims, device)
    check_all(problem, floor=1.0 if rows[1] == 1 else 1e-30)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [1000, 1536, 4097])
def test_lengths(length, dim, device):
    problem = make_problem(*intervals_of("causal", length, length), length, torch.bfloat16, dims=(dim, dim), device=device)
    check_all(problem)


@pytest.mark.parametrize("batch", [1, 3])
def test_each_batch_entry_has_its_own_intervals(batch, device):
    intervals = random_intervals(370, 490, seed=1, batch=batch)
    check_all(make_problem(*intervals, 490, torch.float16, batch, heads=(6, 2), dims=(64, 64), device=device), floor=1.0)


@pytest.mark.parametrize("layout", STRIDED)
def test_strided_inputs(layout, device):
    problem = make_problem(*intervals_of("causal", 270, 270), 270, torch.float16, batch=2, dims=(64, 64), device=device)
    for name in ("q", "k", "v", "dout"):
        setattr(problem, name, strided(getattr(problem, name), layout))
    assert not problem.q.is_contiguous()
    check_all(problem)


@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
@pytest.mark.parametrize("mask", MASKS)
def test_chain_over_pieces_of_the_keys(mask, final, device):
    whole = make_problem(*intervals_of(mask, 290, 410), 410, torch.float16, dims=(64, 64), device=device)
    state, bounds = None, [0, 17, 160, 161, 410]
    for first, last in zip(bounds, bounds[1:], strict=False):
        lo, hi = ((bound - first).clamp(0, last - first) for bound in (whole.lo, whole.hi))
        state = hopper_forward.forward(
            *(whole.q, whole.k[:, first:last], whole.v[:, first:last], lo, hi, whole.scale),
            state=state,
            final=final and last == 410,
        )
    assert_states_close(state, whole.double().forward(reference, final=final), TOLERANCE[torch.float16])


def test_gradients_are_added_to_the_accumulators(device):
    problem = make_problem(*intervals_of("causal", 340, 340), 340, torch.float16, dims=(128, 128), device=device)
    start = [torch.randn(x.shape, device=device) for x in (problem.q, problem.k, problem.v)]
    total = [x.clone() for x in start]
    arguments = (problem.q, problem.k, problem.v, problem.dout, problem.lse, problem.delta, problem.lo, problem.hi)
    assert all(x is y for x, y in zip(hopper_backward.backward(*arguments, problem.scale, *total), total, strict=True))
    for x, y, z in zip(total, start, problem.double().backward(reference), strict=True):
        assert_rows_close("accumulator", x, y + z, TOLERANCE[torch.float16])


def test_fresh_gradients_have_the_dtype_asked_for(device):
    problem = make_problem(*intervals_of("causal", 340, 340), 340, torch.float16, dims=(64, 64), device=device)
    arguments = (problem.q, problem.k, problem.v, problem.dout, problem.lse, problem.delta, problem.lo, problem.hi)
    total = torch.zeros_like(problem.q, dtype=torch.float32)
    dq, dk, dv = hopper_backward.backward(*arguments, problem.scale, dq=total)
    assert dq is total and dk.dtype == dv.dtype == torch.float16
    for name, x, y in zip(("dq", "dk", "dv"), (dq, dk, dv), problem.double().backward(reference), strict=True):
        assert_rows_close(name, x, y, TOLERANCE[torch.float16])


@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_scores_of_any_size(factor, device):
    """Scores up to some hundreds: the maximum of a row moves on by more than the slack many times."""
    problem = make_problem(*intervals_of("causal", 600, 600), 600, torch.float16, dims=(64, 64), device=device)
    problem.q *= factor
    tolerance = TOLERANCE[torch.float16] * max(1.0, factor)
    for final in (False, True):
        expected = problem.double().forward(reference, final=final)
        assert_states_close(problem.forward(hopper_forward, final=final), expected, tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", ["one-key", "one-tile"])
def test_the_comparison_catches_a_fault(fault, dtype, device):
    """Drop the last key of one row, or some keys of a tile of rows: out and a gradient must fail their tolerance."""
    problem = make_problem(*intervals_of("causal", 330, 330), 330, dtype, dims=(64, 64), device=device)
    expected = problem.double()
    if fault == "one-key":
        problem.hi = torch.where(problem.hi == 101, 100, problem.hi)
    else:
        problem.lo = torch.where(problem.hi > 256, 128, problem.lo)
    tolerance = TOLERANCE[dtype]
    assert max_row_error(problem.forward(hopper_forward, final=True)[0], expected.forward(reference, final=True)[0]) > tolerance
    faulty, correct = problem.backward(hopper_backward), expected.backward(reference)
    assert any(max_row_error(x, y) > tolerance for x, y in zip(faulty, correct, strict=True))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 2), st.sampled_from([(1, 1), (2, 1)]), st.integers(0, 2**32))
def test_random_intervals(device, num_queries, num_keys, batch, heads, seed):
    lo, hi = random_intervals(num_queries, num_keys, seed, batch)
    check_all(make_problem(lo, hi, num_keys, torch.float16, batch, heads, (64, 64), device=device), floor=1.0)


REFUSED = {  # changed argument -> part of the message
    "fp32": (lambda p: vars(p.double()) | dict(q=p.q.float(), k=p.k.float(), v=p.v.float()), "not fp16 or bf16"),
    "head dim": (lambda p: dict(q=p.q.repeat(1, 1, 1, 3), k=p.k.repeat(1, 1, 1, 3)), "query head dim 192"),
    "value head dim": (lambda p: dict(v=p.v[..., :12]), "value head dim 12"),
    "no keys": (lambda p: dict(k=p.k[:, :0], v=p.v[:, :0]), "no keys"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_only_the_portable_kernels_do_is_refused(case, device):
    problem = make_problem(*intervals_of("full", 5, 7), 7, torch.float16, heads=(4, 2), dims=(64, 64), device=device)
    change, message = REFUSED[case]
    problem = Problem(**vars(problem) | change(problem))
    for function, module in ((problem.forward, hopper_forward), (problem.backward, hopper_backward)):
        with pytest.raises(ValueError, match=re.escape(message)):
            function(module)


def test_offsets_beyond_32_bits(device):
    """Rows whose first element lies past 2**31: only the last rows are compared."""
    num_keys, num_heads, dim = 2**17 + 5, 128, 128
    q = torch.randn(1, 3, num_heads, dim, device=device).half()
    k, v = (torch.randn(1, num_keys, num_heads, dim, device=device, dtype=torch.float16) for _ in range(2))
    hi = torch.full((1, 3), num_keys, dtype=torch.int32, device=device)
    lo = hi - 200
    out, _ = hopper_forward.forward(q, k, v, lo, hi, dim**-0.5, final=True)
    tail = (x[:, -200:].double() for x in (k, v))
    expected, _ = reference.forward(q.double(), *tail, lo - lo, hi - lo, dim**-0.5, final=True)
    assert_rows_close("out", out, expected, TOLERANCE[torch.float16])
