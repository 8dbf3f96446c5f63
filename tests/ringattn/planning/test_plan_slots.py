"""Tests of plans with fixed schedules, whose masks and layouts can be replaced while a CUDA graph uses them."""

import itertools
import random

import pytest
import torch

from ringattn import Layout, Mask, balanced_layout, ring
from ringattn.planning import rank_plan
from ringattn.planning.cost_model import interconnect
from ringattn.planning.plan_slots import PlanSlots
from ringattn.planning.rank_plan import Plan, forced_plan, use_plans
from ringattn.planning.workload import backward_work, forward_work
from tests.covering import every_pair
from tests.ringattn.rings import MASK_NAMES, Case, assert_close, masks

CPU = torch.device("cpu")
SEQ_LEN = 4096


def request_tables(plan: Plan) -> list:
    """Request what the Hopper kernels request in both passes of a call, and return all intervals."""
    q = torch.empty(1, plan.layout.rows(plan.rank), 4, 64, dtype=torch.bfloat16, device="meta")
    found = []
    for work, results in ((forward_work(q, q, q), False), (backward_work(q, q, q), True)):
        name = plan.choose_schedule("auto", work, interconnect("nvlink"))
        for pair in plan.block_pairs(name, plan.schedule(name, results, all_pairs=True)).values():
            found.append(pair.intervals.transposed if results else pair.intervals)
            found[-1].work_tiles(128, 64, 1, 4, 1, 132, results, 1 if results else None)
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_slots_contain_the_plan_that_is_written(ranks: int) -> None:
    """Plans of other documents and layouts are written to the memory of a plan of one document."""
    rank, mask = ranks - 1, Mask.causal(documents=[SEQ_LEN])
    captured = Plan(mask, balanced_layout(mask, SEQ_LEN, ranks), rank, CPU, is_fixed=True)
    request_tables(captured)
    slots, layouts = PlanSlots(captured, CPU), set()
    for seed in range(8):
        generator = random.Random(seed)
        cuts = [0, *sorted(generator.sample(range(1, SEQ_LEN), 1 + seed * seed)), SEQ_LEN]
        mask = Mask.causal(documents=[end - start for start, end in itertools.pairwise(cuts)])
        layout = balanced_layout(mask, SEQ_LEN, ranks)
        layouts.add(layout.kind)
        slots.write(slots.pack(Plan(mask, layout, rank, CPU, is_fixed=True)))
        expected = request_tables(Plan(mask, layout, rank, CPU, is_fixed=True))
        for side, found in zip(expected, request_tables(slots.plan), strict=True):
            assert torch.equal(side.lo, found.lo)
            assert torch.equal(side.hi, found.hi)
            for key, table in side._tables.items():
                assert torch.equal(table, found._tables[key][: table.shape[0], : table.shape[1]])
                assert table.sum() == found._tables[key].sum()
    assert len(layouts) > 1 or ranks == 1


def test_all_fixed_plans_have_the_same_schedules() -> None:
    """The messages and the local steps do not depend on the mask. They cover all rows, also those that the mask excludes."""
    schedules = []
    for mask in (Mask.causal(), Mask.causal(documents=[5] * 12), Mask.full(window=3)):
        plan = Plan(mask, Layout.contiguous(60, 3), 0, CPU, is_fixed=True)
        schedules.append([plan.schedule(name, True, all_pairs).steps for name in ("kv", "state") for all_pairs in (0, 1)])
        assert {rows for *_, rows in (x for step in schedules[-1][0][1:-1] for x in step.local_steps)} == {range(20)}
    assert schedules[0] == schedules[1] == schedules[2]


@every_pair(mask=MASK_NAMES, schedule=("state", "kv"), all_pairs=(False, True), ranks=(2, 3))
def test_rings_with_fixed_plans_equal_one_rank(mask: str, schedule: str, all_pairs: bool, ranks: int) -> None:
    """On a contiguous layout, some pairs of ranks have nothing to compute, but exchange their blocks anyway."""
    case, mask, layout = Case.random(96), masks(96)[mask], Layout.contiguous(96, ranks)
    with pytest.MonkeyPatch.context() as patch:
        # Every simulated rank needs a plan of its own, whereas `use_plans` applies to all threads.
        patch.setattr(ring, "_cached_plan", lambda *key: Plan(mask, layout, key[-2], key[-1], is_fixed=True))
        got = case.on_ring(layout, mask, all_pairs, schedule=schedule)
    assert_close(got, case.unsharded(mask), 1e-10)


def test_calls_use_the_plan_of_the_context() -> None:
    """The plans have documents, and the masks of the calls do not. A call uses the plan that has its window."""
    case, layout = Case.random(24), Layout.contiguous(24, 1)
    masks = [Mask.causal(window, [10, 14]) for window in (3, None)]
    plans = [Plan(mask, layout, 0, CPU) for mask in masks]
    with use_plans(plans):
        got = [case.on_ring(layout, Mask.causal(window)) for window in (3, None)]
    for result, mask in zip(got, masks, strict=True):
        assert_close(result, case.unsharded(mask), 1e-10)
    assert forced_plan(masks[0].reach) is None
    with pytest.raises(KeyError, match="9"), use_plans(plans):
        forced_plan((9, 0))
    assert rank_plan.forced_plan(masks[0].reach) is None
