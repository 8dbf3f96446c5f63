"""Cross-entropy in chunks equals PyTorch's, with gradients, for any chunk size, dtype and distribution over ranks."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from ringattn.train.model import loss as loss_module
from ringattn.train.model.loss import IGNORE, cross_entropy, token_losses


def problem(tokens: int, vocab_size: int, dtype=torch.float32):
    """Return hidden (2, tokens, 16), head (64, 16), and labels, a third of which are IGNORE."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, tokens, 16, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(64, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocab_size, (2, tokens), generator=generator)
    labels[torch.rand(2, tokens, generator=generator) < 1 / 3] = IGNORE
    return hidden, head, labels


def expected(hidden, head, labels, vocab_size, num_valid):
    logits = hidden.double() @ head.double()[:vocab_size].T
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum") / num_valid


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
@pytest.mark.parametrize("vocab_size", [57, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"])
def test_loss_and_gradients_equal_those_of_pytorch(chunk, vocab_size, dtype, tolerance):
    hidden, head, labels = problem(63, vocab_size, dtype)
    loss = cross_entropy(hidden, head, labels, vocab_size, num_valid=50, chunk=chunk)
    reference = expected(hidden, head, labels, vocab_size, 50)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), reference, rtol=tolerance, atol=tolerance)
    grads, expected_grads = (torch.autograd.grad(3 * x, (hidden, head)) for x in (loss, reference))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert grad.dtype == dtype
        torch.testing.assert_close(grad, expected_grad.to(dtype), rtol=tolerance, atol=tolerance)


def test_chunks_are_longer_for_small_vocabularies():
    """The logits of a vocabulary of bytes need little memory, and few large chunks need few kernels."""
    assert loss_module.chunk_size(320) == 209_715
    assert loss_module.chunk_size(50_304) == loss_module.chunk_size(128_256) == 2048


@pytest.mark.parametrize("chunk", [7, 1000])
def test_the_loss_of_every_token_equals_that_of_pytorch(chunk):
    hidden, head, labels = problem(63, 57)
    losses = token_losses(hidden.detach(), head.detach(), labels, 57, chunk)
    reference = F.cross_entropy((hidden @ head[:57].T).mT, labels, ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(losses, reference.detach())


@pytest.mark.slow
def test_compiled_code_gives_the_same_loss_and_gradients(monkeypatch):
    """The operations can be traced without a graph break, for chunks of two sizes. The backend only replays the trace."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    loss_module._compiled.cache_clear()
    results = []
    for compiled in (False, True):
        hidden, head, labels = problem(40, 57)
        loss = cross_entropy(hidden, head, labels, 57, num_valid=10, chunk=32, compiled=compiled)
        results.append((loss, *torch.autograd.grad(loss, (hidden, head))))
    loss_module._compiled.cache_clear()
    torch.testing.assert_close(results[1], results[0])


def test_ignored_tokens_and_padding_rows_have_no_gradient():
    hidden, head, labels = problem(40, 50)
    cross_entropy(hidden, head, labels, 50, num_valid=10).backward()
    assert hidden.grad[labels == IGNORE].eq(0).all()
    assert hidden.grad[labels != IGNORE].ne(0).any(-1).all()
    assert head.grad[50:].eq(0).all()


def test_losses_of_ranks_with_unequal_numbers_of_tokens_sum_to_the_mean():
    hidden, head, labels = problem(40, 64)
    labels[:, :30] = IGNORE
    num_valid = int((labels != IGNORE).sum())
    rows = torch.arange(40).split([5, 25, 10])
    losses = [cross_entropy(hidden[:, r], head, labels[:, r], 64, num_valid) for r in rows]
    mean = F.cross_entropy((hidden @ head.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(sum(losses), mean)


def test_without_valid_tokens_the_loss_and_its_gradients_are_zero():
    hidden, head, labels = problem(5, 64)
    loss = cross_entropy(hidden, head, torch.full_like(labels, IGNORE), 64, num_valid=1)
    loss.backward()
    assert loss == 0
    assert hidden.grad.eq(0).all()
    assert head.grad.eq(0).all()


@pytest.mark.parametrize(("dtype", "vocab_size"), [(torch.float32, 57), (torch.float32, 64), (torch.bfloat16, 64)])
def test_the_loss_of_a_chunk_creates_one_fp32_matrix(dtype, vocab_size):
    hidden, head, labels = problem(40, vocab_size, dtype)
    logits, matrices = (hidden @ head.T)[0].detach(), []

    class Matrices(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            results = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            matrices.extend(x for x in results if x.dtype == torch.float32 and x.shape == logits.shape)
            return out

    with Matrices():
        loss_module._losses(logits, labels[0], vocab_size, with_gradients=True)
    assert len({x.data_ptr() for x in matrices} - {logits.data_ptr()}) == 1


def test_logits_of_all_tokens_never_exist_at_once():
    """No tensor is larger than the hidden states or the logits of a chunk."""
    hidden, head, labels = problem(512, 64)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    with Sizes():
        cross_entropy(hidden, head, labels, 64, num_valid=1, chunk=32).backward()
    assert max(sizes) <= max(hidden.numel(), 32 * 64)
