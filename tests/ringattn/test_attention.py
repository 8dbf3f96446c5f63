"""The ring against one rank: outputs and every gradient, on a simulated ring of up to 64 ranks."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ringattn import Layout, Mask, flash_attention, plan_ahead, ring_attention, simulate, ulysses_attention
from ringattn.comm.watchdog import TIMEOUT, Watchdog
from ringattn.kernels.interval_mask import Intervals
from ringattn.layout import KINDS
from ringattn.planning import workload
from ringattn.ring import Ring
from tests.ringattn.rings import MASK_NAMES, Case, assert_close, masks, relative_errors

RANKS = (1, 2, 3, 4, 8)
SCHEDULES = ("state", "kv")


links = pytest.mark.parametrize("all_pairs", (False, True), ids=("relay", "direct"))


RINGS = [(ranks, False) for ranks in RANKS] + [(ranks, True) for ranks in RANKS if ranks > 1]
# on 64 ranks, which take seconds, every layout meets every mask, and both of them both schedules; directly linked they are in
# `test_error_does_not_grow_with_the_ring`
MANY = [(layout, mask, SCHEDULES[(i + j) % 2]) for i, layout in enumerate(KINDS) for j, mask in enumerate(MASK_NAMES)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mask", MASK_NAMES)
@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("ranks, all_pairs", RINGS, ids=[f"P{n}-{('relay', 'direct')[direct]}" for n, direct in RINGS])
def test_sharded_equals_unsharded_in_float64(ranks: int, layout: str, mask: str, schedule: str, all_pairs: bool) -> None:
    """101 rows divide by none of the ring sizes; grouped heads."""
    case = Case.random(seq_len=101)
    mask = masks(101)[mask]
    got = case.on_ring(Layout(layout, 101, ranks), mask, all_pairs, schedule=schedule, backend="reference")
    assert_close(got, case.unsharded(mask), 1e-10)


@pytest.mark.parametrize("layout, mask, schedule", MANY)
def test_64_ranks_in_float64(layout: str, mask: str, schedule: str) -> None:
    test_sharded_equals_unsharded_in_float64(64, layout, mask, schedule, all_pairs=False)


@links
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mask", MASK_NAMES)
@pytest.mark.parametrize("layout", KINDS)
def test_ranks_that_hold_no_row(layout: str, mask: str, schedule: str, all_pairs: bool) -> None:
    case = Case.random(seq_len=9)
    mask = masks(9)[mask]
    got = case.on_ring(Layout(layout, 9, 16), mask, all_pairs, schedule=schedule, backend="reference")
    assert_close(got, case.unsharded(mask), 1e-10)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mask", MASK_NAMES)
@pytest.mark.parametrize("layout", KINDS)
def test_sharded_equals_float64_in_fp32(layout: str, mask: str, schedule: str) -> None:
    case = Case.random(seq_len=203, dim=16, value_dim=16)
    mask = masks(203)[mask]
    got = case.to(torch.float32).on_ring(Layout(layout, 203, 4), mask, schedule=schedule)
    assert_close(got, case.unsharded(mask), 1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("layout", "mask"),
    [("zigzag", mask) for mask in MASK_NAMES]
    + [("contiguous", "window+documents"), ("striped", "causal"), ("striped", "window")],
)
def test_triton_kernels_on_the_ring(layout: str, mask: str, schedule: str, device: torch.device) -> None:
    case = Case.random(seq_len=50, heads=2, key_heads=1, dim=16, value_dim=16)
    mask = masks(50)[mask]
    ring_case = case.to(torch.float32).to(device)
    got = ring_case.on_ring(Layout(layout, 50, 3), mask, schedule=schedule, backend="triton")
    assert_close([x.cpu() for x in got], case.unsharded(mask), 1e-5)


@links
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", KINDS)
def test_shapes_of_users(layout: str, schedule: str, all_pairs: bool) -> None:
    """A batch whose rows have their own documents, one that spans three ranks; a value dim of its own; full attention."""
    case = Case.random(seq_len=48, batch=2, heads=6, key_heads=3, dim=8, value_dim=5)
    mask = Mask.full(documents=[[1] * 6 + [20, 22], [48]])
    got = case.on_ring(Layout(layout, 48, 5), mask, all_pairs, schedule=schedule, backend="blockwise", scale=0.7)
    layout_1 = Layout.contiguous(48, 1)
    assert_close(got, case.on_rank(layout_1, mask, 0, None, backend="reference", scale=0.7), 1e-10)


@links
@pytest.mark.parametrize("mask", (Mask.causal(), Mask.full()), ids=("causal", "full"))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_error_does_not_grow_with_the_ring(schedule: str, mask: Mask, all_pairs: bool) -> None:
    """The fp32 error against float64, over the whole tensor, at P = 64 is at most 1.2 times that at P = 1."""
    case = Case.random(seq_len=1024, dim=32, value_dim=32)
    exact = case.unsharded(mask, backend="blockwise")
    errors = {}
    for ranks in (1, 64):
        got = case.to(torch.float32).on_ring(Layout.zigzag(1024, ranks), mask, all_pairs, schedule=schedule)
        errors[ranks] = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, exact, strict=True)]
    assert all(many <= 1.2 * one for one, many in zip(errors[1], errors[64], strict=True)), errors


def test_a_dropped_hop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison used here fails when a single visit of a ring of four is left out."""
    from ringattn import ring

    honest = ring.dispatch.forward
    calls = []

    def forgetful(q, k, v, intervals, *rest, **options):
        calls.append(1)
        if len(calls) == 3:
            intervals = Intervals.of(intervals.host[0], intervals.host[0], intervals.num_keys)
        return honest(q, k, v, intervals, *rest, **options)

    monkeypatch.setattr(ring.dispatch, "forward", forgetful)
    case = Case.random(seq_len=101)
    got = case.on_ring(Layout.zigzag(101, 4), Mask.causal(), schedule="kv", backend="reference")
    monkeypatch.undo()
    assert relative_errors(got, case.unsharded(Mask.causal()))["out"] > 1e-3


@links
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", KINDS)
@pytest.mark.parametrize("ranks", (1, 2, 5), ids=lambda n: f"P{n}")
def test_dropout_is_the_same_on_any_ring(ranks: int, layout: str, schedule: str, all_pairs: bool) -> None:
    """Output and gradients equal those of one rank, which are held to a written-out mask: so the mask is the same."""
    case = Case.random(seq_len=60, batch=2)
    options = {"dropout_p": 0.2, "seed": 11}
    got = case.on_ring(Layout(layout, 60, ranks), Mask.causal(), all_pairs, schedule=schedule, backend="blockwise", **options)
    expected = case.on_rank(Layout.contiguous(60, 1), Mask.causal(), 0, None, backend="reference", **options)
    assert_close(got, expected, 1e-10)
    assert relative_errors(got, case.unsharded(Mask.causal()))["out"] > 0.1


@pytest.mark.parametrize("schedule", ("state", "kv"))
@pytest.mark.parametrize("heads, key_heads, passes", [(4, 4, 4), (8, 2, 2), (3, 1, 1)], ids=str)
def test_few_heads_at_a_time(heads, key_heads, passes, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long call in several passes gives what one pass gives, dropout included."""
    case, layout, seen = Case.random(seq_len=22, heads=heads, key_heads=key_heads), Layout.zigzag(22, 2), []
    options = {"schedule": schedule, "backend": "reference", "dropout_p": 0.4, "seed": 5}
    whole = case.on_ring(layout, Mask.causal(), **options)
    monkeypatch.setattr(workload, "HEAD_CHUNK_FLOPS", 1.0)
    forward = getattr(Ring, f"_forward_{schedule}")
    monkeypatch.setattr(Ring, forward.__name__, lambda self, q, *rest: seen.append(q.shape[2]) or forward(self, q, *rest))
    assert_close(case.on_ring(layout, Mask.causal(), **options), whole, 1e-12)
    assert seen == [heads // passes] * passes * layout.ranks


@links
def test_same_bits_every_time(all_pairs: bool) -> None:
    case = Case.random(seq_len=101, dtype=torch.float32)
    first, second = (case.on_ring(Layout.zigzag(101, 4), Mask.causal(), all_pairs, schedule="state") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_a_query_that_sees_nothing_on_this_rank_is_still_exact() -> None:
    """A window of 1: every token sees itself alone, so out = v and dv = dout."""
    case = Case.random(seq_len=20, heads=2)
    out, _, dq, _, dv = case.on_ring(Layout.striped(20, 3), Mask.causal(window=1))
    assert torch.allclose(out, case.v, atol=1e-12)
    assert torch.allclose(dv, case.dout, atol=1e-12)


def _call(ranks: int = 1, group=None, seq_len: int = 8, **changes) -> None:
    case = Case.random(seq_len=seq_len)
    layout = Layout.contiguous(seq_len, ranks)
    q, k, v = (layout.shard(x, 0) for x in (case.q, case.k, case.v))
    arguments = {"q": q, "k": k, "v": v, "layout": layout, "mask": Mask.causal(), "group": group} | changes
    ring_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


REFUSED = {
    "ring-of-another-size": ({"ranks": 2}, "for 2 ranks but the group has 1 \\(group=None is this process alone\\)"),
    "rows-of-another-shard": ({"layout": Layout.contiguous(9, 1)}, "rank 0 has 8 rows but its shard has 9"),
    "heads-that-do-not-divide": (
        {"k": torch.zeros(1, 8, 3, 8), "v": torch.zeros(1, 8, 3, 8)},
        "4 query heads .* 3 key heads",
    ),
    "three-dimensions": ({"q": torch.zeros(8, 4, 8)}, "3, 4, 4 dimensions"),
    "another-head-dim": ({"q": torch.zeros(1, 8, 4, 16)}, "give q .B, N, Hq, D."),
    "another-dtype": ({"q": torch.zeros(1, 8, 4, 8)}, "give one dtype and device"),
    "negative-scale": ({"scale": -0.5}, "scale ?= ?-0.5"),
    "dropout-of-one": ({"dropout_p": 1.0}, "dropout_p ?= ?1.0"),
    "no-seed": ({"seed": None}, "seed ?= ?None"),
    "a-mesh-for-a-group": ({"group": SimpleNamespace(get_group=None)}, "group is a SimpleNamespace: give a .*mesh.get_group"),
    "not-in-the-group": ({"group": dist.GroupMember.NON_GROUP_MEMBER}, "group is a .*ProcessGroup that this rank is in"),
    "unknown-precision": ({"precision": "half"}, "unknown precision 'half'"),
    "unknown-schedule": ({"schedule": "star"}, "unknown schedule 'star'"),
    "unknown-transport": ({"transport": "pigeon"}, "unknown transport 'pigeon'"),
    "unknown-backend": ({"backend": "cuda"}, "unknown kernel backend 'cuda'"),
    "head-dim-of-no-kernel": (dict.fromkeys("qkv", torch.zeros(1, 8, 4, 300)) | {"backend": "triton"}, "head dims 300 and 300"),
    "integers": (dict.fromkeys("qkv", torch.zeros(1, 8, 4, 8, dtype=torch.int64)), "q, k, v are torch.int64"),
    "backend-without-the-dtype": ({"backend": "triton"}, "Triton kernels have no torch.float64"),
    "documents-of-another-length": ({"mask": Mask.causal(documents=[3, 4])}, "documents sum to 7 tokens"),
    "documents-of-another-batch": ({"mask": Mask.causal(documents=[[8]] * 3)}, "documents for 3 batch rows"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_contradictions_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(**changes)


def test_a_rank_that_ends_early_ends_the_simulation() -> None:
    def rank_1_does_nothing(rank: int, group) -> None:
        if rank != 1:
            _call(ranks=3, group=group, seq_len=9)

    with pytest.raises(RuntimeError, match="rank 1 of the simulated ring failed, or ended without what rank . waits for"):
        simulate(3, rank_1_does_nothing)


@pytest.mark.parametrize("kind", (RuntimeError, SystemExit), ids=lambda kind: kind.__name__)
def test_a_failing_rank_ends_the_simulation(kind: type[BaseException]) -> None:
    def rank_1_fails(rank: int, group) -> None:
        if rank == 1:
            raise kind("rank 1 is out")
        _call(ranks=3, group=group, seq_len=9)

    with pytest.raises(kind, match="rank 1 is out"):
        simulate(3, rank_1_fails)


def test_patience_may_change_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from job to job of a sweep, whose rings are of the same processes."""
    monkeypatch.setenv(TIMEOUT, "600")
    dog = Watchdog(dist.HashStore(), rank=0, size=2, device=torch.device("cpu"))
    dog.stop()
    hop = dog.start("forward", 0, 1, ())
    dog._progress = (0, hop.since)
    assert dog._overdue_hop() is None
    monkeypatch.setenv(TIMEOUT, "1e-9")
    assert dog._overdue_hop() is hop


def test_a_pass_that_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the watchdog would end a process that has caught the error."""
    watchdog = Watchdog(dist.HashStore(), rank=0, size=2, device=torch.device("cpu"))
    watchdog.stop()

    def fail(*_args, **_options) -> None:
        raise MemoryError("no room")

    def caught(rank: int, group) -> None:
        group.watchdog = watchdog
        with pytest.raises(MemoryError, match="no room"):
            _call(ranks=2, group=group)

    monkeypatch.setattr("ringattn.kernels.dispatch.forward", fail)
    simulate(2, lambda rank, group: caught(rank, group) if rank == 0 else None)
    assert watchdog.issued == 1 and not watchdog.in_flight


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_partial_results_of_16_bit_inputs_are_not_rounded(schedule: str) -> None:
    case = Case.random(seq_len=256, dtype=torch.bfloat16)
    exact = case.to(torch.float64).unsharded(Mask.causal())
    errors = {}
    for ranks in (1, 8):
        got = case.on_ring(Layout.zigzag(256, ranks), Mask.causal(), schedule=schedule)
        errors[ranks] = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, exact, strict=True)]
    assert all(many <= 1.1 * one + 1e-6 for one, many in zip(errors[1], errors[8], strict=True)), errors


def test_what_is_no_mask_or_layout_is_refused() -> None:
    x, layout = torch.randn(1, 4, 2, 8), Layout.zigzag(4, 1)
    for wrong in (None, True, "causal", torch.ones(4, 4, dtype=torch.bool)):
        with pytest.raises(ValueError, match=f"mask is a {type(wrong).__name__}: give a ringattn.Mask"):
            ring_attention(x, x, x, layout=layout, mask=wrong)
    for call in (ring_attention, ulysses_attention):
        with pytest.raises(ValueError, match="layout is a str: give a ringattn.Layout"):
            call(x, x, x, layout="zigzag", mask=Mask.causal())
    mask, earlier = Mask.causal(documents=[3]), (Mask.causal(), layout)
    with pytest.raises(ValueError, match="documents sum to 3 tokens but the sequence has 4"):
        plan_ahead(mask, layout, earlier, group=None, device=torch.device("cpu"))
    for wrong, message in ((Layout.zigzag(4, 2), "for 2 ranks but the group has 1"), (layout.split(2), "give layout.whole")):
        with pytest.raises(ValueError, match=message):
            plan_ahead(Mask.causal(), wrong, earlier, group=None, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="scale requires a gradient"):
        flash_attention(x, x, x, scale=torch.ones((), requires_grad=True))
    with pytest.raises(ValueError, match="blocks is a Tensor: give a ringattn.BlockMask"):
        flash_attention(x, x, x, blocks=torch.ones(1))
