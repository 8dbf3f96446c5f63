"""Predict the time of a training step on a mesh of GPUs, and choose the fastest mesh.

`ringattn.planning` predicts the time of attention, and `ringattn.train.parallel.timing` the remaining time.
"""

from collections import Counter
from collections.abc import Mapping

from ringattn import Mask
from ringattn.planning.cost_model import interconnect
from ringattn.planning.ulysses_degree import EQUAL_TIMES, MAX_PLANNED_RANKS, attention_seconds
from ringattn.train.model.gpt import padded_vocabulary
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.choice import choose_plan
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape, attention_inputs, causal_masks, count_layers
from ringattn.train.parallel.timing import (
    DOCUMENT_EFFICIENCY,
    SLOW_GPU,
    Attention,
    Machine,
    StepTime,
    sequences_per_step,
    step_time,
)
from ringattn.train.settings.config import Config, ConfigError

# The predicted speedup above which a message suggests another mesh
WORTH_MENTIONING = 1.05

Shares = Mapping[int | None, float]
NO_DOCUMENTS: Shares = {}


def predict(
    config: Config, shape: MeshShape, machine: Machine, shares: Shares = NO_DOCUMENTS, plan: MemoryPlan | None = None
) -> StepTime:
    """Return the predicted time of an optimizer step.

    Args:
        config: the settings of the run. `trainer.tokens_per_step`, if set, determines the number of micro-steps.
        shape: the shape of the mesh, which may differ from the settings.
        machine: the ranks of the job.
        shares: for each window of a layer, the allowed (query, key) pairs of an average sequence, relative to a single
            document. Other windows have the share 1.
        plan: None for the plan that a run would choose.
    """
    plan = plan or choose_plan(config, shape, machine)[0]
    return step_time(config, shape, machine, plan, attention_of_layers(config, shape, machine, shares))


def attention_of_layers(config: Config, shape: MeshShape, machine: Machine, shares: Shares = NO_DOCUMENTS) -> Attention:
    totals = [0.0, 0.0]
    for window, count in Counter(config.model.windows).items():
        share = shares.get(window, 1.0)  # Data-parallel ranks read sequences of similar cost, see `data.group_size`.
        scale = count * share / (DOCUMENT_EFFICIENCY if share < 1 else 1)
        totals = [x + scale * y for x, y in zip(totals, _attention_seconds(config, shape, machine, window), strict=True)]
    return Attention(*totals)


def tokens_per_second(
    config: Config, shape: MeshShape, machine: Machine, shares: Shares = NO_DOCUMENTS, plan: MemoryPlan | None = None
) -> float:
    """Return the predicted tokens/s over all ranks. Arguments as in `predict`."""
    tokens = sequences_per_step(config, shape) * config.data.seq_len
    return tokens / predict(config, shape, machine, shares, plan).seconds


def model_flops(config: Config, vocab_size: int, shares: Shares = NO_DOCUMENTS) -> float:
    """Return the model FLOPs per sequence, see `ringattn.train.model.flops`."""
    model, seq_len = config.model, config.data.seq_len
    weights = model.layers * estimate.used_block_parameters(model) + padded_vocabulary(model, vocab_size) * model.dim
    pairs = sum(shares.get(window, 1.0) * Mask.causal(window).pairs(seq_len)[0] for window in model.windows)
    return 6 * weights * seq_len + 12 * model.resolved_head_dim * model.heads * pairs


def possible_shapes(config: Config, ranks: int) -> list[MeshShape]:
    """Return the meshes that suit the number of heads, the sequence length and the tokens per step."""
    divisors = [n for n in range(1, min(ranks, MAX_PLANNED_RANKS) + 1) if ranks % n == 0]
    shapes = [MeshShape(ranks // (ring * u), ring, u) for ring in divisors for u in divisors if ranks % (ring * u) == 0]
    tokens, seq_len, batch_size = config.trainer.tokens_per_step, config.data.seq_len, config.trainer.batch_size
    return [
        shape
        for shape in shapes
        if config.model.heads % shape.ulysses == 0
        and shape.sequence <= min(seq_len, MAX_PLANNED_RANKS)
        and (tokens is None or tokens % (seq_len * batch_size * shape.dp) == 0)
    ]


def fastest_shape(config: Config, machine: Machine) -> MeshShape:
    """Return the mesh with the highest predicted tokens/s at `trainer.tokens_per_step`, for sequences with one document.

    Raises:
        ConfigError: `trainer.tokens_per_step` is missing, or no mesh can have this number of tokens per step.
        InsufficientMemory: no mesh fits into the memory of the GPUs.
    """
    tokens, data, trainer = config.trainer.tokens_per_step, config.data, config.trainer
    sequences = f"data.seq_len={data.seq_len} x trainer.batch_size={trainer.batch_size}"
    if tokens is None:
        raise ConfigError(
            "parallel=fastest requires trainer.tokens_per_step, because the tokens of a step must not depend on the mesh: set "
            f"it to a multiple of {data.seq_len * trainer.batch_size} ({sequences})"
        )
    shapes = possible_shapes(config, machine.ranks)
    if not shapes:
        raise ConfigError(
            f"no mesh of {machine.ranks} ranks can have trainer.tokens_per_step={tokens}, which must be a multiple of "
            f"{data.seq_len * trainer.batch_size} ({sequences}): change one of them"
        )
    plans = {shape: choose_plan(config, shape, machine) for shape in shapes}
    machine.capacity.check(min((needs for _, needs in plans.values()), key=machine.capacity.share))
    fitting = [shape for shape in shapes if machine.capacity.fits(plans[shape][1])]
    speeds = {shape: tokens_per_second(config, shape, machine, plan=plans[shape][0]) for shape in fitting}
    # Choose the smallest Ulysses groups among equally good meshes, as in `best_ulysses_degree`.
    return min((shape for shape in fitting if EQUAL_TIMES * speeds[shape] >= max(speeds.values())), key=lambda x: x.ulysses)


def describe_step(config: Config, shape: MeshShape, machine: Machine, shares: Shares) -> str:
    """Return the predicted time of a step, and meshes with a higher predicted speed. These are the fastest mesh with the same
    number of data-parallel ranks, and the fastest with another number.
    """
    plans = {other: choose_plan(config, other, machine) for other in possible_shapes(config, machine.ranks)}
    speeds = {
        other: tokens_per_second(config, other, machine, shares, plan)
        for other, (plan, needs) in plans.items()
        if other == shape or machine.capacity.fits(needs)
    }
    time, speed = predict(config, shape, machine, shares, plans[shape][0]), speeds[shape]
    parts = [f"about {time.seconds:.3g} s per step ({time.exposed:.2g} s exposed), {float(f'{speed:.2g}'):,.0f} tokens/s"]
    if machine.gpu is not None:
        peak = machine.ranks * machine.gpu.peak
        parts[0] += f", MFU {speed / config.data.seq_len * model_flops(config, machine.vocab_size, shares) / peak:.0%}"
    for is_same in (True, False):
        others = [other for other in speeds if (other.dp == shape.dp) == is_same and speeds[other] > WORTH_MENTIONING * speed]
        if others:
            best = max(others, key=speeds.__getitem__)
            sequences = sequences_per_step(config, best)
            number = "" if is_same else f", {sequences} sequence{'s' * (sequences > 1)} per step"
            parts.append(f"{describe_shape(best)}: about {speeds[best] / speed:.2g} times the tokens/s{number}")
    if len(parts) == 1 and machine.ranks > 1:
        parts.append("no other mesh of these GPUs is predicted to be faster")
    return "; ".join(parts)


def describe_shape(shape: MeshShape) -> str:
    settings = f"parallel.ring={shape.sequence}" + (f" parallel.ulysses={shape.ulysses}" if shape.ulysses > 1 else "")
    if shape.ranks == 1:
        return "one GPU"
    if shape.sequence == 1:
        return f"{shape.dp} data-parallel ranks with one sequence each ({settings})"
    sizes = {"ring of": shape.ring, "Ulysses over": shape.ulysses}
    group = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return (f"{shape.dp} data-parallel groups, each {group}" if shape.dp > 1 else group) + f" ({settings})"


def _attention_seconds(config: Config, shape: MeshShape, machine: Machine, window: int | None) -> tuple[float, float]:
    model, masks = config.model, causal_masks(config.model)
    near, far = (interconnect(*link, flops=(machine.gpu or SLOW_GPU).attention) for link in (("nvlink", True), ("nccl", False)))
    return attention_seconds(
        *attention_inputs(config, machine.bf16),
        mask=masks[window],
        layers=count_layers(model, masks),
        ranks=shape.sequence,
        ulysses=shape.ulysses,
        host=machine.ranks_per_host,
        near=near,
        far=far,
        layout=config.parallel.layout,
        schedule=config.parallel.schedule,
    )
