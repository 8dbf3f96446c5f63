"""Tests of AttentionSpec and of the validation that the public calls have in common."""

import pytest
import torch

from ringattn import Layout, Mask
from ringattn.spec import (
    AttentionSpec,
    autocast,
    check_attention,
    check_choices,
    check_layout,
    resolve_scale,
)

OPTIONS = dict(
    group="",
    schedule="auto",
    transport="auto",
    scale=0.5,
    dropout_p=0.0,
    seed=7,
    first_head=0,
    backend="auto",
    precision="ieee",
)
Q, K = torch.zeros(2, 6, 4, 8), torch.zeros(2, 6, 2, 8)


def create(mask: Mask, layout: Layout, **changes: object) -> AttentionSpec:
    """The spec of a call with default options."""
    return AttentionSpec.create(mask, layout, **OPTIONS | changes)


def test_a_spec_carries_mask_and_layout_as_values() -> None:
    """A compiler can trace tensors, numbers and strings."""
    spec = create(Mask.causal(window=3, documents=[[2, 4], [6]]), Layout.zigzag(6, 1))
    assert spec.numbers.tolist() == [2, 4, 6]
    assert spec.mask == Mask.causal(window=3, documents=[[2, 4], [6]])
    assert (spec.before, spec.after) == (2, 0)
    assert (spec.layout, spec.seq_len, spec.ranks) == ("zigzag", 6, 1)
    assert create(Mask.full(), Layout.contiguous(6, 1)).mask == Mask.full()


def test_a_call_lists_everything_that_ranks_must_agree_on() -> None:
    """The seed matters only with dropout. The backend and "tf32" may differ between ranks, but FP8 changes the messages."""
    call = create(Mask.causal(), Layout.zigzag(6, 1)).as_call("forward", Q, K, K)
    assert (call["batch size"], call["heads"], call["key heads"], call["dtype"]) == (2, 4, 2, "torch.float32")
    assert call["window"] is None
    assert call["seed"] is None
    assert "backend" not in call
    assert create(Mask.causal(), Layout.zigzag(6, 1), dropout_p=0.1).as_call("forward", Q, K, K)["seed"] == 7
    other = create(Mask.causal(), Layout.zigzag(6, 1), dropout_p=0.1, first_head=4).as_call("forward", Q, K, K)
    assert call["first_head"] is None
    assert other["first_head"] == 4
    assert not call["FP8 forward"]
    assert create(Mask.causal(), Layout.zigzag(6, 1), precision="fp8").as_call("forward", Q, K, K)["FP8 forward"]


def test_count_pairs() -> None:
    """Batch entries with equal documents have equal counts. The queries may be only the last ones of the sequence."""
    layout = Layout.contiguous(6, 1)
    causal = create(Mask.causal(), layout)
    assert causal.count_pairs(3) == 3 * 21
    assert causal.count_pairs(1, num_queries=2) == 5 + 6
    assert create(Mask.full(), layout).count_pairs(1) == 36
    assert create(Mask.causal(window=2), layout).count_pairs(1) == 11
    assert create(Mask.causal(documents=[2, 4]), layout).count_pairs(1) == 3 + 10
    assert create(Mask.causal(documents=[[2, 4], [6]]), layout).count_pairs(2) == 13 + 21


def test_resolve_scale() -> None:
    """The default is D ** -0.5. A learnable scale would silently get no gradient, so it raises an error."""
    assert resolve_scale(Q, None) == 8**-0.5
    assert resolve_scale(Q, torch.tensor(0.25)) == 0.25
    with pytest.raises(ValueError, match=r"scale='0\.5': it must be a number"):
        resolve_scale(Q, "0.5")
    with pytest.raises(ValueError, match=r"scale=1\.0"):
        resolve_scale(Q, torch.ones((), requires_grad=True))


def test_autocast() -> None:
    """fp64 and integers keep their dtype, and nothing is cast outside of autocast."""
    assert autocast(Q, K) == (Q, K)
    with torch.autocast("cpu", torch.bfloat16):
        assert [x.dtype for x in autocast(Q, K.double(), K.int())] == [torch.bfloat16, torch.float64, torch.int32]


def test_check_layout() -> None:
    """The layout must be a Layout for as many ranks as the group has."""
    check_layout(Layout.zigzag(6, 2), 2)
    check_layout(Layout.zigzag(6, 2))
    with pytest.raises(ValueError, match=r"layout is a str.*Layout\.zigzag"):
        check_layout("zigzag")
    with pytest.raises(ValueError, match="2 ranks but the group has 3: "):
        check_layout(Layout.zigzag(6, 2), 3)
    with pytest.raises(ValueError, match=r"2 ranks but the group has 1 .group=None"):
        check_layout(Layout.zigzag(6, 2), 1)


def test_check_choices() -> None:
    """Names of schedules, routes and transports are compared with the known ones."""
    check_choices("kv", "relay", "p2p")
    for choices, message in (
        (("p2p", "auto", "auto"), "schedule 'p2p'.*auto, state, kv"),
        (("kv", "ring", "auto"), "route 'ring'.*auto, relay, direct"),
        (("kv", "auto", "kv"), "transport 'kv'.*auto, nvlink, p2p"),
        (("kv", "relay", "nvlink"), "'nvlink' does not relay.*'p2p'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_choices(*choices)


INVALID = {
    "no-mask": ({"mask": None}, "mask is a NoneType"),
    "three-key-heads": ({"k": torch.zeros(2, 6, 3, 8), "v": torch.zeros(2, 6, 3, 8)}, "4 query .* 3 key"),
    "zero-scale": ({"scale": 0.0}, "scale ?= ?0.0"),
    "infinite-scale": ({"scale": float("inf")}, "scale ?= ?inf"),
    "negative-dropout": ({"dropout_p": -0.1}, "dropout_p ?= ?-0.1"),
    "seed-of-65-bits": ({"dropout_p": 0.1, "seed": 2**64}, "seed ?= ?18446744073709551616"),
    "documents-of-another-length": ({"seq_len": 7, "mask": Mask.causal(documents=[6])}, "6 .* 7"),
    "documents-of-another-batch": ({"mask": Mask.causal(documents=[[6]] * 3)}, "3 batch"),
    "unknown-backend": ({"backend": "fast"}, "'fast'"),
    "list-as-backend": ({"backend": ["auto"]}, "backend=.'auto'.: it must be one of auto"),
    "boolean-as-seed": ({"seed": True}, "seed=True: it must be an integer"),
    "fp8-with-dropout": ({"precision": "fp8", "dropout_p": 0.1}, "'fp8' with dropout"),
    "fp8-without-kernel": ({"precision": "fp8", "backend": "hopper"}, "hopper.*'fp8' is unavailable.*do not run on cpu"),
    "unknown-precision": ({"precision": "fp4"}, "'fp4'.*ieee, tf32, fp8"),
}


@pytest.mark.parametrize(("changes", "message"), INVALID.values(), ids=INVALID)
def test_check_attention(changes: dict, message: str) -> None:
    """Every invalid argument raises an error that names its value."""
    arguments = dict(mask=Mask.causal(), seq_len=6, scale=0.5, dropout_p=0.0, seed=0, backend="auto", precision="ieee")
    tensors = {"q": Q, "k": K, "v": K} | {name: changes[name] for name in changes.keys() & set("qkv")}
    check_attention(Q, K, K, **arguments)
    with pytest.raises(ValueError, match=message):
        check_attention(**tensors, **arguments | {name: x for name, x in changes.items() if name not in tensors})
