"""Take one optimizer step: get the batches of this rank and their plans, compute the loss, and update."""

import math
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, Mask, ulysses_attention
from ringattn.planning.rank_plan import add_plan, get_plan
from ringattn.train import optim, preemption
from ringattn.train.config import Config
from ringattn.train.data.batch import Batch
from ringattn.train.data.loader import MicroStep, choose_layout
from ringattn.train.model import flops
from ringattn.train.model.loss import IGNORE, cross_entropy
from ringattn.train.parallel import memory
from ringattn.train.parallel.mesh import Mesh
from ringattn.train.setup import InferenceRun, Run


class Diverged(RuntimeError):
    """The loss or the gradient norm is not finite. Further steps would only write unusable checkpoints."""


def take_step(run: Run, step: int, consumed: int) -> tuple[dict[str, float], bool]:
    """Take one optimizer step. All ranks call this function together.

    `ringattn.train.trainer.take_steps` calls this function in a loop, and also evaluates and saves checkpoints.

    Args:
        run: the run. This function updates the model and the optimizer of the run in place.
        step: the number of the step, from 1.
        consumed: the number of sequences that earlier steps consumed.

    Returns:
        A pair. The first element is the record of the step. The record contains `loss` (nats per token), `grad_norm` (before
        clipping), `lr`, `flops` (model FLOPs of all ranks together) and `data_wait_s` (seconds in which this rank loaded data
        while its device was idle). The second element is True if any rank should stop after this step. All values except for
        `data_wait_s` are the same on every rank.

    Raises:
        Diverged: on every rank, if the loss or the gradient norm is not finite. The run must then not be saved, because its
            parameters have been updated.
    """
    start = time.perf_counter()
    micro_steps = run.loader.get(consumed)
    data_wait = time.perf_counter() - start
    num_labels = sum(int((micro_step.batch.labels != IGNORE).sum()) for micro_step in micro_steps)
    totals = torch.tensor([num_labels, sum(count_pairs(micro_step.mask, micro_step.batch) for micro_step in micro_steps)])
    dist.all_reduce(totals, group=run.mesh.dp.get_group())
    num_labels, num_pairs = totals.tolist()

    # Each loss is divided by the number of labels of the whole step. The sum of the losses over all ranks and micro-steps is
    # then the mean loss per token.
    loss_fn = partial(cross_entropy, vocab_size=run.tokenizer.vocab_size, num_valid=max(num_labels, 1), compiled=run.compiled)
    # One all-reduce sums the loss, the number of ranks that should stop, and the squared norms of the gradients.
    sums = torch.zeros(2, device=run.device)
    for batch, mask, layout, plan in micro_steps:
        if plan is not None:
            add_plan(plan)
        loss = forward(run, batch, mask, layout, loss_fn, training=True)
        # The backward pass runs in this thread. If it ran in a thread of autograd, that thread would have to wake up for every
        # backward pass, and would compete with this thread for Python's lock.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        sums[0] += loss.detach()
    # The assignment `sums[1] = value` would copy the value from the CPU, and this copy would wait until the GPU is idle.
    sums[1].fill_(preemption.stop_requested(run.config.trainer.time_limit_s))
    sums = torch.cat((sums, optim.squared_norms(run.model)))
    dist.all_reduce(sums)
    grad_norm = torch.linalg.vector_norm(sums[2:].sqrt())
    lr = update(run, step, grad_norm)
    # The CPU prepares the next step while the GPU is still computing. The code below is the first that reads a result, so it
    # must wait for the GPU.
    if step < run.config.trainer.steps:
        data_wait += prefetch_step(run, consumed + run.sequences_per_step, micro_steps[-1])
    loss, num_stopping, grad_norm = torch.cat((sums[:2], grad_norm[None])).tolist()
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        raise Diverged(
            f"step {step}: the loss is {loss:.4g} and the gradient norm {grad_norm:.4g}, so training stopped, and this update "
            "is not saved: lower optim.lr, raise optim.warmup_steps, or resume from an earlier checkpoint"
        )
    total_flops = flops.step_flops(run.model, run.tokens_per_step, num_pairs)
    record = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "flops": total_flops, "data_wait_s": data_wait}
    return record, num_stopping > 0


def update(run: Run, step: int, grad_norm: Tensor) -> float:
    """Clip the gradients, whose norm is `grad_norm`, update the parameters, and clear the gradients.

    If FSDP keeps parameters gathered, those of its root group are gathered again for the next step. The host does not wait
    for the GPU.

    Returns:
        The learning rate of the step.
    """
    config = run.config.optim
    if config.clip is not None:
        optim.clip_gradients(run.model, grad_norm, config.clip)
    lr = optim.learning_rate(step, run.config.trainer.steps, config)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad()
    if step < run.config.trainer.steps and not memory.reshard_after_forward(run.config.model, run.bf16):
        # Otherwise, the GPU would wait for the host until the next step launches this gather.
        run.model.unshard()
    return lr


def prefetch_step(run: Run, consumed: int, current: MicroStep) -> float:
    """Fetch the micro-steps of the next step from the loader, and copy their plans to the GPU.

    Args:
        run: the run.
        consumed: the number of sequences that all steps before the next step consume.
        current: the last micro-step of the current step.

    Returns:
        The seconds that this took, or 0 if the GPU is still working on the current step.
    """
    start = time.perf_counter()
    ring = run.mesh.ring
    run.loader.learn(get_plan(current.mask, current.layout.whole, ring.get_local_rank(), run.device))
    run.loader.get(consumed)
    is_busy = run.device.type == "cuda" and not torch.cuda.current_stream().query()
    return 0.0 if is_busy else time.perf_counter() - start


def layout_of(config: Config, mesh: Mesh, mask: Mask) -> Layout:
    """Return the layout, which assigns the tokens of a sequence to the ranks that share the sequence."""
    return choose_layout(config, mesh.ring.size(), mesh.ulysses.size(), mask)


def count_pairs(mask: Mask, batch: Batch) -> int:
    """Return the number of (query, key) pairs that the mask allows, summed over the sequences of the batch."""
    pairs = mask.pairs(batch.tokens.shape[1])
    # If a mask has no documents, `pairs` has only one entry, which applies to every sequence.
    return sum(pairs) * (len(batch.tokens) // len(pairs))


def forward(
    run: InferenceRun, batch: Batch, mask: Mask, layout: Layout, loss_fn: Callable[..., Tensor], training: bool = False
) -> Tensor:
    """Run the model on this rank's tokens of the batch.

    Args:
        run: the run.
        batch: the batch.
        mask: the attention mask of the batch.
        layout: the layout that selects the tokens of this rank.
        loss_fn: a function of the last hidden states, the weight of the output head, and the labels of this rank's tokens.
        training: whether this forward pass belongs to a training step, see `trainer.fp8_attention`.

    Returns:
        The result of `loss_fn(hidden, head, labels=labels)`. The arguments are the last hidden states, the weight of the output
        head, and the labels of this rank's tokens.
    """
    rank = run.mesh.sequence.get_local_rank()
    attend = partial(
        ulysses_attention,
        layout=layout,
        mask=mask,
        ulysses_group=run.mesh.ulysses.get_group(),
        ring_group=run.mesh.ring.get_group(),
        schedule=run.config.parallel.schedule,
        route=run.config.parallel.route,
        backend=run.config.parallel.kernel,
        precision=run.config.trainer.attention_precision(training),
        recompute_all_to_all=run.recompute,
    )
    shards = layout.shard(batch.tokens, rank), layout.shard(batch.labels, rank), layout.positions(rank)
    if run.device.type == "cuda":
        # A copy from memory that is not pinned would make the host wait for the GPU.
        shards = (x.pin_memory() for x in shards)
    tokens, labels, positions = (x.to(run.device, non_blocking=True) for x in shards)
    return run.model(tokens, positions, attend, partial(loss_fn, labels=labels))
