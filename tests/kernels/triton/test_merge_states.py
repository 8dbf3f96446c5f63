"""The kernel that merges partial softmax states, against the reference in float64."""

import pytest
import torch

from ringattn.kernels import dispatch, reference
from ringattn.kernels.triton import merge_states as kernel
from tests.covering import every_pair

PARTS = {  # (first token, number of tokens) of each part, for a base of 37 tokens
    "all-tokens": [(0, 37)],
    "some-tokens": [(5, 11)],
    "three": [(0, 37), (0, 18), (36, 1)],
    "seven": [(i, 30 - i) for i in range(7)],
}


def random_state(batch: int, tokens: int, dim: int, seed: int) -> reference.State:
    """A state in which a quarter of the queries are empty, with maxima of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    m = 30 * torch.randn(batch, tokens, 3, generator=generator)
    l, o = torch.rand(m.shape, generator=generator) + 0.1, torch.randn(*m.shape, dim, generator=generator)
    empty = torch.rand(m.shape, generator=generator) < 0.25
    return m.masked_fill(empty, float("-inf")), l.masked_fill(empty, 0.0), o.masked_fill(empty[..., None], 0.0)


def to(state: reference.State, target: object) -> reference.State:
    return tuple(x.to(target, copy=True) for x in state)


@every_pair(parts=PARTS, batch=(1, 2), dim=(40, 128), dtype=(None, torch.float32, torch.float16))
def test_merge_matches_the_reference(parts, batch, dim, dtype, device):
    base = random_state(batch, 37, dim, 0)
    states = [(first, random_state(batch, n, dim, i + 1)) for i, (first, n) in enumerate(PARTS[parts])]
    expected = reference.merge_states(
        to(base, torch.float64), [(first, to(state, torch.float64)) for first, state in states], dtype and torch.float64
    )
    base = to(base, device)
    results = kernel.merge_states(base, [(first, to(state, device)) for first, state in states], dtype)
    assert results is base if dtype is None else results[0].dtype == dtype
    for result, exact in zip(results, expected, strict=True):
        tolerance = 1e-3 if result.dtype == torch.float16 else 2e-6
        torch.testing.assert_close(result.double().cpu(), exact, rtol=tolerance, atol=tolerance)


@every_pair(ranks=(1, 2, 5, 8), batch=(1, 2), dim=(40, 128), dtype=(torch.float32, torch.float16))
def test_packed_states_match_the_reference(ranks, batch, dim, dtype, device):
    """The last rank has no keys, and some queries have no keys on any rank."""
    states = [random_state(batch, 7, dim, i) for i in range(ranks - 1)]
    m, l, o = random_state(batch, 7, dim, ranks)
    states.append((m.fill_(float("-inf")), l.zero_(), o.zero_()))
    merged = reference.empty_state(o.double(), dim)
    for state in states:
        merged = reference.merge(merged, to(state, torch.float64))
    packed = torch.stack([torch.cat((o.flatten(), m.flatten(), l.flatten())) for m, l, o in states])
    exact = reference.finalize(merged, torch.float64)[0]
    for merge, given in ((kernel.merge_packed, packed.to(device)), (dispatch.merge_packed, packed)):
        out = merge(given, o.shape, dtype)
        tolerance = 1e-3 if dtype == torch.float16 else 2e-6
        assert out.dtype == dtype
        torch.testing.assert_close(out.double().cpu(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_many_merges_in_place_match_the_reference(dim, device):
    """With many programs, the warps of a program do not run at the same speed, so a missing barrier shows."""
    generator = torch.Generator(device).manual_seed(0)
    shape = 1, 4096, 16, dim
    base, part = (
        tuple(torch.randn(size, generator=generator, device=device).abs() for size in (shape[:3], shape[:3], shape))
        for _ in range(2)
    )
    expected = reference.merge_states(to(base, torch.float64), [(0, to(part, torch.float64))])
    for _ in range(50):
        for result, exact in zip(kernel.merge_states(to(base, device), [(0, part)]), expected, strict=True):
            torch.testing.assert_close(result.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_no_parts(dtype, device):
    """A state without further parts is returned or finalised, and empty queries give 0 and -inf."""
    base = to(random_state(1, 5, 8, 0), device)
    expected = to(base, device) if dtype is None else reference.finalize(base, dtype)
    for result, exact in zip(kernel.merge_states(base, [], dtype), expected, strict=True):
        torch.testing.assert_close(result, exact)


def test_no_tokens(device):
    base = to(random_state(1, 0, 8, 0), device)
    out, lse = kernel.merge_states(base, [(0, base)], torch.float16)
    assert out.shape == (1, 0, 3, 8)
    assert lse.shape == (1, 0, 3)


def test_states_on_cpus_are_merged_by_the_reference():
    base, part = random_state(2, 6, 8, 0), random_state(2, 4, 8, 1)
    expected = reference.merge_states(to(base, torch.float32), [(1, part)])
    views = tuple(x[:, 1:5] for x in base)  # not contiguous
    dispatch.merge_states(views, [(0, part)])
    for result, exact in zip(base, expected, strict=True):
        assert torch.equal(result, exact)
