"""The step of one token, whose position is on the device, gives the logits of the eager step and of a model without a cache."""

from functools import partial

import pytest
import torch
from torch import Tensor

from ringattn import KVCache, Layout, Mask, ring_attention
from ringattn.train.inference import layer_cache
from ringattn.train.inference.layer_cache import new_cache
from ringattn.train.inference.token_step import TokenStep, copy_for_one_rank
from ringattn.train.model.gpt import GPT
from tests.train.inference.test_generation import random_model
from tests.train.model.test_gpt import build
from tests.train.plain import plain_attention

TOKENS = [5, 1, 7, 7, 3, 0, 2, 9, 4]
PROMPT = 4
KINDS = {"full": {}, "window": dict(window=3), "long window": dict(window=6)}
KINDS |= {"mixed": dict(window=3, layer_types=["sliding", "full-nope"])}

CPU = torch.device("cpu")


def last_logits(hidden: Tensor, head: Tensor) -> Tensor:
    return hidden[0, -1:] @ head.T


def prefill(model: GPT, device: torch.device | str) -> list[KVCache]:
    """The caches of all layers after the prompt."""
    windows, layout = model.config.windows, Layout.contiguous(PROMPT, 1)
    caches = [new_cache(window, len(TOKENS)) for window in windows]

    def attend(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, window: int | None) -> Tensor:
        layer_cache.prefill(cache, k, v, layout, None)
        return ring_attention(q, k, v, layout=layout, mask=Mask.causal(window))

    layers = [partial(attend, cache=cache, window=window) for cache, window in zip(caches, windows, strict=True)]
    model(torch.tensor([TOKENS[:PROMPT]], device=device), torch.arange(PROMPT, device=device), layers, last_logits)
    return caches


def expected_logits(model: GPT, length: int) -> Tensor:
    """The logits after `length` tokens, from PyTorch's attention over the whole sequence."""
    attend = [plain_attention(Mask.causal(window)) for window in model.config.windows]
    return model(torch.tensor([TOKENS[:length]]), torch.arange(length), attend, last_logits)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_equals_the_model_without_a_cache(kind: str) -> None:
    model = random_model(**KINDS[kind])
    step = TokenStep(copy_for_one_rank(model, torch.float32, CPU), prefill(model, "cpu"), last_logits, "auto")
    for position in range(PROMPT, len(TOKENS)):
        logits = step(TOKENS[position], position)
        torch.testing.assert_close(logits, expected_logits(model, position + 1), rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_replayed_step_equals_the_model_without_a_cache(kind: str) -> None:
    """One graph generates all tokens."""
    model = random_model(**KINDS[kind])
    expected = [expected_logits(model, n) for n in range(PROMPT + 1, len(TOKENS) + 1)]
    model = model.cuda()
    step = TokenStep(
        copy_for_one_rank(model, torch.float32, model.embedding.device), prefill(model, "cuda"), last_logits, "auto"
    )
    step.capture(PROMPT)
    for position, logits in zip(range(PROMPT, len(TOKENS)), expected, strict=True):
        torch.testing.assert_close(step(TOKENS[position], position).cpu(), logits, rtol=1e-3, atol=1e-3)


def test_the_copy_has_the_dtype_and_the_device_of_the_computation() -> None:
    """Weights are shared if they already have the dtype. Weights in host memory are copied to the device."""
    model = build()
    assert copy_for_one_rank(model, torch.float32, CPU).embedding.data_ptr() == model.embedding.data_ptr()
    copy = copy_for_one_rank(model, torch.bfloat16, CPU)
    assert {x.dtype for x in copy.parameters()} == {torch.bfloat16}
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(copy.parameters(), model.parameters(), strict=True))
    assert all(x.is_meta for x in copy_for_one_rank(model, torch.float32, torch.device("meta")).parameters())
