"""Dropout: the random generator against published vectors, the statistics of the mask, and what the mask depends on."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ringattn.kernels import blockwise, dispatch, reference
from ringattn.kernels.dropout import ROUNDS, Dropout, keep_mask, philox
from ringattn.kernels.triton import common as triton_common
from ringattn.kernels.triton import forward as triton_forward
from tests.kernels.masks import full, intervals_of
from tests.kernels.problems import Problem, make_problem

WORD_MASK = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = 0x299F31D0A4093822
VECTORS = [  # rounds, counter, key and words, from the file kat_vectors of Random123
    (7, (0,) * 4, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (WORD_MASK,) * 4, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (10, (0,) * 4, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (WORD_MASK,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, PI, PI_KEY, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
PORTABLE = ["reference", "blockwise", "triton"]


def arange(n: int, start: int = 0, step: int = 1) -> Tensor:
    return start + step * torch.arange(n, dtype=torch.int32)


def plain_words(dropout: Dropout, batch: int, heads: int) -> Tensor:
    """Compute the random words that decide `keep_mask`, one counter at a time with Python integers."""
    words = torch.empty(batch, heads, len(dropout.query_positions), len(dropout.key_positions), dtype=torch.int64)
    for index in np.ndindex(*words.shape):
        b, h, i, j = index
        counter = dropout.query_positions[i].item(), dropout.key_positions[j].item(), dropout.first_head + h, b
        low, high = dropout.seed & WORD_MASK, dropout.seed >> 32
        for _ in range(ROUNDS):
            a, c = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
            counter = (c >> 32) ^ counter[1] ^ low, c & WORD_MASK, (a >> 32) ^ counter[3] ^ high, a & WORD_MASK
            low, high = (low + 0x9E3779B9) & WORD_MASK, (high + 0xBB67AE85) & WORD_MASK
        words[index] = counter[1]
    return words


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), VECTORS)
def test_philox_gives_the_published_words(rounds, counter, key, words):
    assert tuple(x.item() for x in philox(tuple(torch.tensor(x) for x in counter), key, rounds)) == words


@pytest.mark.parametrize("p", [0.0, 0.25, 0.5, 0.9])
def test_keep_mask_compares_unsigned_words(p):
    dropout = Dropout(p, 2**63 + 7, arange(5, 2**31 - 5), arange(4, 3, 11), first_head=1)
    assert torch.equal(keep_mask(dropout, 2, 3), plain_words(dropout, 2, 3) >= round(p * 2**32))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate_is_within_five_standard_deviations(p):
    """The rate is checked overall, and for each query, key, head and batch entry."""
    keep = keep_mask(Dropout(p, 123, arange(150), arange(200)), 2, 4).double()
    for dims in ((0, 1, 2, 3), (0, 1, 3), (0, 1, 2), (0, 2, 3), (1, 2, 3)):
        rate, count = keep.mean(dims), math.prod(keep.shape[dim] for dim in dims)
        assert ((rate - (1 - p)).abs() < 5 * math.sqrt(p * (1 - p) / count)).all()


@pytest.mark.parametrize(
    "offset", [(0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1), (0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 16, 0), (0, 0, 0, 64)]
)
def test_neighbouring_pairs_are_uncorrelated(offset):
    p = 0.5
    keep = keep_mask(Dropout(p, 99, arange(128), arange(256)), 2, 3).double() - (1 - p)
    near = keep[tuple(slice(0, size - step) for size, step in zip(keep.shape, offset, strict=True))]
    far = keep[tuple(slice(step, None) for step in offset)]
    assert abs((near * far).mean() / (p * (1 - p))) < 5 / math.sqrt(near.numel())


def test_masks_of_different_seeds_are_uncorrelated():
    first, second = (keep_mask(Dropout(0.5, seed, arange(256), arange(512)), 1, 2).double() - 0.5 for seed in (7, 8))
    assert abs((first * second).mean() / 0.25) < 5 / math.sqrt(first.numel())


@pytest.mark.parametrize("ranks", [2, 3])
def test_mask_of_a_shard_is_a_part_of_the_whole_mask(ranks):
    whole = Dropout(0.4, 5, arange(37), arange(41))
    keep = keep_mask(whole, 2, 2)
    for queries in (slice(rank, None, ranks) for rank in range(ranks)):
        for keys in (slice(rank, None, ranks) for rank in range(ranks)):
            assert torch.equal(keep_mask(whole.restrict(queries, keys), 2, 2), keep[:, :, queries, keys])


@pytest.mark.parametrize("backend", PORTABLE)
def test_mask_of_a_head_does_not_depend_on_the_other_heads_of_the_call(backend, device):
    positions = [arange(20).to(device), arange(30).to(device)]
    whole = make_problem(*intervals_of("causal", 20, 30), 30, heads=(4, 2), device=device, dropout=Dropout(0.4, 5, *positions))
    part = Problem(**vars(whole))
    part.q, part.dout, part.lse, part.delta = (x[:, :, 2:].contiguous() for x in (whole.q, whole.dout, whole.lse, whole.delta))
    part.k, part.v = whole.k[:, :, 1:], whole.v[:, :, 1:]
    part.options = {"dropout": Dropout(0.4, 5, *positions, first_head=2)}
    results = [
        (*p.forward(dispatch, final=True, backend=backend), *p.gradients(dispatch, backend=backend)) for p in (whole, part)
    ]
    first_head = (2, 2, 2, 1, 1)  # of the part, in out, lse, dq, dk and dv
    for x, y, head in zip(*results, first_head, strict=True):
        torch.testing.assert_close(x[:, :, head:], y)


def observed_mask(module, dropout: Dropout, bounds: list[int], heads: int) -> Tensor:
    """Derive keep_mask from the output: scores are 0 and values are one-hot, so out[i, j] is factor / Nk where kept."""
    num_queries, num_keys = len(dropout.query_positions), len(dropout.key_positions)
    q, k = torch.zeros(1, num_queries, heads, 16), torch.zeros(1, num_keys, 1, 16)
    v = torch.eye(num_keys)[None, :, None]
    state = None
    for first, last in itertools.pairwise(bounds):
        part = dropout.restrict(slice(None), slice(first, last))
        intervals = full(num_queries, last - first)
        state = module.forward(q, k[:, first:last], v[:, first:last], intervals, 1.0, state, last == num_keys, dropout=part)
    out = state[0] * num_keys
    torch.testing.assert_close(out, torch.where(out > 0.5, dropout.factor, 0.0))
    return out.transpose(1, 2) > 0.5


@pytest.mark.skipif(torch.cuda.is_available(), reason="only the interpreter accepts tiles of any size")
@pytest.mark.parametrize("bounds", [[0, 70], pytest.param([0, 13, 14, 50, 70], marks=pytest.mark.slow)], ids=str)
def test_mask_does_not_depend_on_tiles_or_pieces_of_the_keys(bounds, monkeypatch):
    dropout = Dropout(0.3, 11, arange(35, 5, 3), torch.randperm(100, dtype=torch.int32)[:70])
    expected = keep_mask(dropout, 1, 2)
    for tile in ((16, 32), (32, 64)):
        monkeypatch.setattr(triton_common, "choose_tile", lambda *_, tile=tile: triton_common.Tile(*tile, 8, 1))
        assert torch.equal(observed_mask(triton_forward, dropout, bounds, 2), expected)
    for sizes in ((16, 7), (256, 512)):
        monkeypatch.setattr(blockwise, "QUERY_TILE", sizes[0])
        monkeypatch.setattr(blockwise, "KEY_TILE", sizes[1])
        assert torch.equal(observed_mask(blockwise, dropout, bounds, 2), expected)


def test_probability_zero_drops_nothing(device):
    problem = make_problem(*intervals_of("causal", 20, 30), 30, device=device)
    expected = problem.forward(triton_forward, final=True)
    problem.options["dropout"] = Dropout(0.0, 3, arange(20).to(device), arange(30).to(device))
    for x, y in zip(problem.forward(triton_forward, final=True), expected, strict=True):
        assert torch.equal(x, y)


def test_probability_close_to_one_has_the_largest_threshold():
    assert Dropout(math.nextafter(1.0, 0.0), 0, arange(1), arange(1)).threshold == WORD_MASK


def test_mean_over_seeds_is_attention_without_dropout():
    problem = make_problem(*intervals_of("causal", 20, 20), 20, torch.float64)
    expected, lse = problem.forward(reference, final=True)
    outs = []
    for seed in range(200):
        out, lse_with_dropout = problem.forward(reference, final=True, dropout=Dropout(0.5, seed, arange(20), arange(20)))
        assert torch.equal(lse_with_dropout, lse)
        outs.append(out)
    outs = torch.stack(outs)
    error = (outs.mean(0) - expected) / (outs.std(0) / math.sqrt(len(outs)))
    assert error.abs().max() < 6  # standard deviations


@pytest.mark.parametrize("backend", PORTABLE)
def test_positions_may_have_strides(backend, device):
    problem = make_problem(*intervals_of("causal", 20, 30), 30, device=device)
    strided = [torch.stack((arange(n), arange(n, 99)), 1)[:, 0].to(device) for n in (20, 30)]
    out, expected = (
        problem.forward(dispatch, final=True, backend=backend, dropout=Dropout(0.4, 5, *positions))[0]
        for positions in (strided, [x.contiguous() for x in strided])
    )
    assert torch.equal(out, expected)
