"""Tests of `ulysses_attention`: an all-to-all inside groups and a ring across them give the result of one rank."""

from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ringattn import Layout, Mask, simulate, ulysses_attention
from ringattn.planning import ulysses_degree
from ringattn.ring import Ring
from ringattn.spec import AttentionSpec
from tests.covering import every_pair, pairs
from tests.distributed import run_ranks
from tests.ringattn.rings import MASK_NAMES, Case, assert_close, masks, unshard_results

HEADS = {
    "multi-head": (8, 8),
    "grouped": (8, 4),
    "fewer key heads than ranks": (8, 2),
    "one key head": (4, 1),
    "key heads shared by neighbours": (12, 3),
}
SAVED = ("saved", "recomputed")  # the results of the first all-to-all


def random_case(seq_len: int, heads: str, dtype: torch.dtype = torch.float64) -> Case:
    """A batch of two with the numbers of heads that HEADS names."""
    num_heads, key_heads = HEADS[heads]
    return Case.random(seq_len, batch=2, heads=num_heads, key_heads=key_heads, value_dim=5, dtype=dtype)


def on_rank(case: Case, layout: Layout, mask: Mask, rank: int, **options) -> list[Tensor]:
    """Return one rank's tokens of (out, lse, dq, dk, dv)."""
    return case.on_rank(layout, mask, rank, None, ulysses_attention, **options)


def on_group(case: Case, layout: Layout, mask: Mask, **options) -> list[Tensor]:
    """Return (out, lse, dq, dk, dv) of the whole sequence, computed on one simulated Ulysses group."""
    run = partial(on_rank, case, layout, mask)
    return unshard_results(layout, simulate(layout.ranks, lambda rank, group: run(rank, ulysses_group=group, **options)))


@every_pair(mask=MASK_NAMES, heads=HEADS)
def test_one_group_equals_one_rank(mask: str, heads: str) -> None:
    """Four ranks; 31 tokens cannot be divided evenly among them."""
    case, mask = random_case(31, heads), masks(31)[mask]
    got = on_group(case, Layout.contiguous(31, 1).split(4), mask)
    assert_close(got, case.unsharded(mask), 1e-10)


@pytest.mark.parametrize("seq_len", [2, 5])
def test_ranks_without_tokens(seq_len: int) -> None:
    """With two tokens on four ranks, two ranks contribute nothing to the all-to-all."""
    case = random_case(seq_len, "grouped")
    got = on_group(case, Layout.contiguous(seq_len, 1).split(4), Mask.causal())
    assert_close(got, case.unsharded(Mask.causal()), 1e-10)


@pytest.mark.parametrize("heads", HEADS)
def test_dropout_equals_that_of_one_rank(heads: str) -> None:
    """The same entries are dropped, although each rank computes other heads."""
    case, options = random_case(31, heads), dict(dropout_p=0.3, seed=7)
    got = on_group(case, Layout.contiguous(31, 1).split(4), Mask.causal(), **options)
    assert_close(got, case.unsharded(Mask.causal(), **options), 1e-10)


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("heads", HEADS)
def test_head_chunks_give_the_same_result(heads: str, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank processes one key head at a time. Dropout depends on the index of the head."""
    monkeypatch.setattr(ulysses_degree, "MIN_CHUNK_ROWS", 1)
    case, mask, options = random_case(31, heads), Mask.causal(documents=[1, 20, 10]), dict(dropout_p=0.3, seed=7)
    layout = Layout.contiguous(31, 1).split(2)
    got = on_group(case, layout, mask, recompute_all_to_all=saved == "recomputed", **options)
    assert_close(got, case.unsharded(mask, **options), 1e-10)


def test_the_output_is_the_same_without_lse() -> None:
    """`return_lse` does not change the output."""
    case, layout = random_case(12, "grouped"), Layout.contiguous(12, 1).split(4)

    def outputs(rank: int, group: object) -> tuple[Tensor, Tensor]:
        q, k, v = (layout.shard(x, rank) for x in (case.q, case.k, case.v))
        call = partial(ulysses_attention, q, k, v, layout=layout, mask=Mask.causal(), ulysses_group=group)
        return call(), call(return_lse=True)[0]

    for out, out_next_to_lse in simulate(4, outputs):
        assert torch.equal(out, out_next_to_lse)


def check_mesh(ulysses: int, quick: bool = True) -> None:
    """On every rank of a job: layouts, masks and numbers of heads on meshes of R x U ranks; all combinations unless quick."""
    rank, ring = dist.get_rank(), dist.get_world_size() // ulysses
    mesh = dist.init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    groups = dict(ulysses_group=mesh.get_group("ulysses"), ring_group=mesh.get_group("ring"))
    layouts, mask_names = (("zigzag", 33), ("striped", 33)), ("causal", "window", "documents")
    cases = list(pairs(layout=layouts, heads=HEADS, mask=mask_names) if quick else product(layouts, HEADS, MASK_NAMES))
    for (kind, seq_len), heads, mask in [*cases, (("contiguous", 3), "grouped", "causal")]:
        case, layout, mask = random_case(seq_len, heads), Layout(kind, seq_len, ring).split(ulysses), masks(33)[mask]
        got = on_rank(case, layout, mask, rank, **groups)
        assert_close([layout.unshard(x) for x in got], case.unsharded(mask), 1e-10)

    case, mask = random_case(33, "grouped", torch.float32), Mask.causal(documents=[1, 20, 12])
    layout = Layout.zigzag(33, ring).split(ulysses)
    expected = case.to(torch.float64).unsharded(mask)

    def check(**options: object) -> None:
        got = on_rank(case, layout, mask, rank, **groups, **options)
        assert_close([layout.unshard(x) for x in got], expected, 1e-5)

    for schedule in ("state", "kv"):
        check(schedule=schedule)
    # With this threshold, some ranks of the ring would by themselves choose two chunks, and others one. All must choose the
    # same.
    ulysses_degree.MIN_CHUNK_ROWS = 2 * HEADS["grouped"][0] // ulysses * (33 // ring + 1) // 2
    check()
    # Each key head of a rank is a chunk with a ring pass of its own.
    ulysses_degree.MIN_CHUNK_ROWS = 1
    for recompute in (False, True):
        check(recompute_all_to_all=recompute)


@pytest.mark.parametrize("ulysses", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))], ids=lambda n: f"U{n}")
def test_meshes_of_processes(ulysses: int, tmp_path: Path) -> None:
    """Four processes over gloo."""
    run_ranks(check_mesh, 4, tmp_path / "ranks", ulysses)


@pytest.mark.slow
@pytest.mark.parametrize("ulysses", [1, 2, 4], ids=lambda n: f"U{n}")
def test_meshes_of_processes_with_every_mask(ulysses: int, tmp_path: Path) -> None:
    """The full product of layouts, masks and numbers of heads."""
    run_ranks(check_mesh, 4, tmp_path / "ranks", ulysses, False)


@pytest.mark.parametrize("uses_sms", [False, True], ids=("copy-engines", "kernels"))
def test_attention_shares_sms_with_the_kernels_of_an_all_to_all(uses_sms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the all-to-all runs kernels, attention must not occupy every SM with a persistent grid."""
    seen, forward = [], Ring.forward

    def record(ring: Ring, *args: Tensor, **options) -> tuple[Tensor, Tensor]:
        seen.append(ring.kernel_options["shares_sms"])
        return forward(ring, *args, **options)

    monkeypatch.setattr(Ring, "forward", record)
    case, layout = random_case(12, "grouped"), Layout.contiguous(12, 1).split(2)

    def attend(rank: int, group) -> None:
        group.interconnect = group.interconnect._replace(uses_sms=uses_sms)
        on_rank(case, layout, Mask.causal(), rank, ulysses_group=group)

    simulate(2, attend)
    assert seen == [uses_sms] * 2


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("with_lse", [False, True], ids=("out", "out-lse"))
def test_the_operator_passes_the_checks_of_torch(with_lse: bool, saved: str) -> None:
    """Schema, fake tensors and autograd, on a group of one rank with two head chunks."""

    def check(rank: int, group) -> None:
        shapes = (2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 5)
        inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        attention = AttentionSpec.create(Mask.causal(), Layout.contiguous(6, 1), scale=0.5, backend="blockwise")
        settings = [6], group.group_name, with_lse, saved == "recomputed", 2, 2, *attention
        torch.library.opcheck(torch.ops.ringattn.ulysses_attention.default, (*inputs, *settings))

    simulate(1, check)


@pytest.mark.parametrize("result", [0, 1], ids=("out", "lse"))
def test_gradient_of_one_of_two_results(result: int) -> None:
    """A loss may use only the output or only lse."""
    case, mask = random_case(12, "grouped"), Mask.causal()

    def gradients(rank: int, group: object, layout: Layout) -> tuple[Tensor, ...]:
        inputs = [layout.shard(x, rank).requires_grad_() for x in (case.q, case.k, case.v)]
        results = ulysses_attention(*inputs, layout=layout, mask=mask, ulysses_group=group, return_lse=True)
        return torch.autograd.grad(results[result].square().sum(), inputs)

    layout = Layout.contiguous(12, 1).split(2)
    ranks = simulate(2, partial(gradients, layout=layout))
    for i, expected in enumerate(gradients(0, None, Layout.contiguous(12, 1))):
        torch.testing.assert_close(layout.unshard([grads[i] for grads in ranks]), expected, rtol=1e-9, atol=1e-10)


def test_gradient_of_lse_on_one_rank_only() -> None:
    """A rank whose loss does not use lse still takes part in the all-to-all of its gradient."""
    case, layout, mask = random_case(12, "grouped"), Layout.contiguous(12, 1).split(2), Mask.causal()

    def gradients(rank: int, group, layout: Layout = layout) -> tuple[Tensor, ...]:
        inputs = [layout.shard(x, rank).requires_grad_() for x in (case.q, case.k, case.v)]
        out, lse = ulysses_attention(*inputs, layout=layout, mask=mask, ulysses_group=group, return_lse=True)
        of_first_rank = lse[:, :6] if group is None else lse
        loss = out.square().sum() + (of_first_rank.sum() if rank == 0 else 0)
        return torch.autograd.grad(loss, inputs)

    ranks, expected = simulate(2, gradients), gradients(0, None, Layout.contiguous(12, 1))
    for i in range(3):
        torch.testing.assert_close(layout.unshard([grads[i] for grads in ranks]), expected[i], rtol=1e-9, atol=1e-10)


def test_selective_checkpointing_runs_attention_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a policy that saves this operator, only q, k and v are recomputed and exchanged a second time."""
    calls, forward = [], Ring.forward
    monkeypatch.setattr(Ring, "forward", lambda *args, **options: calls.append(1) or forward(*args, **options))
    case, layout = random_case(12, "grouped"), Layout.contiguous(12, 1).split(2)
    operator = torch.ops.ringattn.ulysses_attention.default

    def policy(_, op, *args, **kwargs) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is operator else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients(rank: int, group, checkpointed: bool) -> tuple[Tensor, ...]:
        inputs = [layout.shard(x, rank).requires_grad_() for x in (case.q, case.k, case.v)]
        options = dict(layout=layout, mask=Mask.causal(), ulysses_group=group, recompute_all_to_all=checkpointed)

        def attend() -> Tensor:
            return ulysses_attention(*(x.sin() for x in inputs), **options).sin()

        contexts = partial(create_selective_checkpoint_contexts, policy)
        out = checkpoint(attend, use_reentrant=False, context_fn=contexts) if checkpointed else attend()
        return torch.autograd.grad(out.sum(), inputs)

    checkpointed, plain = (simulate(2, partial(gradients, checkpointed=flag)) for flag in (True, False))
    assert len(calls) == 2 + 2
    for x, y in zip(sum(checkpointed, ()), sum(plain, ()), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


SIX_HEADS, EIGHT_HEADS = torch.zeros(1, 4, 6, 8), torch.zeros(1, 4, 8, 8)
LAYOUT = Layout.contiguous(16, 1).split(4)
INVALID = {
    "heads-that-do-not-divide": (SIX_HEADS, SIX_HEADS, SIX_HEADS, {}, "6 query heads .* the 4 ranks"),
    "layout-of-a-ring": (*[EIGHT_HEADS] * 3, {"layout": Layout.contiguous(16, 2).split(2)}, "2 x 2 ranks.* ring of 1 .*4"),
    "key-heads-that-do-not-divide": (EIGHT_HEADS, EIGHT_HEADS[:, :, :3], EIGHT_HEADS[:, :, :3], {}, "8 query .* 3 key"),
    "two-dtypes": (EIGHT_HEADS, EIGHT_HEADS, EIGHT_HEADS.double(), {}, "torch.float64"),
    "three-dimensions": (EIGHT_HEADS, EIGHT_HEADS[0], EIGHT_HEADS, {}, "4, 3, 4 dimensions"),
    "tokens-of-another-shard": (*[EIGHT_HEADS[:, :3]] * 3, {}, "3 tokens .* rank . holds 4: use layout.shard"),
    "heads-before-tokens": (
        *[torch.zeros(1, 8, 4, 16)] * 3,
        {},
        "rank . holds 4 tokens: pass .batch, tokens, heads, head dim.",
    ),
    "unknown-schedule": (*[EIGHT_HEADS] * 3, {"schedule": "star"}, "unknown schedule 'star'"),
    "unknown-transport": (*[EIGHT_HEADS] * 3, {"transport": "star"}, "unknown transport 'star'"),
    "name-instead-of-layout": (*[EIGHT_HEADS] * 3, {"layout": "zigzag"}, "layout is a str.*ringattn.Layout"),
}


@pytest.mark.parametrize(("q", "k", "v", "changes", "message"), INVALID.values(), ids=INVALID)
def test_invalid_arguments_raise_an_error(q: Tensor, k: Tensor, v: Tensor, changes: dict, message: str) -> None:
    """Every rank raises the error before any message is sent."""
    options = {"layout": LAYOUT, "mask": Mask.causal()} | changes
    with pytest.raises(ValueError, match=message):
        simulate(4, lambda rank, group: ulysses_attention(q, k, v, ulysses_group=group, **options))


def test_a_layout_of_a_ring_requires_its_group() -> None:
    """Without groups, this process is the only rank."""
    for layout, message in (
        (Layout.contiguous(8, 2), "for 2 ranks but the group has 1"),
        (Layout.contiguous(8, 1).split(2), "1 x 2 ranks.* ring of 1"),
    ):
        with pytest.raises(ValueError, match=message):
            ulysses_attention(*[EIGHT_HEADS] * 3, layout=layout, mask=Mask.causal())
