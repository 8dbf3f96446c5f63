"""Tests of the ring passes: outputs and every gradient on simulated rings of up to 64 ranks equal those of one rank."""

import pytest
import torch

from ringattn import Layout, Mask, flash_attention, ring, ring_attention, simulate
from ringattn.comm.simulated import SimulatedRank
from ringattn.comm.transport import Addressed, Wait
from ringattn.kernels.interval_mask import Intervals
from ringattn.layout import KINDS
from ringattn.planning import workload
from ringattn.planning.rank_plan import get_plan
from ringattn.planning.workload import forward_work
from ringattn.ring import Ring
from tests.covering import every_pair, pairs
from tests.ringattn.rings import ALL_MASK_NAMES, MASK_NAMES, Case, assert_close, masks, relative_errors, unshard_results

SCHEDULES = ("state", "kv")
ROUTES = ("relayed", "direct")
HEADS = ("4/2", "3/3", "4/1")  # query heads / key heads
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


def check_ring(
    ranks: int, mask: str, layout: str, schedule: str, route: str, dtype: torch.dtype, heads: str, seq_len: int, **options
) -> None:
    """Compare a simulated ring with one rank in fp64. Dropping one key would change a row by more than 1e-3."""
    num_heads, key_heads = map(int, heads.split("/"))
    case = Case.random(seq_len, heads=num_heads, key_heads=key_heads)
    mask = masks(seq_len)[mask]
    got = case.to(dtype).on_ring(Layout(layout, seq_len, ranks), mask, route == "direct", schedule=schedule, **options)
    assert_close(got, case.unsharded(mask), TOLERANCES[dtype])


@every_pair(
    ranks=(1, 2, 3, 4, 8),
    mask=ALL_MASK_NAMES,
    layout=KINDS,
    schedule=SCHEDULES,
    route=ROUTES,
    dtype=tuple(TOLERANCES),
    heads=HEADS,
)
def test_ring_equals_one_rank(
    ranks: int, mask: str, layout: str, schedule: str, route: str, dtype: torch.dtype, heads: str
) -> None:
    """101 tokens cannot be divided evenly among the ranks of any of these rings."""
    check_ring(ranks, mask, layout, schedule, route, dtype, heads, seq_len=101)


@every_pair(mask=ALL_MASK_NAMES, layout=KINDS, schedule=SCHEDULES, route=ROUTES)
def test_ranks_without_tokens(mask: str, layout: str, schedule: str, route: str) -> None:
    """9 tokens on 16 ranks: some ranks hold no token, but relay the blocks of others."""
    check_ring(16, mask, layout, schedule, route, torch.float64, "4/2", seq_len=9, backend="reference")


QUICK_64_RANKS = ("window+documents", "striped", "kv")


@pytest.mark.parametrize(
    ("mask", "layout", "schedule"),
    [
        pytest.param(*case, marks=() if case == QUICK_64_RANKS else pytest.mark.slow)
        for case in {QUICK_64_RANKS: None} | dict.fromkeys(pairs(mask=MASK_NAMES, layout=KINDS, schedule=SCHEDULES))
    ],
)
def test_64_ranks(mask: str, layout: str, schedule: str) -> None:
    """A large ring has many more hops than tokens per rank."""
    check_ring(64, mask, layout, schedule, "relayed", torch.float64, "4/2", seq_len=101, backend="reference")


TRITON = [("zigzag", mask) for mask in MASK_NAMES]
TRITON += [("contiguous", "window+documents"), ("striped", "causal"), ("striped", "window")]
QUICK_TRITON = {("zigzag", "causal", "state"), ("striped", "window", "kv")}


@pytest.mark.parametrize(
    ("layout", "mask", "schedule"),
    [
        pytest.param(*case, schedule, marks=() if (*case, schedule) in QUICK_TRITON else pytest.mark.slow)
        for case in TRITON
        for schedule in SCHEDULES
    ],
)
def test_triton_kernels_on_a_ring(layout: str, mask: str, schedule: str, device: torch.device) -> None:
    """Triton's interpreter runs the GPU kernels on a CPU."""
    case = Case.random(seq_len=50, heads=2, key_heads=1, dim=16, value_dim=16)
    mask = masks(50)[mask]
    on_device = case.to(torch.float32).to(device)
    got = on_device.on_ring(Layout(layout, 50, 3), mask, schedule=schedule, backend="triton")
    assert_close([x.cpu() for x in got], case.unsharded(mask), 1e-5)


@every_pair(layout=KINDS, schedule=SCHEDULES, route=ROUTES)
def test_batch_entries_with_their_own_documents(layout: str, schedule: str, route: str) -> None:
    """One entry has a document that spans three ranks. The value dim differs from the head dim, and the scale is given."""
    case = Case.random(seq_len=48, batch=2, heads=6, key_heads=3, dim=8, value_dim=5)
    mask = Mask.full(documents=[[1] * 6 + [20, 22], [48]])
    options = dict(schedule=schedule, backend="blockwise", scale=0.7)
    got = case.on_ring(Layout(layout, 48, 5), mask, route == "direct", **options)
    assert_close(got, case.unsharded(mask, scale=0.7), 1e-10)


@pytest.mark.parametrize("ranks", [8, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("mask", "schedule", "route"), pairs(mask=("causal", "full"), schedule=SCHEDULES, route=ROUTES))
def test_error_does_not_grow_with_the_ring(mask: str, schedule: str, route: str, ranks: int) -> None:
    """On many ranks, the fp32 error of the whole tensor relative to fp64 is at most 1.2 times that on one rank."""
    case, mask = Case.random(seq_len=1024, dim=32, value_dim=32), masks(1024)[mask]
    exact = case.unsharded(mask, backend="blockwise")
    errors = {}
    for size in (1, ranks):
        got = case.to(torch.float32).on_ring(Layout.zigzag(1024, size), mask, route == "direct", schedule=schedule)
        errors[size] = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, exact, strict=True)]
    assert all(many <= 1.2 * one for one, many in zip(errors[1], errors[ranks], strict=True)), errors


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_partial_results_of_16_bit_inputs_are_not_rounded(schedule: str) -> None:
    """The bf16 error does not grow with the ring, because partial results are sent in fp32."""
    case = Case.random(seq_len=256, dtype=torch.bfloat16)
    exact = case.to(torch.float64).unsharded(Mask.causal())
    errors = {}
    for ranks in (1, 8):
        got = case.on_ring(Layout.zigzag(256, ranks), Mask.causal(), schedule=schedule)
        errors[ranks] = [((x.double() - y).norm() / y.norm()).item() for x, y in zip(got, exact, strict=True)]
    assert all(many <= 1.1 * one + 1e-6 for one, many in zip(errors[1], errors[8], strict=True)), errors


def test_a_skipped_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of these tests fails if a single local step of a ring of four is skipped."""
    forward, calls = ring.dispatch.forward, []

    def skip_third_call(q, k, v, intervals, *rest, **options):
        calls.append(1)
        if len(calls) == 3:
            intervals = Intervals.of(intervals.host[0], intervals.host[0], intervals.num_keys)
        return forward(q, k, v, intervals, *rest, **options)

    case = Case.random(seq_len=101)
    with monkeypatch.context() as patch:
        patch.setattr(ring.dispatch, "forward", skip_third_call)
        got = case.on_ring(Layout.zigzag(101, 4), Mask.causal(), schedule="kv", backend="reference")
    assert relative_errors(got, case.unsharded(Mask.causal()))["out"] > 1e-3


@every_pair(ranks=(1, 2, 5), layout=KINDS, schedule=SCHEDULES, route=ROUTES)
def test_dropout_is_the_same_on_any_ring(ranks: int, layout: str, schedule: str, route: str) -> None:
    """Output and gradients equal those of one rank, so the same entries are dropped."""
    case = Case.random(seq_len=60, batch=2)
    options = {"dropout_p": 0.2, "seed": 11}
    layout = Layout(layout, 60, ranks)
    got = case.on_ring(layout, Mask.causal(), route == "direct", schedule=schedule, backend="blockwise", **options)
    assert_close(got, case.unsharded(Mask.causal(), **options), 1e-10)
    assert relative_errors(got, case.unsharded(Mask.causal()))["out"] > 0.1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("heads", "key_heads", "chunks"), [(4, 4, 4), (8, 2, 2), (3, 1, 1)], ids=str)
def test_head_chunks_give_the_same_result(
    heads: int, key_heads: int, chunks: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long call processes its heads in chunks. The result, with dropout, equals that of one chunk."""
    case, layout, seen = Case.random(seq_len=22, heads=heads, key_heads=key_heads), Layout.zigzag(22, 2), []
    options = {"schedule": schedule, "backend": "reference", "dropout_p": 0.4, "seed": 5}
    whole = case.on_ring(layout, Mask.causal(), **options)
    monkeypatch.setattr(workload, "HEAD_CHUNK_FLOPS", 1.0)
    forward = getattr(Ring, f"_forward_{schedule}")
    monkeypatch.setattr(Ring, forward.__name__, lambda self, q, *rest: seen.append(q.shape[2]) or forward(self, q, *rest))
    assert_close(case.on_ring(layout, Mask.causal(), **options), whole, 1e-12)
    assert seen == [heads // chunks] * chunks * layout.ranks


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_requested_schedule_runs_in_both_directions(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result does not show which operand circulated, so this test records the passes that run."""
    passes = []
    for name in ("_forward_state", "_forward_kv", "_backward_state", "_backward_kv"):
        run = getattr(Ring, name)
        monkeypatch.setattr(Ring, name, lambda *args, run=run: passes.append(run.__name__) or run(*args))
    Case.random(seq_len=8).on_ring(Layout.zigzag(8, 2), Mask.causal(), schedule=schedule)
    assert sorted(passes) == [f"_backward_{schedule}"] * 2 + [f"_forward_{schedule}"] * 2


@pytest.mark.parametrize("uses_sms", [False, True], ids=("copy-engines", "kernels"))
def test_attention_shares_sms_with_the_kernels_of_the_transport(uses_sms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If messages are moved by kernels, attention must not occupy every SM with a persistent grid."""
    seen, forward = [], ring.dispatch.forward

    def record(*args: object, shares_sms: bool, **options: object) -> object:
        seen.append(shares_sms)
        return forward(*args, shares_sms=shares_sms, **options)

    monkeypatch.setattr(ring.dispatch, "forward", record)
    case, layout = Case.random(seq_len=8), Layout.zigzag(8, 2)

    def attend(rank: int, group) -> None:
        group.interconnect = group.interconnect._replace(uses_sms=uses_sms)
        case.on_rank(layout, Mask.causal(), rank, group)

    simulate(2, attend)
    assert set(seen) == {uses_sms}


@pytest.mark.parametrize("route", ROUTES)
def test_two_runs_return_the_same_bits(route: str) -> None:
    """Partial results are merged in a fixed order."""
    case = Case.random(seq_len=101, dtype=torch.float32)
    runs = [case.on_ring(Layout.zigzag(101, 4), Mask.causal(), route == "direct", schedule="state") for _ in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_a_query_without_keys_on_its_own_rank_is_exact() -> None:
    """With a window of 1 every token attends only to itself, so out = v and dv = dout."""
    case = Case.random(seq_len=20, heads=2)
    out, _, _, _, dv = case.on_ring(Layout.striped(20, 3), Mask.causal(window=1))
    assert torch.allclose(out, case.v, atol=1e-12)
    assert torch.allclose(dv, case.dout, atol=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("keys", [(2, 20), (0, 15), (7, 7)], ids=str)
def test_keys_to_which_no_query_attends(keys: tuple[int, int], dtype: torch.dtype, ranks: int) -> None:
    """The gradients of the first keys, of the last keys or of all keys are 0."""
    case, mask = Case.random(20, batch=2), Mask.from_intervals(*([bound] * 20 for bound in keys))
    got = case.to(dtype).on_ring(Layout.zigzag(20, ranks), mask)
    inputs = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    exact = flash_attention(*inputs, mask=mask, backend="reference", return_lse=True)
    grads = torch.autograd.grad(exact, inputs, (case.dout, case.dlse))
    for x, y in zip(got, (*exact, *grads), strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=1e-9 if dtype == torch.float64 else 1e-4)
    assert got[0].dtype == got[2].dtype == got[3].dtype == got[4].dtype == dtype


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("schedule", ["state", "kv"])
def test_gradients_of_queries_without_keys_have_no_effect(schedule: str, ranks: int) -> None:
    """These gradients may be NaN, because out and lse of such queries do not depend on q, k and v."""
    case, layout = Case.random(20), Layout.zigzag(20, ranks)
    mask = Mask.from_intervals([0] * 5 + [2] * 15, [0] * 5 + [9] * 10 + [20] * 5)
    got = []
    for value in (0.0, float("nan")):
        case.dout[:, :5], case.dlse[:, :5] = value, value
        got.append(case.on_ring(layout, mask, schedule=schedule))
    assert all(torch.equal(x, y) for x, y in zip(*got, strict=True))


@pytest.mark.parametrize("all_pairs", [False, True])
@pytest.mark.parametrize("schedule", ["state", "kv"])
def test_passes_that_reuse_memory_are_exact(schedule: str, all_pairs: bool) -> None:
    """Several passes of the same shapes, with other data. The messages of a pass use the memory of earlier messages."""
    ranks, layout, mask = 5, Layout.zigzag(40, 5), Mask.causal()
    cases = [Case.random(40, batch=batch, seed=seed) for seed, batch in enumerate((1, 1, 2, 2, 1))]

    def run(rank: int, group: SimulatedRank) -> list[list[torch.Tensor]]:
        return [case.on_rank(layout, mask, rank, group, schedule=schedule) for case in cases]

    for case, by_rank in zip(cases, zip(*simulate(ranks, run, all_pairs), strict=True), strict=True):
        assert_close(unshard_results(layout, list(by_rank)), case.unsharded(mask), 1e-10)


@pytest.mark.parametrize("schedule", ["state", "kv"])
def test_passes_after_a_pass_in_inference_mode(schedule: str) -> None:
    """Training uses the memory of messages that an evaluation has allocated."""
    layout, mask, case = Layout.zigzag(40, 3), Mask.causal(), Case.random(40)

    def run(rank: int, group: SimulatedRank) -> list[torch.Tensor]:
        with torch.inference_mode():
            q, k, v = (layout.shard(x, rank) for x in (case.q, case.k, case.v))
            ring_attention(q, k, v, layout=layout, mask=mask, group=group, schedule=schedule)
        return case.on_rank(layout, mask, rank, group, schedule=schedule)

    assert_close(unshard_results(layout, simulate(3, run)), case.unsharded(mask), 1e-10)


def test_a_relay_moves_what_its_schedule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hop of a relaying state ring sends at most one message with queries and one with a state to the next rank.

    All ranks are connected, so the route makes the difference.
    """
    ranks, layout, case = 8, Layout.contiguous(64, 8), Case.random(64, dtype=torch.float32)
    sent: list[list[list[tuple[int, int]]]] = [[] for _ in range(ranks)]  # (receiver, bytes) by rank and exchange
    exchange = SimulatedRank.exchange

    def record(self: SimulatedRank, sends: Addressed, receives: Addressed) -> Wait:
        sent[self.rank].append([(dst, x.nbytes) for x, dst in sends])
        return exchange(self, sends, receives)

    monkeypatch.setattr(SimulatedRank, "exchange", record)

    def forward(rank: int, group: SimulatedRank) -> torch.Tensor:
        q, k, v = (layout.shard(x, rank) for x in (case.q, case.k, case.v))
        return ring_attention(q, k, v, layout=layout, mask=Mask.full(), group=group, schedule="state", route="relay")

    out = layout.unshard(simulate(ranks, forward, all_pairs=True))
    torch.testing.assert_close(out, case.unsharded(Mask.full())[0])
    schedule = get_plan(Mask.full(), layout, 0, torch.device("cpu")).schedule("state", results=True, all_pairs=False)
    block_bytes, result_bytes = forward_work(case.q, case.k, case.v).row_bytes.state
    row_bytes = {"block": block_bytes, "result": result_bytes}
    for rank, exchanges in enumerate(sent):
        assert len(exchanges) == ranks + 1
        for step, messages in zip(schedule.by_rank[rank], exchanges, strict=True):
            assert {dst for dst, _ in messages} == ({(rank + 1) % ranks} if step.outgoing else set())
            assert len(messages) == len(step.outgoing)
            assert sum(count for _, count in messages) == sum(row_bytes[x.kind] * len(x.rows) for x in step.outgoing)
    assert all(
        sum(message.kind == kind for step in schedule.by_rank[3] for message in step.outgoing) == 7 for kind in row_bytes
    )


def test_no_ring_uses_a_plan_that_was_freed() -> None:
    """A later job would otherwise neither log its choices nor learn which tables its calls request."""
    case, layout, mask = Case.random(24), Layout.contiguous(24, 1), Mask.causal()
    used = []
    for _ in range(2):
        case.on_ring(layout, mask)
        used.append(ring._cached_plan(Mask.causal().reach, (), "contiguous", 24, 1, 0, torch.device("cpu")))
        assert used[-1] is get_plan(mask, layout, 0, torch.device("cpu"))
        ring.free_plans()
    assert used[0] is not used[1]
