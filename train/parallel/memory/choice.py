"""Choose the memory plan of a run: the fastest of the plans that fit."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.capacity import COMFORTABLE_FRACTION, RECEIVE_BUFFERS, USABLE_FRACTION, Capacity, Needs
from ringattn.train.parallel.memory.chunks import CHUNK
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.memory.receive_buffers import receive_bytes
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.parallel.timing import SLOW_GPU, Machine, kernels_alone, step_time
from ringattn.train.settings.config import Config

# Two plans count as equally fast if their predicted times differ by at most 2%.
EQUAL_TIMES = 1.02

# A plan that leaves GPU memory free may be at most 3% slower than the fastest plan.
COMFORTABLE_TIMES = 1.03

# The approximate number of values of `host_blocks` that the search tries
HOST_CHOICES = 8


def choose_plan(config: Config, shape: MeshShape, machine: Machine) -> tuple[MemoryPlan, Needs]:
    """Return the memory plan of a run, and the bytes that a rank needs.

    If no plan fits, the result is the plan that needs the least memory.
    """
    attention = kernels_alone(config, shape, machine.gpu or SLOW_GPU)
    common = estimate.PlanIndependent.of(config, shape)

    received = {RECEIVE_BUFFERS: receive_bytes(config, shape, machine)}

    @cache
    def needs(plan: MemoryPlan) -> Needs:
        needed = estimate.needs(config, shape, machine.vocab_size, machine.bf16, machine.compiled, plan, common)
        return needed._replace(device=needed.device | received)

    def seconds(plan: MemoryPlan) -> float:
        return step_time(config, shape, machine, plan, attention).seconds

    def best(fraction: float) -> MemoryPlan | None:
        limit = machine.capacity._replace(fraction=fraction)
        candidates = _candidates(config, shape, machine.bf16, needs, limit)
        times = {plan: seconds(plan) for plan in candidates if limit.fits(needs(plan))}
        # The simplest of several equally fast plans is chosen.
        return next((plan for plan, time in times.items() if time <= EQUAL_TIMES * min(times.values())), None)

    comfortable = best(COMFORTABLE_FRACTION)
    if comfortable is not None and seconds(comfortable) <= COMFORTABLE_TIMES * seconds(MemoryPlan()):
        return comfortable, needs(comfortable)
    usable = best(USABLE_FRACTION)
    if usable is None:
        plans = _candidates(config, shape, machine.bf16, needs, machine.capacity)
        chosen = min(plans, key=lambda plan: machine.capacity.share(needs(plan)))
    elif comfortable is None or comfortable.attention_blocks > usable.attention_blocks:
        chosen = usable
    else:
        is_slow = seconds(comfortable) > COMFORTABLE_TIMES * seconds(usable)
        chosen = usable if is_slow else comfortable
    return chosen, needs(chosen)


def _bases(config: Config, shape: MeshShape, bf16: bool) -> Iterator[MemoryPlan]:
    layers, rows = config.model.layers, estimate.tokens_per_rank(config, shape)
    group = estimate.blocks_per_group(config.model, bf16, shape.ranks, layers)
    # Only whole FSDP groups are offloaded, beginning with the last group.
    groups = -(-layers // group)
    step = -(-groups // HOST_CHOICES)
    some = [layers - first * group for first in range(groups - 1, 0, -step)]
    # 8-bit moments are always on the GPU.
    optimizer = "keep" if config.memory.moments == "8bit" else config.memory.optimizer
    host = {"keep": [0], "offload": [layers], "auto": [0, *some, layers]}[optimizer]
    chunks = [0, CHUNK] if config.memory.chunk is None and rows > CHUNK else [config.memory.chunk or 0]
    for host_blocks in host:
        yield from (MemoryPlan(host_blocks=host_blocks, chunk=chunk) for chunk in chunks)


def _candidates(
    config: Config, shape: MeshShape, bf16: bool, needs: Callable[[MemoryPlan], Needs], limit: Capacity
) -> Iterator[MemoryPlan]:
    """Yield plans that may be the best, simple plans first."""
    layers, activations = config.model.layers, config.memory.activations
    for base in _bases(config, shape, bf16):
        whole = replace(base, recomputed_blocks=layers)
        if activations != "auto":
            yield base if activations == "keep" else _fixed_plan(whole, activations)
            continue

        def with_offload(plan: MemoryPlan) -> MemoryPlan:
            most = min(plan.recomputed_blocks, layers - 1)
            plans = [replace(plan, offloaded_blocks=count) for count in range(most + 1)]
            return _first(plans, lambda plan: limit.fits_device(needs(plan)))

        def fits(plan: MemoryPlan) -> bool:
            return limit.fits(needs(plan))

        if base.host_blocks and sum(needs(base).host.values()) > limit.usable_host:
            continue
        if base == MemoryPlan() and fits(base):
            yield base  # Every other plan is slower.
            return
        recomputing = [replace(base, recomputed_blocks=count) for count in range(layers + 1)]
        yield _first(recomputing, fits)
        best = _first(recomputing, lambda plan: fits(with_offload(plan)))
        yield with_offload(whole)
        yield with_offload(best)
        if not fits(with_offload(best)):
            rerunning = [replace(best, attention_blocks=count) for count in range(layers + 1)]
            yield with_offload(_first(rerunning, lambda plan: fits(with_offload(plan))))


def _fixed_plan(plan: MemoryPlan, activations: str) -> MemoryPlan:
    layers = plan.recomputed_blocks
    return replace(
        plan,
        attention_blocks=layers if activations in ("recompute-all", "offload-inputs") else 0,
        offloaded_blocks=layers - 1 if activations.startswith("offload") else 0,
    )


def _first(plans: Sequence[MemoryPlan], is_true: Callable[[MemoryPlan], bool]) -> MemoryPlan:
    return plans[min(bisect_left(plans, True, key=is_true), len(plans) - 1)]
