"""Dropout and block masks, alone and together: the reference against autograd, and every kernel against the reference."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ringattn.kernels import blockwise, reference
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout, keep_mask
from ringattn.kernels.interval_mask import dense
from ringattn.kernels.triton import backward as triton_backward
from ringattn.kernels.triton import forward as triton_forward
from tests.kernels.compare import TOLERANCE, assert_rows_close, assert_states_close
from tests.kernels.masks import MASKS, intervals_of, random_intervals
from tests.kernels.problems import Problem, make_problem
from tests.kernels.triton.test_forward import DTYPES, check_all

FEATURES = ("dropout", "blocks", "both")


def make_features(
    kind: str, rows: tuple[int, int], shape: tuple[int, int] = (1, 1), size: int = 64, seed: int = 0, device="cpu"
) -> dict:
    """Dropout at striped query positions and shuffled key positions, and a random block mask for `shape` (batch, heads)."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = (-(-n // size) for n in rows)
    keep = torch.rand(*shape, *num_blocks, generator=generator) < 0.6
    queries, keys = 3 + 4 * torch.arange(rows[0]), torch.randperm(2 * rows[1], generator=generator)[: rows[1]]
    dropout = Dropout(0.3, seed, *(x.to(device, torch.int32) for x in (queries, keys)))
    features = dict(dropout=dropout, blocks=BlockMask(keep.to(device), size))
    return features if kind == "both" else {kind: features[kind]}


def dense_attention(p: Problem) -> tuple[Tensor, Tensor]:
    """(out, lse) by torch.softmax over dense scores, some probabilities of which are then dropped."""
    (batch, rows, heads), keys = p.q.shape[:3], p.k.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (p.k, p.v))
    mask = dense(p.intervals.lo, p.intervals.hi, keys)[:, None].expand(batch, heads, -1, -1)
    if "blocks" in p.features:
        mask = mask & p.features["blocks"].dense(rows, keys)
    scores = (p.scale * torch.einsum("bqhd,bkhd->bhqk", p.q, k)).masked_fill(~mask, float("-inf"))
    seen = mask.any(-1, keepdim=True)
    probabilities = torch.softmax(scores.masked_fill(~seen, 0.0), -1).masked_fill(~seen, 0.0)
    lse = torch.logsumexp(scores.masked_fill(~seen, 0.0), -1).masked_fill(~seen[..., 0], float("-inf"))
    if "dropout" in p.features:
        dropout = p.features["dropout"]
        probabilities = probabilities * keep_mask(dropout, batch, heads) / (1 - dropout.p)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, v), lse.transpose(1, 2)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", FEATURES)
def test_reference(kind, mask, heads):
    rows = (90, 140)
    features = make_features(kind, rows, shape=(2, heads[0]))
    problem = make_problem(*intervals_of(mask, *rows), rows[1], torch.float64, 2, heads, (8, 6), **features)
    inputs = [x.requires_grad_() for x in (problem.q, problem.k, problem.v)]
    out, lse = dense_attention(problem)
    dlse = torch.randn_like(lse) * (lse > float("-inf"))
    expected = torch.autograd.grad((out * problem.dout).sum() + (lse.clamp(min=-1e6) * dlse).sum(), inputs)

    problem.q, problem.k, problem.v = (x.detach() for x in inputs)
    problem.lse, out = lse.detach(), out.detach()
    problem.delta = reference.row_delta(out, problem.dout, dlse)
    assert_states_close(problem.forward(reference, final=True), (out, problem.lse), 1e-11)
    for name, x, y in zip(("dq", "dk", "dv"), problem.backward(reference), expected, strict=True):
        assert_rows_close(name, x, y, 1e-11)


def check_tiled(problem: Problem) -> None:
    for final in (False, True):
        assert_states_close(problem.forward(blockwise, final=final), problem.double().forward(reference, final=final), 2e-5)
    for name, x, y in zip(("dq", "dk", "dv"), problem.backward(blockwise), problem.double().backward(reference), strict=True):
        assert_rows_close(name, x, y, 2e-5)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", FEATURES)
def test_tiled(kind, mask):
    rows = (333, 600)
    features = make_features(kind, rows, shape=(2, 1), size=128)
    check_tiled(make_problem(*intervals_of(mask, *rows), rows[1], batch=2, heads=(2, 1), **features))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", FEATURES)
def test_triton_masks(kind, mask, device):
    rows = (70, 140)
    features = make_features(kind, rows, shape=(1, 2), device=device)
    check_all(make_problem(*intervals_of(mask, *rows), rows[1], device=device, **features))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("shape", [(2, 1), (1, 4)], ids=str)
def test_triton_grouped_heads(shape, dtype, device):
    rows = (99, 131)
    features = make_features("both", rows, shape, device=device)
    lo, hi = random_intervals(*rows, seed=2, batch=2)
    check_all(make_problem(lo, hi, rows[1], dtype, 2, (4, 2), (16, 24), device, **features), floor=1.0)


@pytest.mark.parametrize("size", [64, 192, 256])
def test_triton_tiles_of_the_table(size, device):
    rows = (300, 300)
    features = make_features("both", rows, (1, 1), size, device=device)
    check_all(make_problem(*intervals_of("causal", *rows), 300, torch.float16, 1, (1, 1), device=device, **features))


@pytest.mark.usefixtures("small_tiles")
def test_triton_pieces_of_the_keys(device):
    """A chain of calls over pieces of the keys, and the gradients of the pieces summed, equal one call over all."""
    rows = (70, 200)
    features = make_features("both", rows, (1, 2), device=device)
    whole = make_problem(*intervals_of("window", *rows), rows[1], device=device, **features)
    gradients = [torch.zeros_like(x) for x in (whole.q, whole.k, whole.v)]
    state = None
    for keys in (slice(0, 64), slice(64, 192), slice(192, 200)):
        cut = {name: feature.cut(slice(0, rows[0]), keys) for name, feature in features.items()}
        seen = whole.intervals.cut(slice(0, rows[0]), keys)
        part = whole.q, whole.k[:, keys].contiguous(), whole.v[:, keys].contiguous()
        state = triton_forward.forward(*part, seen, whole.scale, state, keys.stop == rows[1], **cut)
        grads = [torch.zeros_like(x) for x in part]
        triton_backward.backward(*part, whole.dout, whole.lse, whole.delta, seen, whole.scale, *grads, **cut)
        gradients[0] += grads[0]
        gradients[1][:, keys], gradients[2][:, keys] = grads[1:]
    assert_states_close(state, whole.double().forward(reference, final=True), TOLERANCE[torch.float32])
    for name, x, y in zip(("dq", "dk", "dv"), gradients, whole.double().backward(reference), strict=True):
        assert_rows_close(name, x, y, TOLERANCE[torch.float32])


@pytest.mark.usefixtures("small_tiles")
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(FEATURES),
    *(st.integers(1, 140), st.integers(1, 140), st.integers(1, 2)),
    *(st.sampled_from([(1, 1), (2, 1), (2, 2)]), st.booleans(), st.integers(0, 2**32)),
)
def test_random_problems(device, kind, num_queries, num_keys, batch, heads, shared, seed):
    rows = (num_queries, num_keys)
    features = make_features(kind, rows, (1, 1) if shared else (batch, heads[0]), seed=seed, device=device)
    lo, hi = random_intervals(*rows, seed, batch)
    problem = make_problem(lo, hi, num_keys, batch=batch, heads=heads, device=device, **features)
    check_all(problem, floor=1.0)


@pytest.mark.gpu
def test_tf32(device):
    problem = make_problem(*intervals_of("causal", 300, 300), 300, dims=(64, 64), device=device)
    expected = problem.double().backward(reference)
    problem.features["precision"] = "tf32"
    for x, y in zip(problem.backward(triton_backward), expected, strict=True):
        assert_rows_close("gradient", x, y, 16 * 2**-10)  # the operands keep 11 bits, and are cut, not rounded


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("module", [reference, blockwise], ids=["reference", "tiled"])
def test_precision_does_not_change_the_exact_modules(module, precision):
    problem = make_problem(*intervals_of("causal", 40, 40), 40)
    expected = problem.forward(module)
    problem.features["precision"] = precision
    assert all(torch.equal(x, y) for x, y in zip(problem.forward(module), expected, strict=True))
