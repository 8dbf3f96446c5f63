"""Dropout: the generator against published vectors and Triton's, the mask's statistics, and that nothing local enters it."""

import math
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from ringattn.kernels import blockwise, dispatch, reference
from ringattn.kernels.dropout import ROUNDS, Dropout, keep_mask, philox
from ringattn.kernels.interval_mask import full
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton import forward as triton_forward
from tests.kernels.masks import intervals_of
from tests.kernels.problems import Problem, make_problem

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = 0x299F31D0A4093822
VECTORS = [  # rounds, counter, key, words: kat_vectors of Random123
    (7, (0,) * 4, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (ONES,) * 4, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (10, (0,) * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (ONES,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def arange(n: int, start: int = 0, step: int = 1) -> Tensor:
    return start + step * torch.arange(n, dtype=torch.int32)


def words_of(dropout: Dropout, batch: int, heads: int) -> Tensor:
    """The words behind `keep_mask`, from one counter at a time with Python integers."""
    words = torch.empty(batch, heads, len(dropout.query_positions), len(dropout.key_positions), dtype=torch.int64)
    for index in np.ndindex(*words.shape):
        b, h, i, j = index
        counter = dropout.query_positions[i].item(), dropout.key_positions[j].item(), h, b
        low, high = dropout.seed & ONES, dropout.seed >> 32
        for _ in range(ROUNDS):
            a, c = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = (c >> 32) ^ counter[1] ^ low, c & ONES, (a >> 32) ^ counter[3] ^ high, a & ONES
            low, high = (low + 0x9E3779B9) & ONES, (high + 0xBB67AE85) & ONES
        words[index] = counter[1]
    return words


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), VECTORS)
def test_philox_has_the_published_words(rounds, counter, key, words):
    assert tuple(x.item() for x in philox(tuple(torch.tensor(x) for x in counter), key, rounds)) == words


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.9])
def test_keep_mask_compares_unsigned_words(p):
    dropout = Dropout(p, 2**63 + 7, arange(5, 2**31 - 5), arange(4, 3, 11))
    assert torch.equal(keep_mask(dropout, 2, 3), words_of(dropout, 2, 3) >= round(p * 2**32))


@triton.jit(do_not_specialize=["seed", "threshold"])
def _draw_kernel(
    rows, columns, out, head, batch, seed: tl.uint64, threshold: tl.uint32, num_columns,
    ROWS: tl.constexpr, STEP: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    dropout = (tl.load(rows + tl.arange(0, ROWS)), columns, batch, 1, seed, threshold, 1.0)
    keep = triton_common.draw(dropout, head - 1, 0, num_columns, STEP, TRANSPOSED, True)
    tl.store(out + tl.arange(0, ROWS)[:, None] * STEP + tl.arange(0, STEP)[None, :], keep.to(tl.int32))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("seed", [1, 2**31, 2**64 - 1])
@pytest.mark.parametrize("p", [0.1, 0.7])
def test_triton_draws_the_same_mask(p, seed, transposed, device):
    rows, columns = arange(32, 2**30, 5).to(device), torch.randperm(64, dtype=torch.int32).to(device)
    dropout = Dropout(p, seed, *((columns, rows) if transposed else (rows, columns)))
    out = torch.empty(32, 64, dtype=torch.int32, device=device)
    _draw_kernel[(1,)](rows, columns, out, 2, 1, seed, dropout.threshold, 64, ROWS=32, STEP=64, TRANSPOSED=transposed)
    expected = keep_mask(dropout, 2, 3)[1, 2]
    assert torch.equal(out.bool(), expected.T if transposed else expected)


@triton.jit(do_not_specialize=["seed"])
def _philox_kernel(counters, out, seed: tl.uint64, ROUNDS: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    a, b = tl.load(counters + index), tl.load(counters + SIZE + index)
    c, d = tl.load(counters + 2 * SIZE + index), tl.load(counters + 3 * SIZE + index)
    a, b, c, d = tl.philox(seed, a, b, c, d, ROUNDS)
    tl.store(out + index, a.to(tl.int32, bitcast=True))
    tl.store(out + SIZE + index, b.to(tl.int32, bitcast=True))
    tl.store(out + 2 * SIZE + index, c.to(tl.int32, bitcast=True))
    tl.store(out + 3 * SIZE + index, d.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("rounds", [7, 10])
def test_philox_is_that_of_triton(rounds, device):
    counters = torch.randint(-(2**31), 2**31, (4, 64), dtype=torch.int32, device=device)
    out = torch.empty_like(counters)
    _philox_kernel[(1,)](counters, out, PI_KEY, ROUNDS=rounds, SIZE=64)
    assert torch.equal(out.long() & ONES, torch.stack(philox(tuple(counters.long() & ONES), PI_KEY, rounds)))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate(p):
    """Overall, by row, by column, by head and by batch entry, within 5 standard deviations."""
    keep = keep_mask(Dropout(p, 123, arange(300), arange(400)), 2, 4).double()
    for dims in ((0, 1, 2, 3), (0, 1, 3), (0, 1, 2), (0, 2, 3), (1, 2, 3)):
        rate, count = keep.mean(dims), math.prod(keep.shape[dim] for dim in dims)
        assert ((rate - (1 - p)).abs() < 5 * math.sqrt(p * (1 - p) / count)).all()


@pytest.mark.parametrize(
    "offset", [(0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 16, 0), (0, 0, 0, 64)]
)
def test_neighbours_are_uncorrelated(offset):
    p = 0.5
    keep = keep_mask(Dropout(p, 99, arange(256), arange(512)), 2, 3).double() - (1 - p)
    near = keep[tuple(slice(0, size - step) for size, step in zip(keep.shape, offset, strict=True))]
    far = keep[tuple(slice(step, None) for step in offset)]
    assert abs((near * far).mean() / (p * (1 - p))) < 5 / math.sqrt(near.numel())


def test_seeds_are_uncorrelated():
    first, second = (keep_mask(Dropout(0.5, seed, arange(256), arange(512)), 1, 2).double() - 0.5 for seed in (7, 8))
    assert abs((first * second).mean() / 0.25) < 5 / math.sqrt(first.numel())


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_mask_of_a_shard_is_a_part_of_the_whole(ranks):
    whole = Dropout(0.4, 5, arange(37), arange(41))
    keep = keep_mask(whole, 2, 2)
    for queries in (slice(rank, None, ranks) for rank in range(ranks)):
        for keys in (slice(rank, None, ranks) for rank in range(ranks)):
            assert torch.equal(keep_mask(whole.cut(queries, keys), 2, 2), keep[:, :, queries, keys])


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
def test_heads_apart_have_the_masks_they_have_together(backend, device):
    positions = [arange(20).to(device), arange(30).to(device)]
    whole = make_problem(*intervals_of("causal", 20, 30), 30, heads=(4, 2), device=device, dropout=Dropout(0.4, 5, *positions))
    part = Problem(**vars(whole))
    part.q, part.dout, part.lse, part.delta = (x[:, :, 2:].contiguous() for x in (whole.q, whole.dout, whole.lse, whole.delta))
    part.k, part.v = whole.k[:, :, 1:], whole.v[:, :, 1:]
    part.features = {"dropout": Dropout(0.4, 5, *positions, first_head=2)}
    module = SimpleNamespace(
        forward=partial(dispatch.forward, backend=backend), backward=partial(dispatch.backward, backend=backend)
    )
    first = (2, 2, 2, 1, 1)  # of the part's heads, for out, lse, dq, dk, dv
    together = *whole.forward(module, final=True), *whole.backward(module)
    apart = *part.forward(module, final=True), *part.backward(module)
    for x, y, head in zip(apart, together, first, strict=True):
        torch.testing.assert_close(x, y[:, :, head:])


def observed_mask(module, dropout: Dropout, pieces: list[int], heads: int) -> Tensor:
    """keep_mask as the outputs of a module show it: scores are 0 and values one-hot, so out[i, j] is factor / Nk where kept."""
    num_queries, num_keys = len(dropout.query_positions), len(dropout.key_positions)
    q, k = torch.zeros(1, num_queries, heads, 16), torch.zeros(1, num_keys, 1, 16)
    v = torch.eye(num_keys)[None, :, None]
    state = None
    for first, last in zip(pieces, pieces[1:], strict=False):
        part = dropout.cut(slice(None), slice(first, last))
        intervals = full(num_queries, last - first)
        state = module.forward(q, k[:, first:last], v[:, first:last], intervals, 1.0, state, last == num_keys, dropout=part)
    out = state[0] * num_keys
    torch.testing.assert_close(out, torch.where(out > 0.5, dropout.factor, 0.0))
    return out.transpose(1, 2) > 0.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="tiles of any size fit the interpreter alone")
@pytest.mark.parametrize("pieces", [[0, 70], [0, 13, 14, 50, 70]], ids=str)
def test_the_mask_does_not_depend_on_tiles_or_pieces(pieces, monkeypatch):
    dropout = Dropout(0.3, 11, arange(45, 5, 3), torch.randperm(100, dtype=torch.int32)[:70])
    expected = keep_mask(dropout, 1, 2)
    for tile in ((16, 16), (32, 64), (64, 16)):
        monkeypatch.setattr(triton_common, "choose_tile", lambda *_, tile=tile: triton_common.Tile(*tile, 8, 1))
        assert torch.equal(observed_mask(triton_forward, dropout, pieces, 2), expected)
    for sizes in ((16, 7), (256, 512)):
        monkeypatch.setattr(blockwise, "QUERY_TILE", sizes[0])
        monkeypatch.setattr(blockwise, "KEY_TILE", sizes[1])
        assert torch.equal(observed_mask(blockwise, dropout, pieces, 2), expected)


def test_no_dropout_at_0(device):
    problem = make_problem(*intervals_of("causal", 40, 50), 50, device=device)
    expected = problem.forward(triton_forward, final=True)
    problem.features["dropout"] = Dropout(0.0, 3, arange(40).to(device), arange(50).to(device))
    for x, y in zip(problem.forward(triton_forward, final=True), expected, strict=True):
        assert torch.equal(x, y)


REFUSED = {
    "p of 1": (dict(p=1.0), "p is 1.0"),
    "negative p": (dict(p=-0.1), "p is -0.1"),
    "p of nan": (dict(p=float("nan")), "p is nan"),
    "negative seed": (dict(seed=-1), "seed is -1"),
    "seed of 65 bits": (dict(seed=2**64), "less than 2**64"),
    "negative first head": (dict(first_head=-1), "first_head is -1"),
    "dtype": (dict(query_positions=torch.arange(5)), "query_positions is torch.int64"),
    "batch of positions": (dict(key_positions=arange(7)[None]), "key_positions is torch.int32 of shape (1, 7)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_dropouts_are_refused(case):
    change, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        Dropout(**dict(p=0.1, seed=0, query_positions=arange(5), key_positions=arange(7)) | change)


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
def test_positions_of_other_rows_are_refused(backend):
    problem = make_problem(*intervals_of("full", 5, 7), 7)
    for rows, message in (((4, 7), "query_positions has shape (4,)"), ((5, 8), "key_positions has shape (8,)")):
        dropout = Dropout(0.1, 0, *(arange(n) for n in rows))
        with pytest.raises(ValueError, match=re.escape(message)):
            problem.forward(dispatch, backend=backend, dropout=dropout)
    with pytest.raises(ValueError, match="unknown precision 'bf16x3'"):
        problem.forward(dispatch, backend=backend, precision="bf16x3")


def test_the_mean_over_seeds_is_attention_without_dropout():
    problem = make_problem(*intervals_of("causal", 20, 20), 20, torch.float64)
    expected, lse = problem.forward(reference, final=True)
    outs = []
    for seed in range(400):
        out, lse_dropped = problem.forward(reference, final=True, dropout=Dropout(0.5, seed, arange(20), arange(20)))
        assert torch.equal(lse_dropped, lse)
        outs.append(out)
    outs = torch.stack(outs)
    error = (outs.mean(0) - expected) / (outs.std(0) / math.sqrt(len(outs)))
    assert error.abs().max() < 6


def test_nearly_all_is_dropped():
    assert Dropout(math.nextafter(1.0, 0.0), 0, arange(1), arange(1)).threshold == ONES


@pytest.mark.parametrize("backend", ["reference", "tiled", "triton"])
def test_positions_may_have_strides(backend, device):
    problem = make_problem(*intervals_of("causal", 20, 30), 30, device=device)
    strided = [torch.stack((arange(n), arange(n, 99)), 1)[:, 0].to(device) for n in (20, 30)]
    out, expected = (
        problem.forward(dispatch, final=True, backend=backend, dropout=Dropout(0.4, 5, *positions))[0]
        for positions in (strided, [x.contiguous() for x in strided])
    )
    assert torch.equal(out, expected)
