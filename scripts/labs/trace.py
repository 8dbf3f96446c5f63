"""Trace the softmax state of one query through the tiles of a rank and the hops of a ring.

python -m scripts.labs.trace --scores 1 3 2 5 --tile 2 --ranks 2
python -m scripts.labs.trace --output trace.png

Without --scores, the command traces the query "on" of the five tokens "The cat sat on mat". The tables show float64 states of
the blockwise kernel, and of `ringattn.ring.run_schedule` on a simulated ring.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ringattn.comm.simulated import SimulatedRank, simulate
from ringattn.comm.transport import Tensors
from ringattn.kernels import dispatch
from ringattn.kernels.interval_mask import Intervals
from ringattn.layout import Layout
from ringattn.mask import Mask
from ringattn.planning.rank_plan import get_plan
from ringattn.planning.schedule import LocalStep
from ringattn.ring import run_schedule
from ringattn.state import PartialState
from ringattn.train.reports.figures import clean_axes, new_figure
from scripts.command import png_file

MAX_SCORES = 64  # with more scores, the tables and the picture would be too long to read


class Problem(NamedTuple):
    q: Tensor  # (N, D) in float64
    k: Tensor  # (N, D)
    v: Tensor  # (N, Dv)
    scale: float
    position: int
    title: str

    @classmethod
    def of_scores(cls, scores: Sequence[float], values: Sequence[float] | None = None) -> "Problem":
        """Return a problem in which every query has the scores `scores`.

        Args:
            scores: the scores of the keys.
            values: the value of each key, or None for 1, 2, 3, ...

        Raises:
            ValueError: there are no or too many scores, a number is not finite, or there are not as many values as scores.
        """
        values = range(1, len(scores) + 1) if values is None else values
        if not 1 <= len(scores) <= MAX_SCORES:
            raise ValueError(f"{len(scores)} scores: give 1 to {MAX_SCORES} numbers, such as --scores 1 3 2 5")
        if len(values) != len(scores):
            raise ValueError(f"{len(values)} values for {len(scores)} scores: give one value per score")
        if not all(map(math.isfinite, (*scores, *values))):
            raise ValueError("a score or a value is infinite or NaN: give finite numbers")
        k, v = (torch.tensor(list(x), dtype=torch.float64, device="cpu")[:, None] for x in (scores, values))
        return cls(torch.ones_like(k), k, v, 1.0, 0, f"the scores {_numbers(scores)}")

    @classmethod
    def five_tokens(cls) -> "Problem":
        """Return the example of docs/tour.md: five tokens with head dim 4 and scale 1/2."""
        q = [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]]
        k = [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]]
        v = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]]
        queries, keys, values = (torch.tensor(x, dtype=torch.float64, device="cpu") for x in (q, k, v))
        return cls(queries, keys, values, 0.5, 3, 'the query "on" of "The cat sat on mat"')

    @property
    def scores(self) -> Tensor:
        return self.scale * (self.k @ self.q[self.position])

    def direct(self) -> Tensor:
        return torch.softmax(self.scores, 0) @ self.v


@dataclass(frozen=True)
class Event:
    hop: int  # the number of hops of the query so far; the last hop returns the state to the owner
    rank: int
    tile: range  # the positions of the added keys, empty if two states are merged
    seen: tuple[int, ...]  # the positions of all keys of the state
    alpha: tuple[float, ...]  # exp(m_old - m) of the old state, or of both merged states
    m: float
    l: float
    o: tuple[float, ...]


class Trace(NamedTuple):
    events: list[Event]
    out: tuple[float, ...]
    lse: float


def _numbers_of(state: PartialState, row: int) -> tuple[float, float, tuple[float, ...]]:
    return state.m[0, row, 0].item(), state.l[0, row, 0].item(), tuple(state.o[0, row, 0].tolist())


def _attend(
    q: Tensor, k: Tensor, v: Tensor, intervals: Intervals, scale: float, tile: int, observe: Callable[..., None]
) -> PartialState:
    """Attend to one tile of keys after the other. After each tile, call observe(rows of k, old m, state)."""
    state = PartialState.empty(q, v.shape[-1])
    for first in range(0, k.shape[1], tile):
        rows = slice(first, min(first + tile, k.shape[1]))
        part, old_m = intervals.restrict(slice(0, q.shape[1]), rows), state.m.clone()
        # The call may overwrite the state.
        state = PartialState(*dispatch.forward(q, k[:, rows], v[:, rows], part, scale, state, backend="blockwise"))
        observe(rows, old_m, state)
    return state


def _result(state: PartialState, row: int) -> tuple[tuple[float, ...], float]:
    out, lse = state.finalize(torch.float64)
    return tuple(out[0, row, 0].tolist()), lse[0, row, 0].item()


def trace_tiles(problem: Problem, tile: int) -> Trace:
    """Trace the query through the key tiles of a single rank.

    Args:
        problem: the tokens.
        tile: the number of keys per tile.

    Raises:
        ValueError: `tile` is less than 1.
    """
    return trace_ring(problem, tile, 1)


class _Observer:
    def __init__(self, problem: Problem, layout: Layout, tile: int, group: SimulatedRank) -> None:
        self.problem, self.layout, self.tile, self.group = problem, layout, tile, group
        positions = [layout.positions(rank).tolist() for rank in range(layout.ranks)]
        self.owner = next(rank for rank, shard in enumerate(positions) if problem.position in shard)
        self.row = positions[self.owner].index(problem.position)
        self.positions = positions
        self.events: list[Event] = []
        self.partial_m: Tensor | None = None  # m of the partial state that this rank has computed for the traced query

    def run(self) -> tuple[list[Event], tuple[tuple[float, ...], float] | None]:
        """Run this rank's part of the forward. Return the events, and (out, lse) if this rank owns the traced query."""
        rank = self.group.rank
        q, k, v = (self.layout.shard(x[None, :, None], rank) for x in self.problem[:3])
        plan = get_plan(Mask.full(), self.layout, rank, q.device)
        schedule = plan.schedule("state", results=True)
        pairs = plan.block_pairs("state", schedule)
        step_of = {x: t for t, step in enumerate(schedule.by_rank[rank]) for x in step.local_steps}
        own_state = PartialState.empty(q, v.shape[-1])

        def compute(local_step: LocalStep, block: Tensors, into: Tensors | None) -> Tensors:
            traced = local_step.owner == self.owner and self.row in local_step.rows
            row = self.row - local_step.rows.start

            def observe(rows: slice, old_m: Tensor, state: PartialState) -> None:
                if traced:
                    self._record_tile(step_of[local_step], row, rows, old_m, state)

            state = _attend(block[0], k, v, pairs[local_step].intervals, self.problem.scale, self.tile, observe)
            if traced and into is None:
                self.partial_m = state.m
            # Merging into an empty state changes nothing, so no event is recorded.
            return state if into is None else dispatch.merge_states(into, [(0, state)])

        def merge(a: Tensors, b: Tensors) -> Tensors:
            returned = rank == self.owner and a[0].data_ptr() == own_state.m.data_ptr()
            return self._record_merge(a, b) if returned or b[0] is self.partial_m else dispatch.merge_states(a, [(0, b)])

        run_schedule(schedule, self.group, (q,), compute, own_state, merge)
        return self.events, _result(own_state, self.row) if rank == self.owner else None

    def _record_tile(self, hop: int, row: int, rows: slice, old_m: Tensor, state: PartialState) -> None:
        shard = self.positions[self.group.rank]
        m, l, o = _numbers_of(state, row)
        alpha = (math.exp(old_m[0, row, 0].item() - m),)
        tile = range(shard[rows.start], shard[rows.stop - 1] + 1)
        self.events.append(Event(hop, self.group.rank, tile, tuple(shard[: rows.stop]), alpha, m, l, o))

    def _record_merge(self, a: Tensors, b: Tensors) -> Tensors:
        rank, ranks = self.group.rank, self.layout.ranks
        hop = (rank - self.owner) % ranks or ranks
        old = [x[0][0, self.row, 0].item() for x in (a, b)]
        merged = dispatch.merge_states(a, [(0, b)])
        m, l, o = _numbers_of(PartialState(*merged), self.row)
        seen = sorted(x for i in range(1, hop + 1) for x in self.positions[(self.owner + i) % ranks])
        self.events.append(Event(hop, rank, range(0), tuple(seen), tuple(math.exp(x - m) for x in old), m, l, o))
        return merged


def trace_ring(problem: Problem, tile: int, ranks: int) -> Trace:
    """Trace the query through the hops of a state ring. Each rank relays queries and states to its neighbour.

    The layout is contiguous.

    Args:
        problem: the tokens.
        tile: the number of keys per tile.
        ranks: the number of ranks.

    Raises:
        ValueError: `tile` or `ranks` is less than 1, or there are more ranks than tokens.
    """
    if tile < 1:
        raise ValueError(f"tile={tile}: a tile must have at least one key")
    if not 1 <= ranks <= len(problem.k):
        raise ValueError(f"ranks={ranks} with {len(problem.k)} tokens: every rank needs a token, so give 1 to {len(problem.k)}")
    layout = Layout.contiguous(len(problem.k), ranks)
    observed = simulate(ranks, lambda _rank, group: _Observer(problem, layout, tile, group).run())
    # The sort by hop is stable, so it keeps the order within a hop.
    events = sorted((event for events, _ in observed for event in events), key=lambda event: event.hop)
    out, lse = next(result for _, result in observed if result is not None)
    return Trace(events, out, lse)


def _number(x: float) -> str:
    return f"{x:.4f}".rstrip("0").rstrip(".") if abs(x) < 1e6 else f"{x:.4g}"


def _numbers(numbers: Iterable[float]) -> str:
    return ", ".join(map(_number, numbers))


def _alpha(event: Event) -> str:
    return " and ".join(map(_number, event.alpha))


def _what(event: Event) -> str:
    if not event.tile:
        return "merge"
    first, last = event.tile[0], event.tile[-1]
    return f"key {first}" if first == last else f"keys {first} to {last}"


def table(problem: Problem, trace: Trace) -> str:
    scores = problem.scores.tolist()
    lines = ["| hop | rank | adds | scores | m | alpha | l | o |", "|---|---|---|---|---|---|---|---|"]
    for event in trace.events:
        added = _numbers(scores[i] for i in event.tile)
        numbers = _number(event.m), _alpha(event), _number(event.l), _numbers(event.o)
        lines.append("| " + " | ".join([str(event.hop), str(event.rank), _what(event), added, *numbers]) + " |")
    return "\n".join([*lines, "", f"out = o / l = {_numbers(trace.out)}, lse = m + log l = {_number(trace.lse)}"])


def draw(problem: Problem, traces: dict[str, Trace], layout: Layout, path: Path) -> None:
    """Draw one column of bar charts per trace. Each event has a bar chart of the probabilities exp(s - m). Solid bars are newly
    added keys, and each colour is a rank.
    """
    scores, num_rows = problem.scores.tolist(), max(len(trace.events) for trace in traces.values())
    colours = {int(x): f"C{rank % 10}" for rank in range(layout.ranks) for x in layout.positions(rank)}
    figure = new_figure(5 * len(traces), 0.9 + 1.1 * num_rows)
    charts = figure.subplots(num_rows, len(traces), sharex=True, sharey=True, squeeze=False)
    for column, (title, trace) in zip(charts.T, traces.items(), strict=True):
        for axes, event in zip(column, trace.events, strict=False):
            for i in event.seen:
                solid = i in event.tile or not event.tile
                axes.bar(i, math.exp(scores[i] - event.m), color=colours[i], alpha=1.0 if solid else 0.4)
            text = f"m = {_number(event.m)}, alpha = {_alpha(event)}, l = {_number(event.l)}"
            axes.set_title(f"hop {event.hop}, rank {event.rank}, {_what(event)}: {text}", fontsize=8, loc="left")
            clean_axes(axes)
        for axes in column[len(trace.events) :]:
            axes.set_axis_off()
        column[len(trace.events) - 1].set_xlabel("key")
        column[len(trace.events) - 1].tick_params(labelbottom=True)
        column[0].set_title(f"{title}\n{column[0].get_title(loc='left')}", fontsize=8, loc="left")
    charts[0, 0].set_ylim(0, 1.1)
    charts[0, 0].set_xticks(range(len(scores)))
    figure.supylabel("exp(s - m)", fontsize=9)
    figure.savefig(path, dpi=110)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(argv: list[str]) -> None:
    parser = _Parser("python -m scripts.labs.trace", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", type=float, nargs="*", help="the scores of the keys (default: the example of five tokens)")
    parser.add_argument("--values", type=float, nargs="*", help="the value of each key, with --scores (default: 1 2 3 ...)")
    parser.add_argument("--tile", type=int, default=2, help="keys per tile (default: 2)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the ring (default: 2)")
    parser.add_argument("--output", type=png_file, metavar="PNG", help="also draw the trace as a picture")
    args = parser.parse_args(argv)
    if args.values is not None and args.scores is None:
        parser.error("--values without --scores: give both, with one value per score")
    try:
        problem = Problem.five_tokens() if args.scores is None else Problem.of_scores(args.scores, args.values)
        one_rank, ring = trace_tiles(problem, args.tile), trace_ring(problem, args.tile, args.ranks)
    except ValueError as error:
        parser.error(str(error))
    print(f"One rank, {problem.title}:\n\n{table(problem, one_rank)}\n")
    print(f"A ring of {args.ranks} ranks, {problem.title}:\n\n{table(problem, ring)}\n")
    difference = max(
        (torch.tensor(x.out, dtype=torch.float64, device="cpu") - problem.direct()).abs().max().item() for x in (one_rank, ring)
    )
    print(f"The largest difference to the softmax of all scores is {difference:.1e}.")
    if args.output:
        traces = {"One rank": one_rank, f"A ring of {args.ranks} ranks": ring}
        try:
            draw(problem, traces, Layout.contiguous(len(problem.k), args.ranks), args.output)
        except (OSError, ValueError) as error:
            parser.error(f"cannot write {args.output}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
