"""Tests of the calls that compile the kernels of a ring."""

from collections import Counter

import pytest
import torch

from ringattn import Layout, Mask
from ringattn.compile_ahead import call_kernels
from ringattn.kernels import dispatch
from ringattn.planning.rank_plan import Plan
from tests.ringattn.rings import Case


def variants(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Return a list to which every call of a kernel appends what determines the kernel that Triton compiles."""
    found = []
    for name in ("forward", "backward"):
        module = dispatch._module("blockwise", name)
        original = getattr(module, name)

        def call(*arguments, name=name, original=original, **options):
            if name == "forward":
                state, final = (*arguments[5:], None, False)[:2]
                found.append((name, state is not None, final))
            else:
                # The first accumulator is dq. Only the Hopper kernels of a ring accumulate dq themselves.
                found.append((name, *(x is not None for x in (*arguments[9:], None, None)[:2]), options["grad_dtype"]))
            return original(*arguments, **options)

        monkeypatch.setattr(module, name, call)
    return found


@pytest.mark.parametrize("ranks", (1, 3))
def test_all_kernels_of_a_ring_are_called(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variants equal those of a KV ring whose transport connects all pairs of ranks."""
    found = variants(monkeypatch)
    layout, mask, case = Layout.zigzag(48 * ranks, ranks), Mask.causal(), Case.random(48 * ranks, dtype=torch.float32)
    case.on_ring(layout, mask, all_pairs=True, schedule="kv")
    expected = set(found)
    orders = []
    for first in range(ranks):
        found.clear()
        plan = Plan(mask, layout, 0, torch.device("cpu"), is_fixed=True)
        call_kernels(plan, *(layout.shard(x, 0) for x in (case.q, case.k, case.v)), "auto", first)
        assert set(found) == expected and max(Counter(found).values()) == 1
        orders.append(found[0])
    assert len(set(orders)) == ranks, "every rank begins with another kernel"
