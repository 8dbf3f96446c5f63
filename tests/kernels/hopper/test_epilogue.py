"""How the Hopper forward keeps states in shared memory, and how it merges them."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from ringattn.kernels import reference
from ringattn.kernels.hopper import common as hopper_common
from ringattn.kernels.hopper import epilogue, epilogue_wide
from ringattn.kernels.hopper import forward as hopper_forward
from ringattn.kernels.interval_mask import Intervals
from tests.kernels import gluon_emulator
from tests.kernels.compare import TOLERANCE, assert_states_close
from tests.kernels.contract import check_chain
from tests.kernels.hopper.conftest import DIMS, DTYPES
from tests.kernels.masks import MASKS, intervals_of
from tests.kernels.problems import make_problem

ROWS = hopper_forward.ROWS.value
CONFIGS = [
    hopper_forward.configure((dim, dim), (4, 2), dtype, has_state, final, few_rows)
    for dim, dtype, has_state, final, few_rows in product((64, 128), DTYPES, (False, True), (False, True), (False, True))
]


@pytest.mark.parametrize("config", [x for x in CONFIGS if x.state_stages], ids=str)
def test_state_stages_hold_the_o_of_all_consumers(config):
    """Every part of every o has a buffer of its own, and the producer and the consumers agree on which buffer that is."""
    buffer_bytes, part_bytes = config.keys * config.dim * 2, ROWS * config.dim * 4 // config.o_parts
    assert part_bytes == buffer_bytes
    # The producer numbers the buffers K, V, K, V, and so on, see `transfer_buffer`.
    transferred = {
        (number // config.o_parts, number % config.o_parts): (number // 2, "KV"[number % 2])
        for number in range(2 * config.state_stages)
    }
    for consumer in range(config.consumers):
        # `_wait_for_state_stages` uses this stage, and `_state_views` uses this buffer.
        stage = consumer * config.o_parts // 2
        buffers = "KV" if config.o_parts == 2 else "KV"[consumer % 2]
        assert [transferred[consumer, part] for part in range(config.o_parts)] == [(stage, buffer) for buffer in buffers]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_next_work_tile_has_stages_while_states_occupy_some(config):
    assert config.state_stages == 0 or config.stages - config.state_stages >= 3 - config.q_slots
    # The limit of sm_90 is 227 KiB per program. Barriers and flags need less than 1 KiB.
    in_use = 2 * config.dim * (config.q_slots * config.queries + 2 * config.stages * config.keys)
    assert in_use <= 226 * 1024


@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
@pytest.mark.parametrize("has_state", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("module", [epilogue, epilogue_wide], ids=["narrow", "wide"])
def test_end_of_a_work_tile_in_the_emulator(module, has_state, final):
    """Without a GPU, the source of the epilogue runs in an emulator. The work tile has 50 of the 64 rows of a consumer."""
    rows, dim, generator = 50, 16, torch.Generator().manual_seed(0)

    def random_state(empty_row: int) -> list[torch.Tensor]:
        m, l, o = (torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64) for shape in ((), (), (dim,)))
        m[empty_row], l[empty_row], o[empty_row] = float("-inf"), 0, 0
        return [4 * m, l.abs(), o]

    result, incoming = random_state(empty_row=0), random_state(empty_row=1)
    expected = reference.merge(result, incoming) if has_state else result
    if final:
        expected = reference.finalize(expected, torch.float64)[::-1]

    config = dict(dim=dim, value_dim=dim, num_heads=1, o_parts=1, output_layout=None, scores_layout=None, update_ref_max=True)
    config |= dict(heads_per_row=1)
    config |= dict(has_state=has_state, final=final, updates_state=has_state and not final)
    config = SimpleNamespace(**config)
    run = SimpleNamespace(**gluon_emulator.source_functions([hopper_common, epilogue, module]))
    written = [*(x.clone() for x in incoming), torch.zeros(ROWS), torch.zeros(ROWS, dim)]
    state_m, state_l, state_o, lse, out = (gluon_emulator.Pointer(x) for x in written)
    results = (state_m, state_l, state_o, None, lse, out, None, ROWS)
    row_range = torch.tensor(0), 0, 0, rows
    ref_max, l, o = (result[0] * run.LOG2_E).clamp(min=run.UNSET_REF_MAX), result[1].clone(), result[2].clone()
    # Shared memory contains Q, and then the incoming o, which is in one of the two buffers of the consumer.
    shared = [gluon_emulator.Shared(x.clone()) for x in (o, incoming[2], incoming[2])]
    only_narrow = ((shared[0], shared[1:]), (0,)) if module is epilogue else ((), ())
    scalars = run.load_state_scalars(results, row_range, config)
    run.finish_work_tile(ref_max, l, o, *only_narrow[0], scalars, results, row_range, *only_narrow[1], True, config)
    found = written[3:] if final else written[:3]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x[:rows], y[:rows].to(x.dtype), rtol=1e-6, atol=1e-6)
    for x, y in zip(written, [*incoming, torch.zeros(ROWS), torch.zeros(ROWS, dim)], strict=True):
        assert torch.equal(x[rows:], y[rows:]), "rows of other work tiles are not written"


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
@pytest.mark.parametrize("mask", MASKS)
def test_chain_over_pieces_of_the_keys(mask, final, dtype, dims, hopper):
    problem = make_problem(*intervals_of(mask, 290, 410), 410, dtype, dims=dims, device=hopper)
    check_chain(problem, [0, 17, 160, 161, 410], final, hopper_forward)


def test_rows_that_see_no_key_keep_their_state(hopper):
    """An in-place update skips work tiles of such rows. Here, it skips all work tiles."""
    no_keys = Intervals.of(*torch.zeros(2, 1, 300, dtype=torch.int32), 200, hopper)
    problem = make_problem(*intervals_of("causal", 300, 200), 200, torch.float16, dims=(64, 64), device=hopper)
    state = problem.forward(hopper_forward)
    before = [x.clone() for x in state]
    after = hopper_forward.forward(problem.q, problem.k, problem.v, no_keys, problem.scale, state=state)
    assert all(torch.equal(x, y) for x, y in zip(after, before, strict=True))


@pytest.mark.parametrize("dims", DIMS, indirect=True)
def test_a_state_that_tma_cannot_address_is_updated_in_place(dims, hopper):
    """The o of this state begins four bytes after the beginning of its memory."""
    problem = make_problem(*intervals_of("full", 300, 200), 200, torch.bfloat16, dims=dims, device=hopper)
    m, l, o = problem.forward(hopper_forward)
    unaligned = torch.empty(o.numel() + 1, device=hopper)[1:].view_as(o).copy_(o)
    expected = m.clone(), 2 * l, 2 * o
    state = hopper_forward.forward(
        problem.q, problem.k, problem.v, problem.intervals, problem.scale, state=(m, l, unaligned)
    )  # fmt: skip
    assert state[2] is unaligned
    assert_states_close(state, expected, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("final", [False, True], ids=["state", "final"])
def test_a_state_that_is_far_ahead(final, dtype, dims, hopper):
    """The reference max starts with the m of the state, and the scores of later keys are far below it."""
    problem = make_problem(*intervals_of("causal", 450, 450), 450, dtype, 2, (4, 2), dims, hopper)
    problem.k[:, :70] *= 60
    check_chain(problem, [0, 64, 210, 450], final, hopper_forward, TOLERANCE[dtype], 1e-3)


@pytest.mark.parametrize("dims", DIMS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_m_that_stays_keeps_its_bits(dtype, dims, hopper):
    """Otherwise, the m of a state would drift from hop to hop."""
    problem = make_problem(*intervals_of("causal", 450, 450), 450, dtype, dims=dims, device=hopper)
    problem.q *= 10
    state = problem.forward(hopper_forward)
    m = state[0].clone()
    for _ in range(3):
        state = problem.forward(hopper_forward, state=state)
    assert torch.equal(state[0], m)


@pytest.mark.parametrize("dims", [(96, 8), (128, 64), (16, 96), (64, 24), (160, 72), (136, 248), (64, 256), (256, 40)], ids=str)
def test_states_of_values_of_another_width(dims, hopper):
    """Columns beyond the width of the state are neither read nor written."""
    problem = make_problem(*intervals_of("causal", 300, 300), 300, torch.bfloat16, 2, (4, 2), dims, hopper)
    for final in (False, True):
        check_chain(problem, [0, 64, 210, 300], final, hopper_forward)
