"""A loop of plain accelerate on a ring has the losses and parameters of the same loop in one process."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from tests.distributed import RankPool
from tests.ringattn.transformers.small_models import (
    Stream,
    all_processes,
    new_model,
    one_process,
    packed_rows,
    padded_rows,
)

pytest.importorskip("accelerate")


def run(on_ring: bool) -> tuple[list[float], list[torch.Tensor]]:
    from accelerate import Accelerator

    from ringattn.transformers import RingLoader, put_on_ring

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = new_model(), DataLoader(packed_rows(9), batch_size=2, shuffle=True, generator=torch.Generator())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if on_ring:
        mesh = init_device_mesh("cpu", (accelerator.num_processes,))
        put_on_ring(model, mesh)
        loader = RingLoader(loader, mesh, accelerator)
        assert len(loader) == 5
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses, [parameter.detach() for parameter in model.parameters()]


def check_loop() -> None:
    results = []
    all_processes()
    for on_ring in (False, True):
        with nullcontext() if on_ring else one_process():
            results.append(run(on_ring))
    (losses, parameters), (ring_losses, ring_parameters) = results
    assert ring_losses == pytest.approx(losses, rel=1e-5)
    assert len(set(losses)) == 5
    for x, y in zip(ring_parameters, parameters, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def check_order() -> None:
    """The ranks' generators have different seeds, so accelerate must send the state of rank 0."""
    from accelerate import Accelerator

    from ringattn.transformers import RingLoader

    all_processes()
    torch.manual_seed(dist.get_rank())
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(packed_rows(9), shuffle=True)
    assert len(list(RingLoader(loader, init_device_mesh("cpu", (2,)), accelerator))) == 9


def test_all_ranks_shuffle_in_the_same_order(ranks: RankPool) -> None:
    ranks.run(check_order)


def test_a_loop_of_accelerate(ranks: RankPool) -> None:
    ranks.run(check_loop)


def check_last_batch() -> None:
    """On two rings, evaluation has the losses of one process with twice as many rows per batch."""
    from accelerate import Accelerator

    from ringattn.transformers import RingLoader, put_on_ring

    all_processes()
    rows, results = padded_rows(5, "right"), []
    for data in (rows, Stream(rows)):
        for size in (4, 2):
            with one_process() if size == 4 else nullcontext():
                accelerator, model = Accelerator(cpu=True), new_model()
                loader = DataLoader(data, batch_size=size)
                if size == 2:
                    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "ring"))["ring"]
                    put_on_ring(model, mesh)
                    loader = RingLoader(loader, mesh, accelerator)
                found = [model(**batch).loss for batch in loader]
                results.append([accelerator.reduce(loss.detach(), "mean").item() for loss in found])
    assert results == [pytest.approx(results[0], rel=1e-5)] * 4


def test_the_last_batch_of_two_rings(ranks: RankPool) -> None:
    ranks.run(check_last_batch)


def test_dispatched_batches_are_an_error() -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    from ringattn.transformers import RingLoader

    with one_process():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        with pytest.raises(ValueError, match="a ring requires dispatch_batches=False"):
            RingLoader(DataLoader([]), None, accelerator)
