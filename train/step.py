"""One optimizer step: which sequences, who holds which of their tokens, the loss, and the update."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, Mask, balanced_layout, plan_ahead, ulysses_attention
from ringattn.train import optim
from ringattn.train.config import Config
from ringattn.train.data.packing import Batch
from ringattn.train.model import flops
from ringattn.train.model.loss import IGNORE, cross_entropy
from ringattn.train.parallel import mesh as parallel
from ringattn.train.setup import Run, compiles


class Diverged(RuntimeError):
    """The loss or the gradients are not finite: going on would only write bad checkpoints."""


def take_step(
    run: Run, step: int, consumed: int, asked_to_stop: Callable[[], bool] = lambda: False
) -> tuple[dict[str, float], bool]:
    """One optimizer step on the sequences from `consumed` on.

    Args:
        step: from 1.
        asked_to_stop: whether this rank was.

    Returns:
        loss (nats a token), grad_norm (before clipping), lr, flops (of all ranks); and whether any rank was asked to stop.
    """
    batches = fetch(run, consumed)
    masks = [mask_of(run.config, batch) for batch in batches]
    totals = torch.tensor([[int((batch.labels != IGNORE).sum()) for batch in batches], list(map(_pairs, masks, batches))])
    dist.all_reduce(totals, group=run.mesh.dp.get_group())
    num_valid, num_pairs = totals.sum(1).tolist()
    sums = torch.zeros(2, device=run.device)  # the loss, and how many ranks were asked to stop
    for batch, mask in zip(batches, masks, strict=True):
        share = share_of_loss(run, batch, mask, num_valid)
        # in this thread: another one would be woken for every backward, and hold Python's lock in turns with it
        with torch.autograd.set_multithreading_enabled(False):
            share.backward()
        sums[0] += share.detach()
    if asked_to_stop():
        sums[1] = 1
    dist.all_reduce(sums)
    most = math.inf if run.config.optim.clip is None else run.config.optim.clip
    grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), most).full_tensor()
    if step < run.config.trainer.steps:
        prepare(run, consumed + run.sequences_per_step, masks[-1])
    loss, num_asked = sums.tolist()
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        raise Diverged(
            f"step {step}: the loss is {loss:.4g} and the gradient norm {grad_norm:.4g}, so training stopped before this "
            "update: lower optim.lr, raise optim.warmup_steps, or resume from an earlier checkpoint"
        )
    lr = optim.learning_rate(step, run.config.trainer.steps, run.config.optim)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    run.optimizer.step()
    run.optimizer.zero_grad()
    total_flops = flops.step_flops(run.model, run.tokens_per_step, num_pairs)
    return {"loss": loss, "grad_norm": float(grad_norm), "lr": lr, "flops": total_flops}, num_asked > 0


def fetch(run: Run, consumed: int) -> list[Batch]:
    """This rank's whole sequences of a step, one batch a micro-step.

    In each micro-step every data-parallel rank takes the next `batch_size` sequences; the ranks of a ring share them.
    """
    if run.fetched and run.fetched[0] == consumed:
        return run.fetched[1]
    size, dp = run.config.trainer.batch_size, run.mesh.dp
    starts = [
        consumed + (micro_step * dp.size() + dp.get_local_rank()) * size for micro_step in range(run.config.trainer.accumulate)
    ]
    run.fetched = consumed, [run.data.batch(range(start, start + size)) for start in starts]
    return run.fetched[1]


def prepare(run: Run, consumed: int, last: Mask) -> None:
    """Fetch and plan the next step while GPUs still work on this one, the mask of whose last micro-step is `last`."""
    mask = mask_of(run.config, fetch(run, consumed)[0])
    layout, like = (layout_of(run.config, run.mesh, x).whole for x in (mask, last))
    plan_ahead(mask, layout, (last, like), group=run.mesh.ring.get_group(), device=run.device)


def mask_of(config: Config, batch: Batch) -> Mask:
    """Which tokens of a batch see each other."""
    return Mask.causal(config.model.window, batch.documents if config.data.mask_documents else None)


def layout_of(config: Config, mesh: parallel.Mesh, mask: Mask) -> Layout:
    """Which tokens of a batch each rank of a sequence holds."""
    kind, seq_len, ring = config.parallel.layout, config.data.seq_len, mesh.ring.size()
    whole = balanced_layout(mask, seq_len, ring) if kind == "auto" else Layout(kind, seq_len, ring)
    return whole.split(mesh.ulysses.size())


def _pairs(mask: Mask, batch: Batch) -> int:
    pairs = mask.pairs(batch.tokens.shape[1])
    return sum(pairs) * (len(batch.tokens) // len(pairs))  # one entry stands for all rows where they share the mask


def share_of_loss(run: Run, batch: Batch, mask: Mask, num_valid: int) -> Tensor:
    """The loss on this rank's rows of the batch, divided by the number of valid labels of the whole step."""
    options = dict(vocab_size=run.tokenizer.vocab_size, num_valid=max(num_valid, 1), compiled=compiles(run.config, run.device))
    return forward(run, batch, mask, layout_of(run.config, run.mesh, mask), partial(cross_entropy, **options))


def forward(run: Run, batch: Batch, mask: Mask, layout: Layout, finish: Callable[..., Tensor]) -> Tensor:
    """What `finish(hidden, head, labels=...)` makes of this rank's rows of the batch, which `layout` gives it."""
    rank = run.mesh.sequence.get_local_rank()
    attend = partial(
        ulysses_attention,
        layout=layout,
        mask=mask,
        ulysses_group=run.mesh.ulysses.get_group(),
        ring_group=run.mesh.ring.get_group(),
        schedule=run.config.parallel.schedule,
        backend=run.config.parallel.kernel,
        recompute_all_to_all=run.recompute,
    )
    tokens, labels = (layout.shard(x, rank).to(run.device) for x in (batch.tokens, batch.labels))
    return run.model(tokens, layout.positions(rank).to(run.device), attend, partial(finish, labels=labels))
