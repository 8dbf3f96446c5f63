"""Take one optimizer step: get this rank's batches and plans, compute the loss, and update the parameters."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from ringattn import Layout
from ringattn.planning.rank_plan import Plan, add_plan, get_plan
from ringattn.train import optim, preemption
from ringattn.train.data.batch import Batch, Shard
from ringattn.train.model import flops
from ringattn.train.model.experts import balance_loss
from ringattn.train.model.loss import IGNORE, cross_entropy
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.mesh import Masks, attention
from ringattn.train.settings.config import ConfigError, ModelConfig
from ringattn.train.setup import InferenceRun, Run

Work = TypeVar("Work")


class ReadyMicroStep(NamedTuple):
    """Holds a micro-step of one rank, with its tokens and plans on the device."""

    masks: Masks
    layout: Layout
    shard: Shard
    plans: Sequence[Plan] = ()  # the plans of attention, if they were computed ahead and the run does not use CUDA graphs
    packed: Sequence[Tensor] = ()  # the plans of attention in the format of the CUDA graphs, in pinned memory


class ReadyStep(NamedTuple):
    """Holds this rank's micro-steps of a training step, and two sums over all ranks."""

    micro_steps: list[ReadyMicroStep]
    num_labels: int  # the number of labels other than IGNORE
    num_pairs: int  # the number of (query, key) pairs that the masks of all layers allow


class ExpertBalance:
    """Sums the load-balancing losses of a step, and counts the tokens per expert over all ranks.

    Args:
        run: a run whose model has experts.
        micro_steps: the number of micro-steps per step.

    Attributes:
        loss: this rank's part of the loss.
        tokens: (layers, experts), the number of tokens of each expert on all ranks.
    """

    def __init__(self, run: Run, micro_steps: int) -> None:
        model = run.config.model
        self._factor, self._share, self._experts_per_token = model.balance_loss, 1 / micro_steps, model.experts_per_token
        self.loss = torch.zeros((), device=run.device)
        self.tokens = torch.zeros(model.layers, model.experts or 0, device=run.device)

    def __call__(self, routing: Tensor) -> Tensor:
        """Return this rank's part of the loss. All ranks call this function. See `GPT.forward`."""
        # The loss covers the tokens of all ranks, so it does not depend on the number of ranks.
        tokens = routing[:, 0].detach().clone()
        dist.all_reduce(tokens)
        loss = self._share * balance_loss(routing, tokens, self._experts_per_token)
        self.loss += loss.detach()
        self.tokens += tokens
        return self._factor * loss

    def imbalance(self) -> Tensor:
        """Return the largest load of an expert in any layer, divided by the mean load."""
        return (self.tokens.amax(-1) / self.tokens.mean(-1)).max()


class Diverged(RuntimeError):
    """Raised if the loss or the gradient norm is not finite."""


def check_finite(outputs: Tensor) -> None:
    """Raise ConfigError if outputs of a model are NaN or infinite. Otherwise, `argmax` would return some token."""
    if not outputs.isfinite().all():
        raise ConfigError("the model computes NaN or infinity: choose another checkpoint, or trainer.precision=fp32")


def take_step(run: Run, step: int, consumed: int) -> tuple[dict[str, float], bool]:
    """Take one optimizer step. All ranks call this function together.

    Args:
        run: its model and optimizer are updated in place.
        step: counted from 1.
        consumed: the number of sequences in earlier steps.

    Returns:
        The record of the step, and whether any rank should stop after it. The record contains `loss` (nats per token),
        `grad_norm` (before clipping) and `lr`. The record also contains `flops` (model FLOPs of all ranks) and `data_wait_s`
        (idle seconds of this rank's device). For experts, the record contains `balance_loss` and `expert_imbalance` (the tokens
        of the busiest expert, relative to the mean). Only `data_wait_s` differs between ranks.

    Raises:
        Diverged: on every rank, if the loss or the gradient norm is not finite. The optimizer has already used these gradients,
            so do not save the model.
        StoppedEarly: on every rank, if any rank received a stop request. The parameters are unchanged.
    """
    start = time.perf_counter()
    ready = prepare_step(run, consumed)
    data_wait = time.perf_counter() - start
    # Each loss is divided by the number of labels of the whole step. The sum over all ranks and micro-steps is therefore the
    # mean.
    num_valid = max(ready.num_labels, 1)
    # One all-reduce sums losses, stop requests and squared gradient norms.
    sums = torch.zeros(3, dtype=torch.float32, device=run.device)
    micro_steps = ready.micro_steps
    balance = None if run.config.model.experts is None else ExpertBalance(run, len(micro_steps))
    try:
        for micro_step in until_stopped(run, micro_steps) if len(micro_steps) > 1 else micro_steps:
            loss = compute_loss(run, micro_step, num_valid, balance)
            # A separate autograd thread would wake up for every backward pass, and compete for Python's lock.
            with torch.autograd.set_multithreading_enabled(False):
                loss.backward()
            if run.graphs is not None:
                run.graphs.finish()
            sums[0] += loss.detach()
    except preemption.StoppedEarly:
        run.optimizer.zero_grad()
        run.host_updates.clear_gradients()
        raise
    # `sums[1] = value` would copy from the CPU and wait until the GPU is idle.
    sums[1].fill_(preemption.stop_requested(run.config.trainer.time_limit_s))
    if balance is not None:
        sums[2] = balance.loss
    sums = torch.cat((sums, optim.squared_norms(run.model, run.host_updates.norms)))
    dist.all_reduce(sums)
    grad_norm = torch.linalg.vector_norm(sums[3:].sqrt())
    results = [sums[:3], grad_norm[None]] + ([] if balance is None else [balance.imbalance()[None]])
    read_results = start_reading(torch.cat(results))
    lr = update(run, step, grad_norm)
    if step < run.config.trainer.steps:
        data_wait += prefetch_step(run, consumed + run.sequences_per_step, micro_steps[-1])
    loss, num_stopping, balancing, grad_norm, *imbalance = read_results()
    loss -= run.config.model.balance_loss * balancing
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        raise Diverged(
            f"step {step}: the loss is {loss:.4g} and the gradient norm {grad_norm:.4g}, so training stopped, and this update "
            "is not saved: lower optim.lr, raise optim.warmup_steps, or resume from an earlier checkpoint"
        )
    total_flops = flops.step_flops(run.model, run.tokens_per_step, ready.num_pairs)
    record = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "flops": total_flops, "data_wait_s": data_wait}
    if balance is not None:
        record |= {"balance_loss": balancing, "expert_imbalance": imbalance[0]}
    return record, num_stopping > 0


def start_reading(x: Tensor) -> Callable[[], list[float]]:
    """Copy `x` to the host. Return a function that waits for the copy, not for later GPU work, and returns the values."""
    if not x.is_cuda:
        return x.tolist
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[float]:
        copied.synchronize()
        return host.tolist()

    return read


def update(run: Run, step: int, grad_norm: Tensor) -> float:
    """Clip the gradients, update the parameters, clear the gradients, and return the learning rate.

    The host does not wait for the GPU. A thread later updates the parameters in host memory.
    """
    config = run.config.optim
    scale = optim.clip_scale(grad_norm, config.clip)
    if config.clip is not None:
        optim.scale_gradients(run.model, scale)
    lr = optim.learning_rate(step, run.config.trainer.steps, config)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    if run.host_updates.groups:
        run.host_updates.start(start_reading(scale[None]))
    run.optimizer.step()
    run.optimizer.zero_grad()
    stays_gathered = not estimate.reshard_after_forward(run.config.model, run.bf16)
    if step < run.config.trainer.steps and stays_gathered and run.plan.host_blocks == 0:
        # Gather the parameters now, because in the next step, the GPU would wait until the host launches the gather.
        cast("FSDPModule", run.model).unshard()
    return lr


def prepare_step(run: Run, consumed: int) -> ReadyStep:
    """Get the micro-steps of a step from the loader, and copy tokens and plans to the device.

    A second call for the same step returns the same result. All data-parallel ranks call this function together. The argument
    `consumed` is the number of sequences in earlier steps.
    """
    if consumed in run.prepared:
        return run.prepared[consumed]
    micro_steps = run.loader.get(consumed)
    totals = [(int((x.batch.labels != IGNORE).sum()), count_pairs(run.config.model, x.masks, x.batch)) for x in micro_steps]
    sums = torch.tensor(totals, device="cpu").sum(0)
    dist.all_reduce(sums, group=run.mesh.dp.get_group())
    rank, ready = run.mesh.sequence.get_local_rank(), list[ReadyMicroStep]()
    for batch, masks, layout, plans, _ in micro_steps:
        shard = Shard.of(batch, layout, rank, run.device)
        if run.graphs is not None:
            ready.append(ReadyMicroStep(masks, layout, shard, packed=run.graphs.pack(masks, layout, plans)))
        else:
            ready.append(ReadyMicroStep(masks, layout, shard, [plan.to(run.device) for plan in plans]))
    run.prepared.clear()
    run.prepared[consumed] = ReadyStep(ready, *sums.tolist())
    return run.prepared[consumed]


def prefetch_step(run: Run, consumed: int, current: ReadyMicroStep) -> float:
    """Call `prepare_step` for the next step while the GPU is still working on the current step.

    Returns:
        The seconds that the preparation took, or 0 if the GPU is still busy.
    """
    start = time.perf_counter()
    if run.graphs is None:
        where = current.layout.whole, run.mesh.ring.get_local_rank(), run.device
        run.loader.learn([get_plan(mask, *where).requests() for mask in current.masks.values()])
    prepare_step(run, consumed)
    is_busy = run.device.type == "cuda" and not torch.cuda.current_stream().query()
    return 0.0 if is_busy else time.perf_counter() - start


def count_pairs(model: ModelConfig, masks: Masks, batch: Batch) -> int:
    """Count the (query, key) pairs that the masks allow, in all layers and sequences together."""
    pairs = {window: mask.pairs(batch.tokens.shape[1]) for window, mask in masks.items()}
    # Without documents, `mask.pairs` has a single entry for all sequences.
    return sum(sum(pairs[window]) * (len(batch.tokens) // len(pairs[window])) for window in model.windows)


def compute_loss(
    run: Run, micro_step: ReadyMicroStep, num_valid: int, balance: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return this rank's part of the loss of a micro-step (`ringattn.train.model.loss.cross_entropy`).

    With `balance` (see `GPT.forward`), the result includes the load-balancing loss.
    """
    masks, layout, shard, plans, packed = micro_step
    if run.graphs is not None:
        return run.graphs.compute_loss(shard.tokens, shard.positions, shard.labels, packed) / num_valid
    for plan in plans:
        add_plan(plan)
    finish = partial(
        cross_entropy, labels=shard.labels, vocab_size=run.tokenizer.vocab_size, num_valid=num_valid, compiled=run.compiled
    )
    attend = attention(run.config, run.mesh, masks, layout, training=True, recompute=run.plan.recomputed_blocks > 0)
    return run.model(shard.tokens, shard.positions, attend, finish, balance)


def until_stopped(run: InferenceRun, batches: Iterable[Work]) -> Iterator[Work]:
    """Yield `batches` until any rank receives a stop request. All ranks must pass the same number of batches.

    After a request to stop, at most two more batches are yielded.

    Raises:
        StoppedEarly: on every rank, after any rank has received a stop request.
    """
    read_request = None
    for batch in batches:
        # Read the stop flag of each batch one batch later, so that the CPU never waits for the current batch. Reading the flag
        # also keeps the CPU from launching all batches at once.
        if read_request is not None and any(read_request()):
            raise preemption.StoppedEarly
        request = torch.zeros(1, device=run.device).fill_(preemption.stop_requested(run.config.trainer.time_limit_s))
        dist.all_reduce(request, dist.ReduceOp.MAX)
        read_request = start_reading(request)
        yield batch


def forward(run: InferenceRun, batch: Batch, masks: Masks, layout: Layout, loss_fn: Callable[..., Tensor]) -> Tensor:
    """Return `loss_fn(hidden, head, labels=labels)` for this rank's tokens, for use outside of training steps.

    `hidden` are the last hidden states, and `head` is the weight of the output head.
    """
    shard = Shard.of(batch, layout, run.mesh.sequence.get_local_rank(), run.device)
    attend = attention(run.config, run.mesh, masks, layout, training=False)
    return run.model(shard.tokens, shard.positions, attend, partial(loss_fn, labels=shard.labels))
