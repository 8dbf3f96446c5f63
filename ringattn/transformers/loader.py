"""Prepare data loaders of accelerate so that the ranks of a ring receive the same batches."""

import copy
from collections import namedtuple
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import chain, cycle, islice
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard, get_sampler, prepare_data_loader
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, IterableDataset

from ringattn.transformers.batch import IGNORE, inputs_of, next_labels, ring_of, shard_batch


class RingLoader:
    """A `RingLoader` applies `shard_batch` to each batch of a data loader, and yields the arguments of `model(...)`.

    The average of all ranks' losses is the mean over the labels of all rings. Rows that are repeated to fill the last batch
    have no labels.

    Args:
        loader: yields whole batches; not an output of `accelerator.prepare`.
        mesh: as for `put_on_ring`. Other rings receive other batches.
    """

    def __init__(self, loader: DataLoader[Any], mesh: DeviceMesh | None, accelerator: Accelerator) -> None:
        self.mesh, self.accelerator, self.ring_size = mesh, accelerator, ring_of(mesh)[2]
        self.loader = prepare_loader(loader, self.ring_size, accelerator)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            batch = ignore_repeated_rows(batch, self.ring_size, self.accelerator)
            if (labels := next_labels(batch)) is not None and self.accelerator.num_processes > self.ring_size:
                count = self.accelerator.reduce((labels != IGNORE).sum().float(), "mean").clamp(min=1)
                batch = {"num_items_in_batch": count, **batch}
            yield shard_batch(batch, self.mesh)

    def __len__(self) -> int:
        return len(self.loader)


def prepare_loader(loader: DataLoader[Any], ring_size: int, accelerator: Accelerator) -> DataLoader[Any]:
    """Prepare a data loader like `accelerator.prepare`, but count each ring of `ring_size` ranks as one process."""
    if accelerator.dispatch_batches:
        raise ValueError("dispatch_batches=True gives every rank other batches: a ring requires dispatch_batches=False")
    config, rng_types = accelerator.dataloader_config, list(accelerator.rng_types or ())
    rings, ring = accelerator.num_processes // ring_size, accelerator.process_index // ring_size
    if isinstance(loader.dataset, IterableDataset) and rings > 1:
        size = cast("Any", loader.batch_size) // (rings if config.split_batches else 1)
        every: Any = IterableDatasetShard(loader.dataset)
        rows = RowsOfRing(every, size, loader.drop_last, rings, ring)
        loader, collate = copy.copy(loader), partial(collate_rows, loader.collate_fn, ring * size)
        vars(loader).update(dataset=rows, batch_size=size, collate_fn=collate)
        rings, ring = 1, 0
    sampler: Any = get_sampler(loader)
    if getattr(sampler, "generator", ...) is None:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        sampler.generator = torch.Generator(device="cpu").manual_seed(seed)
    prepared: Any = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=rings,
        process_index=ring,
        split_batches=config.split_batches,
        put_on_device=accelerator.device_placement,
        rng_types=rng_types.copy(),
        dispatch_batches=False,
        even_batches=config.even_batches,
        use_seedable_sampler=config.use_seedable_sampler,
        data_seed=config.data_seed,
        non_blocking=config.non_blocking,
        use_stateful_dataloader=config.use_stateful_dataloader,
    )
    if hasattr(sampler, "generator"):
        # With a single ring, accelerate would not send the random generator's state to other ranks.
        prepared.synchronized_generator, prepared.rng_types = sampler.generator, rng_types
    accelerator._dataloaders.append(prepared)
    return prepared


# A row of the last batch. The first `rest` rows of this batch are new, and the others are repeated.
Filled = namedtuple("Filled", "row rest")


class RowsOfRing(IterableDatasetShard):
    """Yields the rows of a ring, and fills the last batch of all rings with the first rows of the dataset."""

    def __iter__(self) -> Generator[Any]:
        total, start = self.num_processes * self.batch_size, self.process_index * self.batch_size
        every, first = iter(self.dataset), list[Any]()
        while (rest := len(rows := list(islice(every, total)))) and not (self.drop_last and rest < total):
            first = first or rows
            if rest < total:
                rows = [Filled(row, rest) for row in islice(chain(rows, cycle(first)), total)]
            yield from rows[start : start + self.batch_size]


def collate_rows(collate: Callable[[list[Any]], Any], start: int, rows: list[Any]) -> Any:
    """Collate the rows of one ring. The index of its first row in the batch of all rings is `start`.

    If repeated rows fill the batch, its entry "rest" counts the rows that are not repeated.
    """
    if not isinstance(rows[0], Filled):
        return collate(rows)
    batch, rest = collate([row for row, _ in rows]), rows[0].rest
    if rest > start and len(inputs_of(batch)) != len(rows):
        batch = collate([row for row, _ in rows[: rest - start]])  # joins rows, so repeated rows must be left out
    return {**batch, "rest": rest}


def ignore_repeated_rows(batch: dict[str, Any], ring_size: int, accelerator: Accelerator) -> dict[str, Any]:
    """Remove the labels of repeated rows, with which accelerate fills the last batch of every ring.

    The loader's attribute `rest` becomes the number of new rows, or 0 if all rows are new. Raise ValueError if the collator has
    joined rows, so that repeated rows cannot be removed.
    """
    state: Any = accelerator.gradient_state
    loader, rings = state.active_dataloader, accelerator.num_processes // ring_size
    if loader is None:  # the caller has taken the batch from elsewhere
        return batch
    rows = len(inputs_of(batch))
    if isinstance(loader.dataset, RowsOfRing):
        loader.rest, rows = batch.get("rest", 0), loader.dataset.batch_size
        batch = {name: value for name, value in batch.items() if name != "rest"}
    elif state.remainder > 0 and rings > 1 and rows * rings != loader.total_batch_size:
        raise ValueError(f"the collator joins rows: use drop_last=True, or a multiple of {loader.total_batch_size} rows")
    else:
        last = rows if state.remainder == -1 and rings == 1 else state.remainder  # -1: a data set without a length
        loader.rest = max(0, last) if state.end_of_dataloader else 0
    if not loader.rest or rings == 1:
        return batch
    first = accelerator.process_index // ring_size * rows
    is_repeated = torch.arange(len(inputs_of(batch)), device=accelerator.device)[:, None] >= loader.rest - first
    present = [name for name in ("labels", "shift_labels") if batch.get(name) is not None]
    return {**batch, **{name: batch[name].masked_fill(is_repeated.to(batch[name].device), IGNORE) for name in present}}
