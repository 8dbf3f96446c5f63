"""Count the bytes that the tiles of `kernels/blockwise.py` load, and predict the same bytes with the formulas of docs/io.md."""

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import Tensor

from ringattn.kernels import blockwise, reference
from ringattn.kernels.interval_mask import Intervals
from scripts.tools.count_bytes import FP32_BYTES, forward_loads, total_loop_rows


class TileSize(NamedTuple):
    """A tile has Br queries and Bc keys."""

    queries: int
    keys: int


@contextmanager
def tile_size(tile: TileSize) -> Generator[None]:
    with patch.multiple(blockwise, QUERY_TILE=tile.queries, KEY_TILE=tile.keys):
        yield


class Loads:
    def __init__(self) -> None:
        self.bytes = 0
        self._loaded: list[tuple[Any, ...]] = []  # the address and the shape of each operand of the previous tile

    def add(self, operands: list[Tensor]) -> None:
        """Add the bytes of new operands. The first operand is the tile of queries."""
        tiles = [(x.data_ptr(), x.shape) for x in operands]
        if self._loaded[:1] != tiles[:1]:
            self._loaded = [()] * len(tiles)
        self.bytes += sum(x.nbytes for x, tile, old in zip(operands, tiles, self._loaded, strict=True) if tile != old)
        self._loaded = tiles


@contextmanager
def counted_loads() -> Generator[Loads]:
    """Return a context manager that counts the loads of the blockwise kernel.

    The blockwise kernel calls `ringattn.kernels.reference` for each pair of tiles. The states of the queries stay on the chip
    and are not counted.
    """
    loads = Loads()

    def counted(function: Callable[..., Any], forward: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            # positional arguments of the backward: q, k, v, dout, lse and delta
            loads.add([*arguments[:3]] if forward else [*arguments[:6], *(options[name] for name in ("dq", "dk", "dv"))])
            return function(*arguments, **options)

        return call

    with ExitStack() as stack:
        for name in ("forward", "backward"):
            function = counted(getattr(reference, name), name == "forward")
            stack.enter_context(patch.object(reference, name, function))
        yield loads


def predicted_loads(intervals: Intervals, heads: int, head_dim: int, tile: TileSize) -> dict[str, int]:
    """Predict the bytes that the tiles load in both passes, for fp32 inputs with B = 1."""
    keys = heads * total_loop_rows(intervals, *tile)
    queries, row = heads * intervals.num_rows, head_dim * FP32_BYTES
    # The backward loads q, dout, dq, lse and delta for each query, and k, v, dk and dv for each key.
    return {
        "forward": forward_loads(intervals, heads, head_dim, *tile, FP32_BYTES),
        "backward": queries * (3 * row + 2 * FP32_BYTES) + keys * 4 * row,
    }
