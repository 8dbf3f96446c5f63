"""Worked examples of the online softmax with known answers, on the portable kernels."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from ringattn.kernels import blockwise, reference
from ringattn.kernels.triton import forward as triton_forward
from ringattn.kernels.triton import merge_states as triton_merge
from tests.kernels.masks import full
from tests.worked_examples import EXAMPLES, Example, check_forward, check_result, check_state, tokens

# The module of each kernel, and the dtype of its inputs.
KERNELS = {
    "reference": (reference, torch.float64),
    "blockwise": (blockwise, torch.float64),
    "triton": (triton_forward, torch.float32),
}


@pytest.fixture
def tiles_of_two(monkeypatch: pytest.MonkeyPatch, small_tiles: None) -> None:
    """Make the blockwise kernel use tiles of two tokens, and the Triton kernel small tiles."""
    monkeypatch.setattr(blockwise, "QUERY_TILE", 2)
    monkeypatch.setattr(blockwise, "KEY_TILE", 2)


# Copies of each key fill several tiles of the Triton kernel.
@pytest.mark.parametrize("copies", [1, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_give_the_known_answers(
    kernel: str, example: Example, copies: int, tiles_of_two: None, device: torch.device
) -> None:
    module, dtype = KERNELS[kernel]
    check_forward(example.repeated(copies), module, dtype, device if kernel == "triton" else "cpu", 1e-6)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_the_merge_kernel_gives_the_known_answers(example: Example, device: torch.device) -> None:
    """The states of single keys are independent of each other, as on the ranks of a ring."""
    k, v = (x.split(1, 1) for x in (example.k, example.v))
    states = [attend(example.q, *pair, example.scale) for pair in zip(k, v, strict=True)]
    base, *parts = (tuple(x.to(device, torch.float32) for x in state) for state in states)
    out, lse = triton_merge.merge_states(base, [(0, part) for part in parts], torch.float32)
    check_result(out, lse, example, 1e-6)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_a_kernel_without_its_last_tile_gives_other_answers(
    example: Example, tiles_of_two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_tiles: Callable[..., Iterator] = blockwise._key_tiles
    monkeypatch.setattr(blockwise, "_key_tiles", lambda *arguments: list(key_tiles(*arguments))[:-1])
    with pytest.raises(AssertionError):
        check_forward(example, blockwise, torch.float64)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, state: reference.State | None = None) -> reference.State:
    return reference.forward(q, k, v, full(q.shape[1], k.shape[1]), scale, state)


def score_states(*blocks: list[float]) -> list[reference.State]:
    """Return the states of one query after each block of scores. The keys are the scores, and the query and the scale are 1."""
    states: list[reference.State] = []
    for block in blocks:
        keys = tokens(*([score] for score in block))
        states.append(attend(tokens([1.0]), keys, torch.ones_like(keys), 1.0, states[-1] if states else None))
    return states


def test_two_blocks_of_two_scores():
    first, second = score_states([1, 3], [2, 5])
    assert (first[0].item(), second[0].item()) == (3, 5)
    assert first[1].item() == pytest.approx(1.135, abs=5e-4)
    assert math.exp(3 - 5) == pytest.approx(0.135, abs=5e-4)
    assert second[1].item() == pytest.approx(1.203, abs=5e-4)
    assert second[1].item() == pytest.approx(sum(math.exp(s - 5) for s in (1, 3, 2, 5)), rel=1e-14)


def test_two_blocks_of_four_scores():
    first, second = score_states([3, 1, 2, 4], [5, 1, 3, 1])
    assert (first[0].item(), second[0].item()) == (4, 5)
    assert first[1].item() == pytest.approx(1.553, abs=5e-4)
    rescaled = first[1].item() * math.exp(4 - 5)
    assert rescaled == pytest.approx(0.571, abs=5e-4)
    assert second[1].item() == pytest.approx(rescaled + sum(math.exp(s - 5) for s in (5, 1, 3, 1)), rel=1e-14)


def attend_in_blocks(example: Example, block: int) -> list[reference.State]:
    """Return the states of the queries after each block of `block` keys."""
    states: list[reference.State] = []
    for k, v in zip(example.k.split(block, 1), example.v.split(block, 1), strict=True):
        states.append(attend(example.q, k, v, example.scale, states[-1] if states else None))
    return states


def test_one_query_attends_to_two_blocks_of_keys():
    example = EXAMPLES["two-blocks-of-keys"]
    (m, l, o), last = attend_in_blocks(example, 4)
    assert m.item() == 4
    assert l.item() == pytest.approx(1.3205, abs=5e-5)
    assert o.flatten().tolist() == pytest.approx([0.641, 2.185, 1.135, 1.420], abs=5e-4)
    check_state(last, example, 0.0)
    check_result(*reference.finalize(last, torch.float64), example, 0.0)


def test_five_tokens_in_tiles_of_two_keys():
    """In fp64, the result differs from the softmax of all scores by at most 2e-16."""
    example = EXAMPLES["five-tokens"]
    out, _ = reference.finalize(attend_in_blocks(example, 2)[-1], torch.float64)
    q, k, v = (x[0, :, 0] for x in (example.q, example.k, example.v))
    direct = torch.softmax(example.scale * q @ k.T, -1) @ v
    torch.testing.assert_close(out[0, :, 0], direct, rtol=0, atol=2e-16)


def test_4096_tokens_in_tiles_of_128_keys():
    """The relative error against the direct softmax is about 2e-15."""
    num_tokens, dim, tile = 4096, 64, 128
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, num_tokens, 1, dim, generator=generator, dtype=torch.float64) for _ in range(3))
    state = None
    for keys, values in zip(k.split(tile, 1), v.split(tile, 1), strict=True):
        state = attend(q, keys, values, dim**-0.5, state)
    out, _ = reference.finalize(state, torch.float64)
    direct = torch.softmax(dim**-0.5 * q[0, :, 0] @ k[0, :, 0].T, -1) @ v[0, :, 0]
    assert (out[0, :, 0] - direct).norm() / direct.norm() < 4e-15
