"""Blocks that compute in chunks of tokens have the same losses and gradients as blocks that compute all tokens at once."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringattn import Mask, flash_attention, save_attention
from ringattn.train.model.gpt import GPT, Block
from ringattn.train.parallel.memory.activations import HostActivations, offload_blocks
from ringattn.train.parallel.memory.chunks import chunk_blocks, run_in_chunks
from ringattn.train.parallel.shard import compile_blocks
from ringattn.train.settings.config import ModelConfig

TOKENS = 24
SMALL = dict(layers=2, dim=16, heads=4, kv_heads=2, window=10)
MODELS = {
    "dense": dict(qkv_bias=True, qk_norm=True, norm_position="both"),
    "experts": dict(experts=3, experts_per_token=2, ffn_dim=16, expert_bias=True, sinks=True),
    "parallel": dict(parallel=True, norm="layer", layer_types=["sliding", "full-nope"]),
}


def run(options: dict, chunk: int | None, kind: str = "keep", compiled: bool = False) -> list[Tensor]:
    """Return the loss and the gradients of all parameters after one forward and backward pass in float64.

    `kind` is "keep", "recompute" or "offload".
    """
    config = ModelConfig(**SMALL | options)
    model = GPT(config, 64)
    for module in (model, *model.blocks):
        module.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)), alpha=0.1)
    model.double()
    if compiled:
        compile_blocks(model)
    if chunk:
        chunk_blocks(model, chunk)
    host = HostActivations(torch.device("cpu"), buffer_bytes=1024)
    if kind == "recompute":
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=save_attention)
    elif kind == "offload":
        offload_blocks(model.blocks, 1, host)
    attends = [partial(flash_attention, mask=Mask.causal(window)) for window in config.windows]
    tokens = torch.randint(64, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    balance = None if config.experts is None else lambda routing: routing.prod(1).mean()
    # Every logit has another weight, so that exchanged tokens would change the gradients.
    weights = torch.linspace(1, 2, 2 * TOKENS * 64, dtype=torch.float64).view(2, TOKENS, 64)
    loss = model(tokens, torch.arange(TOKENS), attends, lambda x, head: (weights * (x @ head.T)).sin().mean(), balance)
    loss.backward()
    return [loss.detach(), *(x.grad for x in model.parameters())]


@pytest.mark.parametrize("kind", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_all_tokens_at_once(name, kind):
    expected = run(MODELS[name], None)
    tolerance = 1e-6 if name == "experts" else 1e-12  # The probabilities of a router are fp32.
    for chunk in (7, 12):  # 24 tokens are four chunks of 6 tokens, or two chunks
        for result, wanted in zip(run(MODELS[name], chunk, kind), expected, strict=True):
            scale = float(wanted.abs().max())
            assert scale > 0
            torch.testing.assert_close(result, wanted, rtol=0, atol=tolerance * scale)


def test_gradients_of_weights_are_summed_in_fp32():
    """A sum of 512 ones in bf16 would be 256."""
    linear = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    (out,) = run_in_chunks(linear, lambda x: (linear(x),), 1, False, torch.ones(1, 512, 1, dtype=torch.bfloat16))
    out.sum().backward()
    assert linear.weight.grad.dtype == torch.bfloat16
    assert linear.weight.grad.item() == 512


@pytest.mark.parametrize("kind", ["keep", "recompute", "offload"])
def test_every_chunk_is_computed_twice(kind, monkeypatch):
    """The recomputation of a block does not compute `after`, because the backward pass of its chunks does."""
    calls, after = [], Block.after

    def record(block, x, attention):
        calls.append((x.shape[1], torch.is_grad_enabled()))  # FP8 layers compute in bf16 without gradients.
        return after(block, x, attention)

    monkeypatch.setattr(Block, "after", record)
    run({}, 8, kind)
    assert calls == [(8, True)] * (2 * 2 * 3)


def test_evaluation_computes_in_chunks(monkeypatch):
    lengths, before = [], Block.before
    monkeypatch.setattr(Block, "before", lambda block, x, *angles: lengths.append(x.shape[1]) or before(block, x, *angles))
    model = GPT(ModelConfig(**SMALL), 64)
    for module in (model, *model.blocks):
        module.init_weights(torch.Generator().manual_seed(0))
    tokens, attend = torch.arange(20)[None], partial(flash_attention, mask=Mask.causal(10))
    with torch.no_grad():
        expected = model(tokens, torch.arange(20), attend, lambda x, head: x)
        chunk_blocks(model, 9)
        torch.testing.assert_close(model(tokens, torch.arange(20), attend, lambda x, head: x), expected)
    assert lengths == [20, 20, *[7, 7, 6] * 2]


@pytest.mark.slow
def test_compiled_chunks_have_the_same_gradients():
    """Compiled code records the tensors of a chunk in the same way as eager code."""
    expected = run({"layers": 1}, None)
    for result, wanted in zip(run({"layers": 1}, 12, "recompute", compiled=True), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12 * float(wanted.abs().max()))
