"""Compare the forward time of a hop between the state ring and the KV ring.

    python -m scripts.bench.hops --queries 16384 4096

A CUDA device is required. The times contain attention and the merge of states, but no transfer of data. Inputs are bf16, with B
= 1, 16 heads and head dim 128. In each hop, all queries attend to another block of keys, with as many keys as queries.

- In a hop of the KV ring, the attention kernel merges its result into the state of the resident queries.
- In a hop of the state ring, the attention kernel writes a new state, and a second kernel merges both states. In the row "eager
  merge", PyTorch operations merge the states.
- A ring pass has as many hops as ranks. In the last hop of the KV ring, the attention kernel also divides o by l. In the state
  ring, one kernel merges the states of up to three other ranks and divides o by l.

Before the timing, the outputs are compared with a float64 reference. The script times all calls in the same way as
`scripts.bench.kernels`, and prints a table.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringattn import Mask
from ringattn.kernels import dispatch, reference
from ringattn.kernels.interval_mask import Intervals
from ringattn.kernels.reference import State
from scripts import command
from scripts.accuracy import GROUP_TOLERANCE, float64_results, group_error
from scripts.bench.cases import Case, random_inputs
from scripts.bench.kernels import Call, stream_for, time_in_rounds
from scripts.tables import markdown_table

DEVICE = torch.device("cuda")
HEADS, HEAD_DIM, SCALE = 16, 128, 128**-0.5
RANKS = 4  # a pass has four ranks, so the owner merges the states of three other ranks
HOPS = ("attention without a merge", "KV ring", "state ring", "state ring, eager merge")
PASSES = (f"KV ring, pass of {RANKS} hops", f"state ring, pass of {RANKS} hops")


class Problem:
    """Random queries, and a block of random keys and values for each hop."""

    def __init__(self, queries: int) -> None:
        case = Case("full", queries, HEADS, HEAD_DIM)
        generator = torch.Generator(DEVICE).manual_seed(0)
        hops = [[x.detach() for x in random_inputs(case, queries, generator)] for _ in range(RANKS)]
        self.q, self.dout = hops[0][0], hops[0][3]
        self.keys = [(k, v) for _, k, v, _ in hops]
        self.intervals = Intervals.of(*case.mask.intervals(queries), queries, DEVICE)
        self.state = self.attend(0)  # the timed hops merge into this state

    def attend(self, hop: int, state: State | None = None, final: bool = False) -> Any:
        return dispatch.forward(self.q, *self.keys[hop], self.intervals, SCALE, state, final)

    def state_hop(self, merge: Callable[..., Any] = dispatch.merge_states) -> State:
        return merge(self.state, [(0, self.attend(1))])

    def kv_pass(self) -> tuple[Tensor, Tensor]:
        state = None
        for hop in range(RANKS - 1):
            state = self.attend(hop, state)
        return self.attend(RANKS - 1, state, final=True)

    def state_pass(self) -> tuple[Tensor, ...]:
        own, *others = (self.attend(hop) for hop in range(RANKS))
        return dispatch.merge_states(own, [(0, state) for state in others], torch.bfloat16)

    def relayed_pass(self) -> tuple[Tensor, Tensor]:
        """Run a pass of the state ring with a relay schedule, which merges results in place."""
        state = self.attend(0)
        for hop in range(1, RANKS):
            dispatch.merge_states(state, [(0, self.attend(hop))])
        return reference.finalize(state, torch.bfloat16)

    def calls(self) -> dict[str, Call]:
        eager = partial(self.state_hop, reference.merge_states)
        hops = (partial(self.attend, 1), lambda: self.attend(1, self.state), self.state_hop, eager)
        return dict(zip((*HOPS, *PASSES), (*hops, self.kv_pass, self.state_pass), strict=True))

    def check(self) -> None:
        """Compare the first head with a float64 reference.

        Raises:
            SystemExit: an error exceeds the tolerance.
        """
        k, v = (torch.cat(blocks, 1)[:, :, :1] for blocks in zip(*self.keys, strict=True))
        intervals = Intervals.of(*Mask.full().intervals(k.shape[1]), k.shape[1], DEVICE).restrict(
            slice(0, self.q.shape[1]), slice(0, k.shape[1])
        )
        expected = float64_results(self.q[:, :, :1], k, v, self.dout[:, :, :1], intervals)["out"]
        names = *PASSES, "state ring, merged in place"
        for name, run in zip(names, (self.kv_pass, self.state_pass, self.relayed_pass), strict=True):
            error = group_error(run()[0][:, :, :1], expected).item()
            if not error <= GROUP_TOLERANCE:
                sys.exit(f"error: {name}: the error of the output is {error:.2g}, and the limit is {GROUP_TOLERANCE}")


def measure(queries: int, rounds: int, use_graphs: bool) -> list[tuple[str, ...]]:
    problem = Problem(queries)
    problem.check()
    calls = {(name, "forward"): call for name, call in problem.calls().items()}
    samples, failures = time_in_rounds(calls, rounds, use_graphs)
    if failures:
        sys.exit(f"error: {failures}")
    times = {name: statistics.median(samples[name, "forward"]) for name, _ in calls}
    rows: list[tuple[str, ...]] = []
    for name, ms in times.items():
        peer = times[PASSES[0] if name in PASSES else "KV ring"]
        rows.append((f"{queries:,}", name, f"{ms:.3f}", f"{ms / peer:.3f}"))
    return rows


@command.exit_without_memory()
def main(argv: list[str]) -> int:
    parser = command.new_parser(__doc__)
    parser.add_argument("--queries", nargs="+", type=command.at_least(128), default=[16384, 4096], help="default: 16384 4096")
    parser.add_argument("--rounds", type=command.at_least(1), default=5, help="rounds of timing; default: 5")
    parser.add_argument("--graph", action="store_true", help="replay the calls from CUDA graphs")
    args = parser.parse_args(argv)
    if any(n % 128 for n in args.queries):
        parser.error(f"--queries {args.queries}: each number must be a multiple of 128")
    if not torch.cuda.is_available():
        parser.error("a CUDA device is required")
    with torch.no_grad(), stream_for(args.graph):
        rows = [row for queries in args.queries for row in measure(queries, args.rounds, args.graph)]
    header = command.describe_run("scripts.bench.hops", argv, gpus=1)
    print(f"{header['machine']}\n\n{markdown_table('queries | hop | ms | time relative to the KV ring', rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
