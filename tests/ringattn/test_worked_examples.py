"""Worked examples with known answers, on simulated rings."""

import pytest
from torch import Tensor

from ringattn import Layout, Mask, ring_attention, simulate
from ringattn.kernels import blockwise
from tests.worked_examples import EXAMPLES, Example, check_ring


def on_ring(example: Example, ranks: int, schedule: str, layout: str) -> None:
    """Check out and lse of the example on a simulated ring."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        positions = Layout(layout, k.shape[1], ranks)

        def attend_on_rank(rank: int, group) -> tuple[Tensor, Tensor]:
            shards = (positions.shard(x, rank) for x in (q, k, v))
            options = {"scale": example.scale, "schedule": schedule, "return_lse": True, "group": group}
            return ring_attention(*shards, layout=positions, mask=Mask.full(), **options)

        return tuple(positions.unshard(list(x)) for x in zip(*simulate(ranks, attend_on_rank), strict=True))

    check_ring(example, attend)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("schedule", ["state", "kv"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rings_give_the_known_answers(ranks: int, schedule: str, layout: str, example: Example) -> None:
    """The state ring merges states on their way, and the KV ring merges them in the kernel."""
    on_ring(example, ranks, schedule, layout)


@pytest.mark.parametrize("schedule", ["state", "kv"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_ring_whose_kernel_drops_its_last_tile_gives_other_answers(
    ranks: int, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key_tiles = blockwise._key_tiles
    monkeypatch.setattr(blockwise, "KEY_TILE", 1)
    monkeypatch.setattr(blockwise, "_key_tiles", lambda *arguments: list(key_tiles(*arguments))[:-1])
    with pytest.raises(AssertionError):
        on_ring(EXAMPLES["row"], ranks, schedule, "contiguous")
