"""Masks and attention as Hugging Face models call them."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers import masking_utils

from ringattn.transformers.attention import RingMask, attend, create_mask
from ringattn.transformers.batch import shard_batch

MASKS = {
    "causal": (masking_utils.causal_mask_function, None),
    "window": (masking_utils.sliding_window_causal_mask_function(5), 5),
    "window of one key": (masking_utils.sliding_window_causal_mask_function(1), 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_causal_masks_and_windows_are_recognised(name: str) -> None:
    function, size = MASKS[name]
    assert create_mask(mask_function=function, local_size=size).window == size


OTHER_MASKS = {
    "bidirectional": (masking_utils.bidirectional_mask_function, None),
    "a window of another size": (masking_utils.sliding_window_causal_mask_function(5), 6),
    "a window that is not announced": (masking_utils.sliding_window_causal_mask_function(5), None),
    "a window that is ignored": (masking_utils.causal_mask_function, 5),
    "chunks": (masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), 8),
    "chunks without a tensor": (
        masking_utils.and_masks(lambda b, h, q, k: q // 8 == k // 8, masking_utils.causal_mask_function),
        8,
    ),
    "images": (
        masking_utils.or_masks(
            masking_utils.causal_mask_function, masking_utils.blockwise_overlay(torch.zeros(1, 8, dtype=torch.int64))
        ),
        None,
    ),
}


@pytest.mark.parametrize("name", OTHER_MASKS)
def test_other_masks_are_errors(name: str) -> None:
    function, size = OTHER_MASKS[name]
    with pytest.raises(ValueError, match=r"the model requires the mask .*: attention on a ring supports causal masks"):
        create_mask(mask_function=function, local_size=size)


def call(**changes: object) -> torch.Tensor:
    q = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = shard_batch(
        {"input_ids": torch.zeros(1, 6, dtype=torch.int64), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]])}, None
    )
    arguments = dict(module=SimpleNamespace(is_on_ring=True), query=q, key=q[:, :2], value=q[:, :2], attention_mask=None)
    return attend(**arguments | dict(ring_batch=batch["ring_batch"]) | changes)[0]


def expected(window: int | None = None, sink: torch.Tensor | None = None, scale: float = 8**-0.5) -> torch.Tensor:
    q = torch.randn(1, 4, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = q[:, :2].repeat_interleave(2, 1)
    i = torch.arange(6)
    allowed = (i[:, None] >= i) & ((i[:, None] >= 4) == (i >= 4)) & (i[:, None] - i < (window or 99))
    scores = (scale * q @ keys.mT).masked_fill(~allowed, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.view(1, 4, 1, 1).expand(1, 4, 6, 1)], -1)
    return (scores.softmax(-1)[..., :6] @ keys).transpose(1, 2)


def test_windows_sinks_and_scales_belong_to_the_call() -> None:
    sink = torch.tensor([-1.0, 0.0, 0.5, 1.0], dtype=torch.float64)
    torch.testing.assert_close(call(), expected())
    torch.testing.assert_close(call(sliding_window=2), expected(2))
    torch.testing.assert_close(call(attention_mask=RingMask(3)), expected(3))
    torch.testing.assert_close(call(attention_mask=RingMask(3), sliding_window=3), expected(3))
    torch.testing.assert_close(call(s_aux=sink, scaling=0.7), expected(sink=sink, scale=0.7))


def test_the_gradient_of_sinks() -> None:
    sink = torch.tensor([-1.0, 0.0, 0.5, 1.0], dtype=torch.float64, requires_grad=True)
    grads = [torch.autograd.grad(out.square().sum(), sink)[0] for out in (call(s_aux=sink), expected(sink=sink))]
    torch.testing.assert_close(*grads)


ERRORS = {
    "call put_on_ring": dict(module=SimpleNamespace()),
    "received no ring_batch": dict(ring_batch=None),
    "passes softcap, which": dict(softcap=50.0),
    "passes alibi, position_bias, which": dict(alibi=1, position_bias=2),
    "passes output_attentions, which": dict(output_attentions=True),
    "passes output_router_logits, which": dict(output_router_logits=True),
    "passes is_causal, which": dict(is_causal=0),
    "passes is_causal, .* ring": dict(is_causal=False),
    "requires dropout = 0": dict(dropout=0.1),
    "or is not causal": dict(module=SimpleNamespace(is_on_ring=True, is_causal=False)),
    "attends to 7 keys with 6 queries: a ring supports no cache": dict(key=torch.zeros(1, 2, 7, 8)),
    "passes sliding_window=4, but its mask has 3": dict(sliding_window=4, attention_mask=RingMask(3)),
    "passes sliding_window=4, but its mask has None": dict(sliding_window=4, attention_mask=RingMask(None)),
    "creates a mask of its own": dict(attention_mask=torch.zeros(1, 1, 6, 6)),
}


@pytest.mark.parametrize("message", ERRORS)
def test_unsupported_calls_are_errors(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**ERRORS[message])


def test_neutral_keywords_are_accepted() -> None:
    call(use_cache=True, output_attentions=False, position_ids=torch.zeros(1, 6), is_causal=True, softcap=None)


def test_a_model_that_changes_its_mask_is_rejected() -> None:
    """Hugging Face models may test attributes with `hasattr`."""
    mask = RingMask(None)
    assert not hasattr(mask, "dtype")
    with pytest.raises(ValueError, match="reads dtype of its attention mask"):
        _ = mask.dtype
