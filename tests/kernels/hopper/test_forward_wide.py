"""The constants of the Hopper forward for head dims above 128, and the cases that only this kernel has.

The tests of the other modules of the Hopper forward also run with head dims above 128.
"""

import random
from dataclasses import replace

import pytest
import torch

from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper import forward as hopper_forward
from tests.covering import every_pair
from tests.kernels.contract import check_chain, check_forward, make_strided
from tests.kernels.hopper.conftest import DTYPES
from tests.kernels.masks import intervals_of, random_intervals
from tests.kernels.problems import STRIDED, make_problem

WIDE = [(256, 256), (192, 128)]
# Head dims that the tiles exceed: in one tensor or in both, by less than 64 columns or by more.
IRREGULAR = [(136, 8), (160, 128), (136, 248), (256, 40), (8, 256), (200, 200)]
SHAPES = {  # (Nq, Nk), (Hq, Hkv), batch
    "one-query": ((1, 63), (2, 1), 1),
    "one-key": ((63, 1), (2, 1), 1),
    "one-pair": ((1, 1), (1, 1), 2),
    "129": ((129, 129), (8, 2), 1),
    "130x111": ((130, 111), (2, 2), 3),
    "385x1000": ((385, 1000), (2, 1), 1),
    "1000x385": ((1000, 385), (3, 1), 1),
}


def configure(dims, dtype=torch.bfloat16, has_state=False, final=True):
    return hopper_forward.configure(dims, (8, 2), dtype, has_state, final)


@pytest.mark.parametrize(
    ("dims", "padded"),
    [
        ((136, 8), (192, 128)),
        ((192, 128), (192, 128)),
        ((192, 136), (256, 256)),
        ((200, 8), (256, 256)),
        ((8, 136), (256, 256)),
        ((256, 256), (256, 256)),
    ],
)
def test_head_dims_are_padded(dims, padded):
    config = configure(dims)
    assert (config.key_dim, config.dim) == padded
    assert (config.value_dim, config.group) == (dims[1], 4)
    assert config.queries == 128


def test_only_bf16_starts_with_an_optimistic_reference_max():
    assert configure((256, 256), torch.float16).update_ref_max
    assert not configure((256, 256)).update_ref_max


@pytest.mark.parametrize("dims", WIDE, ids=str)
def test_tiles_fit_into_shared_memory(dims):
    config = configure(dims)
    elements = config.queries * config.key_dim + config.stages * config.keys * config.dim
    elements += config.tails * config.keys * config.tail
    # The limit of sm_90 is 227 KiB per program. Barriers and flags need less than 1 KiB.
    assert 2 * elements <= 226 * 1024


@pytest.mark.parametrize("overlap", [False, True])
def test_a_tail_is_free_when_the_stage_of_its_keys_is_free(overlap):
    """The producer waits only for the stage of K. Of the tiles that the stages then hold, at most `tails` are tiles of K."""
    source = random.Random(0)
    config = replace(configure((192, 128)), overlap=overlap)
    tiles = ""
    for _ in range(2000):
        steps = source.choice([1, 1, 2, 3, 5])
        tiles += "K" + "".join("KV" if overlap else "VK" for _ in range(steps - 1)) + "V"
    held = [tiles[max(0, i - config.stages + 1) : i + 1].count("K") for i, kind in enumerate(tiles) if kind == "K"]
    assert max(held) == config.tails


@pytest.mark.parametrize("columns", [64, 256])
def test_descriptors_of_wide_tiles(columns):
    x = torch.zeros(2, 10, 4, 192, dtype=torch.float16)
    assert list(hopper_common.tma_descriptor(x, 64, columns).block_shape) == [1, 64, 1, columns]


@every_pair(shape=SHAPES, dtype=DTYPES, dims=WIDE)
def test_shapes(shape, dtype, dims, hopper):
    sizes, heads, batch = SHAPES[shape]
    check_forward(make_problem(*intervals_of("window", *sizes), sizes[1], dtype, batch, heads, dims, hopper), hopper_forward)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", IRREGULAR, ids=str)
def test_columns_that_only_the_tiles_have(dims, dtype, hopper):
    """TMA fills these columns of Q, K and V with zeros, and they are neither read nor written in o."""
    problem = make_problem(*intervals_of("causal", 300, 300), 300, dtype, 2, (4, 2), dims, hopper)
    check_forward(problem, hopper_forward)
    check_chain(problem, [0, 64, 210, 300], True, hopper_forward)


@every_pair(layout=STRIDED, dims=WIDE)
def test_strided_inputs(layout, dims, hopper):
    problem = make_problem(*intervals_of("causal", 270, 270), 270, torch.bfloat16, 2, dims=dims, device=hopper)
    check_forward(make_strided(problem, layout), hopper_forward)


@pytest.mark.parametrize("dims", WIDE, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_random_intervals(seed, dims, hopper):
    source = random.Random(seed)
    num_queries, num_keys = source.randint(1, 700), source.randint(1, 700)
    problem = make_problem(
        *random_intervals(num_queries, num_keys, seed, 2), num_keys, torch.bfloat16, 2, dims=dims, device=hopper
    )  # fmt: skip
    check_forward(problem, hopper_forward)
    for final in (False, True):
        check_chain(problem, [0, num_keys // 3, num_keys], final, hopper_forward)


@pytest.mark.parametrize("dims", WIDE, ids=str)
def test_many_work_tiles_per_program(dims, hopper, num_sms):
    """The ring of stages wraps around in every way: work tiles have one, two and more steps."""
    num_queries = 128 * 3 * num_sms // 2
    problem = make_problem(*random_intervals(num_queries, 450, seed=3), 450, torch.bfloat16, 1, (3, 1), dims, hopper)
    check_forward(problem, hopper_forward)
    for final in (False, True):
        results = [problem.forward(hopper_forward, final=final, shares_sms=shared) for shared in (False, True)]
        # The bits of the results do not depend on the program that computes a work tile.
        assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
