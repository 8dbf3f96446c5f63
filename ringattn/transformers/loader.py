"""Prepare data loaders of accelerate so that the ranks of a ring receive the same batches."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import get_sampler, prepare_data_loader
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from ringattn.transformers.batch import ring_of, shard_batch


class RingLoader:
    """A `RingLoader` applies `shard_batch` to each batch of a data loader, and yields the arguments of `model(...)`.

    Args:
        loader: yields whole batches; not an output of `accelerator.prepare`.
        mesh: as for `put_on_ring`. Other rings receive other batches.
    """

    def __init__(self, loader: DataLoader[Any], mesh: DeviceMesh | None, accelerator: Accelerator) -> None:
        self.mesh, self.loader = mesh, prepare_loader(loader, ring_of(mesh)[2], accelerator)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (shard_batch(batch, self.mesh) for batch in self.loader)

    def __len__(self) -> int:
        return len(self.loader)


def prepare_loader(loader: DataLoader[Any], ring_size: int, accelerator: Accelerator) -> DataLoader[Any]:
    """Prepare a data loader like `accelerator.prepare`, but count each ring of `ring_size` ranks as one process."""
    if accelerator.dispatch_batches:
        raise ValueError("dispatch_batches=True gives every rank other batches: a ring requires dispatch_batches=False")
    config, rng_types = accelerator.dataloader_config, list(accelerator.rng_types or ())
    sampler: Any = get_sampler(loader)
    if getattr(sampler, "generator", ...) is None:
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        sampler.generator = torch.Generator(device="cpu").manual_seed(seed)
    prepared: Any = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=accelerator.num_processes // ring_size,
        process_index=accelerator.process_index // ring_size,
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
        # With a single ring, accelerate would not send the generator's state to the other ranks.
        prepared.synchronized_generator, prepared.rng_types = sampler.generator, rng_types
    accelerator._dataloaders.append(prepared)
    return prepared
