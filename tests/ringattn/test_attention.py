"""Tests of the arguments of `ring_attention` and `plan_ahead`: what is validated, and what a prepared plan changes."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ringattn import Layout, Mask, plan_ahead, ring_attention, simulate
from ringattn.planning import rank_plan
from tests.ringattn.rings import Case, assert_close

CPU = torch.device("cpu")


def call(**changes: object) -> torch.Tensor:
    """Call ring_attention on one rank with 8 tokens, 4 query heads and 2 key heads, with changed arguments."""
    case = Case.random(seq_len=8)
    arguments = {"q": case.q, "k": case.k, "v": case.v, "layout": Layout.contiguous(8, 1), "mask": Mask.causal()} | changes
    return ring_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


# For each mistake: the changed arguments, and a part of the message.
INVALID = {
    "ring-of-another-size": ({"layout": Layout.contiguous(8, 2)}, "for 2 ranks but the group has 1 .*this process alone"),
    "tokens-of-another-shard": (
        {"layout": Layout.contiguous(9, 1)},
        "q has 8 .* k has 8, but rank 0 holds 9: use layout.shard",
    ),
    "heads-before-tokens": (
        {"q": torch.zeros(1, 4, 8, 16), "k": torch.zeros(1, 2, 8, 16), "v": torch.zeros(1, 2, 8, 16)},
        r"q is \(1, 4, 8, 16\), and rank 0 holds 8 tokens: pass \(batch, tokens, heads, head dim\), which is x.transpose",
    ),
    "fewer-keys-than-queries": ({"k": torch.zeros(1, 7, 2, 8).double(), "v": torch.zeros(1, 7, 2, 8).double()}, "8 .* 7"),
    "heads-that-do-not-divide": ({"k": torch.zeros(1, 8, 3, 8), "v": torch.zeros(1, 8, 3, 8)}, "4 query heads .* 3 key heads"),
    "three-dimensions": ({"q": torch.zeros(8, 4, 8)}, "3, 4, 4 dimensions"),
    "another-head-dim": ({"q": torch.zeros(1, 8, 4, 16)}, "(1, 8, 4, 16)"),
    "another-dtype": ({"q": torch.zeros(1, 8, 4, 8)}, "torch.float32.*torch.float64"),
    "integers": (dict.fromkeys("qkv", torch.zeros(1, 8, 4, 8, dtype=torch.int64)), "torch.int64"),
    "negative-scale": ({"scale": -0.5}, "scale ?= ?-0.5"),
    "scale-with-gradient": ({"scale": torch.ones((), requires_grad=True)}, "scale requires a gradient.*scale=1.0"),
    "dropout-of-one": ({"dropout_p": 1.0}, "dropout_p ?= ?1.0"),
    "no-seed": ({"seed": None}, "seed ?= ?None"),
    "negative-first-head": ({"first_head": -1}, "first_head=-1"),
    "mesh-instead-of-group": ({"group": SimpleNamespace(get_group=None)}, "SimpleNamespace.*mesh.get_group"),
    "group-without-this-rank": ({"group": dist.GroupMember.NON_GROUP_MEMBER}, "group is a .*contains this rank"),
    "unknown-precision": ({"precision": "half"}, "unknown precision 'half'"),
    "unknown-schedule": ({"schedule": "star"}, "unknown schedule 'star'.*auto, state, kv"),
    "unknown-transport": ({"transport": "pigeon"}, "unknown transport 'pigeon'.*auto, nvlink, p2p"),
    "unknown-backend": ({"backend": "cuda"}, "'cuda'"),
    "head-dim-without-kernel": (dict.fromkeys("qkv", torch.zeros(1, 8, 4, 300)) | {"backend": "triton"}, "300"),
    "dtype-without-kernel": ({"backend": "triton"}, "torch.float64"),
    "documents-of-another-length": ({"mask": Mask.causal(documents=[3, 4])}, "documents .* 7 .* 8"),
    "documents-of-another-batch": ({"mask": Mask.causal(documents=[[8]] * 3)}, "documents for 3 batch"),
    "no-mask": ({"mask": None}, "mask is a NoneType.*ringattn.Mask"),
    "name-instead-of-mask": ({"mask": "causal"}, "mask is a str.*ringattn.Mask"),
    "tensor-instead-of-mask": ({"mask": torch.ones(8, 8, dtype=torch.bool)}, "mask is a Tensor.*ringattn.Mask"),
    "name-instead-of-layout": ({"layout": "zigzag"}, "layout is a str.*ringattn.Layout"),
}


@pytest.mark.parametrize(("changes", "message"), INVALID.values(), ids=INVALID)
def test_invalid_arguments_raise_an_error(changes: dict, message: str) -> None:
    """The message names the value that was given, and what to do."""
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_autocast_casts_the_inputs() -> None:
    """Casts equal those of torch's attention. fp64 stays fp64."""
    inputs = {name: getattr(Case.random(seq_len=8), name).float() for name in "qkv"}
    expected = call(**{name: x.bfloat16() for name, x in inputs.items()})
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(**inputs), expected)
        assert call().dtype == torch.float64


def test_first_head_selects_the_dropout_of_its_heads() -> None:
    """Two calls with half of the heads drop the same entries as one call with all heads."""
    case, options = Case.random(seq_len=8), {"dropout_p": 0.4, "seed": 3}
    halves = [
        call(
            q=case.q[:, :, 2 * i : 2 * i + 2], k=case.k[:, :, i : i + 1], v=case.v[:, :, i : i + 1], first_head=2 * i, **options
        )
        for i in range(2)
    ]
    torch.testing.assert_close(torch.cat(halves, 2), call(**options))


def test_a_prepared_plan_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """After plan_ahead, a call under the new mask computes no intervals and no schedule."""
    case, layout = Case.random(seq_len=24), Layout.zigzag(24, 2)
    first, second = Mask.causal(documents=[20, 4]), Mask.causal(documents=[4, 20])

    def prepare(rank: int, group: object) -> None:
        case.on_rank(layout, first, rank, group)
        plan_ahead(second, layout, (first, layout), group=group, device=CPU)

    simulate(2, prepare)
    monkeypatch.setattr(rank_plan, "build_schedule", None)
    monkeypatch.setattr(rank_plan.Intervals, "of", None)
    results = case.on_ring(layout, second)
    monkeypatch.undo()
    assert_close(results, case.unsharded(second), 1e-10)


def test_invalid_arguments_of_plan_ahead_raise_an_error() -> None:
    """The masks and layouts must belong to the ring of the group."""
    layout = Layout.zigzag(4, 1)
    earlier = Mask.causal(), layout
    invalid = {
        "3 .* 4": (Mask.causal(documents=[3]), layout),
        "for 2 ranks but the group has 1": (Mask.causal(), Layout.zigzag(4, 2)),
        "pass layout.whole": (Mask.causal(), layout.split(2)),
    }
    for message, (mask, layout) in invalid.items():
        with pytest.raises(ValueError, match=message):
            plan_ahead(mask, layout, earlier, group=None, device=CPU)
