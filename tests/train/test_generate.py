"""Generation with caches against running the whole sequence again for every token."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringattn import Mask
from ringattn.train.generate import generate
from ringattn.train.model.gpt import GPT
from tests.distributed import run_ranks
from tests.train.model.test_gpt import VOCAB, build

EOS = VOCAB - 1
PROMPTS = ([], [7], list(range(30)))
NUM_TOKENS = 20


def trained(window: int | None) -> GPT:
    """A model whose next token depends on what it has read: with small weights it would repeat itself."""
    model = build(window=window, tie_embeddings=False)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def recomputed(model: GPT, prompt: list[int], num_tokens: int, eos: int = EOS) -> list[int]:
    """The likeliest tokens, up to `eos`, by PyTorch's attention over the whole sequence each time."""

    def attend(q, k, v):
        lo, hi = Mask.causal(model.config.window).intervals(q.shape[1])
        keys = torch.arange(q.shape[1])
        mask = (lo[0, :, None] <= keys) & (keys < hi[0, :, None])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    tokens = [eos, *prompt]
    for _ in range(num_tokens):
        rows = torch.tensor([tokens])
        logits = model(rows, torch.arange(len(tokens)), attend, lambda hidden, head: head @ hidden[0, -1])
        token = int(logits[:VOCAB].argmax())
        if token == eos:
            break
        tokens.append(token)
    return tokens[1:]


def generated(model: GPT, prompt: list[int], eos: int = EOS, **options) -> list[int]:
    device, group = torch.device("cpu"), dist.group.WORLD
    tokens = generate(model, prompt, NUM_TOKENS, group=group, device=device, vocab_size=VOCAB, eos=eos, **options)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, tokens)
    assert everyone == [tokens] * len(everyone)
    return tokens


def check(expected: dict, early: tuple[int, list[int]], path: Path) -> None:
    """On every rank: the same greedy tokens as without caches; rank 0 writes what it drew at a temperature."""
    assert generated(trained(None), PROMPTS[1], eos=early[0], temperature=0.0) == early[1]
    for (window, i), tokens in expected.items():
        assert generated(trained(window), PROMPTS[i], temperature=0.0) == tokens
    drawn = generated(trained(None), [1, 2, 3], temperature=1.0, seed=5)
    if dist.get_rank() == 0:
        torch.save(drawn, path / f"{dist.get_world_size()}.pt")


@pytest.fixture(scope="module")
def expected() -> dict:
    return {
        (window, i): recomputed(trained(window), prompt, NUM_TOKENS) for window in (None, 6) for i, prompt in enumerate(PROMPTS)
    }


@pytest.fixture(scope="module")
def early() -> tuple[int, list[int]]:
    """An `eos` that the model writes before it has to end, and the tokens up to there."""
    texts = ((eos, recomputed(trained(None), PROMPTS[1], NUM_TOKENS, eos)) for eos in range(VOCAB))
    return next((eos, tokens) for eos, tokens in texts if 3 < len(tokens) < NUM_TOKENS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("drawn")


@pytest.mark.parametrize("ranks", (1, 2, 3, 4), ids=lambda n: f"P{n}")
def test_the_tokens_are_those_of_the_whole_recomputed(ranks: int, expected: dict, early: tuple, directory: Path) -> None:
    run_ranks(check, ranks, directory / f"ranks{ranks}", expected, early, directory)
    drawn = torch.load(directory / f"{ranks}.pt")
    assert len(set(drawn)) > 5 and drawn == torch.load(directory / "1.pt")


def test_the_text_is_not_trivial(expected: dict) -> None:
    """Else the comparison above would show nothing."""
    assert all(len(set(tokens[-NUM_TOKENS:])) > 3 for tokens in expected.values())
    assert expected[None, 2] != expected[6, 2]
