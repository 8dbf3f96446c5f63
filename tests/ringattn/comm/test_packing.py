"""Tests of messages that hold all tensors of a block."""

import numpy as np
import pytest
import torch

from ringattn.comm.packing import ALIGNMENT, Packing
from ringattn.comm.transport import take_rows


def block_of(*dtypes: torch.dtype, batch: int = 1, rows: int = 5) -> tuple[torch.Tensor, ...]:
    """A block of tensors of different shapes with small whole numbers."""
    shapes = ((batch, rows, 3, 5), (batch, rows, 3), (batch, rows, 2, 3), (batch, rows, 1))
    return tuple(torch.randint(100, shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False))


def packing_of(block: tuple[torch.Tensor, ...], rows: int) -> Packing:
    """The positions of some rows of a block in a message."""
    return Packing.of(tuple((x.shape[0], x.shape[2:], x.dtype) for x in block), rows)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16),  # k, v
        (torch.float16, torch.bfloat16, torch.float32, torch.float32),  # like q, dout, lse, delta
        (torch.float32, torch.uint8, torch.float64),
        (torch.uint8, torch.uint8, torch.uint8),  # FP8 blocks
        (torch.bfloat16,),
    ],
    ids=str,
)
def test_a_message_holds_all_tensors_of_a_block(dtypes: tuple[torch.dtype, ...], batch: int) -> None:
    """Every tensor starts at a multiple of the alignment, and slices of rows are packed like whole tensors."""
    block = take_rows(block_of(*dtypes, batch=batch), range(1, 4))
    packing = packing_of(block, 3)
    (message, views), (copy, received) = (packing.new_message(torch.device("cpu")) for _ in range(2))
    torch._foreach_copy_(views, block)
    assert message.is_contiguous()
    assert message.nbytes == (packing.size if len(block) > 1 else block[0].nbytes)
    copy.copy_(message)
    for x, y in zip(block, received, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(x, y)
        assert y.is_contiguous()
        assert (y.data_ptr() - copy.data_ptr()) % ALIGNMENT == 0


def test_a_received_block_is_sent_on_without_a_copy() -> None:
    """This also holds after changes in place, such as the merge of a result."""
    block = block_of(torch.float32, torch.float32)
    packing = packing_of(block, 5)
    message, received = packing.new_message(torch.device("cpu"))
    for x, y in zip(received, block, strict=True):
        x.copy_(y).add_(1)
    again = packing.packed(received)
    assert again.data_ptr() == message.data_ptr()
    assert again.nbytes == message.nbytes
    assert packing.packed(block) is None


def test_a_block_of_one_tensor_is_its_own_message() -> None:
    """The block must be copied if its rows are not contiguous, as in slices of heads."""
    x = torch.zeros(1, 5, 4, 2)
    packing = packing_of((x,), 5)
    assert packing.packed((x,)) is x
    assert packing_of((x[:, :, :2],), 5).packed((x[:, :, :2],)) is None


def test_memory_of_messages_can_be_used_outside_of_inference_mode() -> None:
    """The next pass may belong to a training step, which modifies the memory."""
    for block in (block_of(torch.float32), block_of(torch.float32, torch.float32)):
        with torch.inference_mode():
            message, tensors = packing_of(block, 5).new_message(torch.device("cpu"))
        assert not any(x.is_inference() for x in (message, *tensors))


def test_tensors_that_only_seem_to_be_packed() -> None:
    """The addresses fit, but the tensors have separate storages, or one of them is transposed."""
    memory = np.arange(2 * ALIGNMENT, dtype=np.float32)
    halves = memory[:ALIGNMENT], memory[ALIGNMENT:]
    packed = tuple(x.view(1, 8, -1) for x in torch.from_numpy(memory).split(ALIGNMENT))
    separate = tuple(torch.from_numpy(x).view(1, 8, -1) for x in halves)
    transposed = torch.from_numpy(memory)[:ALIGNMENT].view(1, -1, 8).mT, packed[1]
    for block, is_packed in ((packed, True), (separate, False), (transposed, False)):
        message = packing_of(block, 8).packed(block)
        assert (message is not None) == is_packed
    assert torch.equal(packing_of(packed, 8).packed(packed).view(torch.float32), torch.from_numpy(memory))
