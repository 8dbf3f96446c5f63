"""Tests of generation: with caches, the model generates the same tokens as if every token recomputed the whole sequence."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ringattn import Mask
from ringattn.train.inference.generation import _sample, generate
from ringattn.train.model.gpt import GPT
from ringattn.train.settings.config import Config
from tests.distributed import run_ranks
from tests.train.model.test_gpt import VOCAB, build
from tests.train.plain import plain_attention

EOS = VOCAB - 1
PROMPTS = ([], [7], list(range(30)))
NUM_TOKENS = 12
# With four ranks and the longest prompt, the longer window takes more rows than a shard, so its cache is sharded.
KINDS = {"full": {}, "window": dict(window=6), "long window": dict(window=17)}
KINDS |= {"mixed": dict(window=6, layer_types=["sliding", "full-nope"])}


def random_model(**settings) -> GPT:
    """A model whose next token depends on the earlier ones. With small weights, it would repeat one token."""
    model = build(tie_embeddings=False, **settings)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def generate_without_cache(model: GPT, prompt: list[int], num_tokens: int, eos: int = EOS, bos: int | None = None) -> list[int]:
    """The prompt and the most likely tokens up to `eos`, computed with PyTorch's attention over the whole sequence."""
    attend = [plain_attention(Mask.causal(window)) for window in model.config.windows]
    tokens = [eos if bos is None else bos, *prompt]
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens)), attend, lambda hidden, head: head @ hidden[0, -1])
        token = int(logits[:VOCAB].argmax())
        if token == eos:
            break
        tokens.append(token)
    return tokens[1:]


def generate_on_ranks(model: GPT, prompt: list[int], eos: int = EOS, bos: int | None = None, **options) -> list[int]:
    """The generated tokens, which must be equal on all ranks."""
    run = SimpleNamespace(
        model=model,
        config=Config(),
        device=torch.device("cpu"),
        tokenizer=SimpleNamespace(vocab_size=VOCAB, eos=eos, bos=eos if bos is None else bos),
        mesh=SimpleNamespace(sequence=SimpleNamespace(get_group=lambda: dist.group.WORLD)),
    )
    tokens = generate(run, prompt, NUM_TOKENS, **options)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tokens)
    assert gathered == [tokens] * len(gathered)
    return tokens


def check_tokens(expected: dict, early: tuple[int, list[int]], path: Path) -> None:
    """On every rank: compare the most likely tokens with the expected ones. Rank 0 also saves tokens that are sampled."""
    assert generate_on_ranks(random_model(), PROMPTS[1], eos=early[0], temperature=0.0) == early[1]
    with_bos = generate_without_cache(random_model(), PROMPTS[1], NUM_TOKENS, bos=3)
    assert generate_on_ranks(random_model(), PROMPTS[1], bos=3, temperature=0.0) == with_bos
    for (kind, i), tokens in expected.items():
        assert generate_on_ranks(random_model(**KINDS[kind]), PROMPTS[i], temperature=0.0) == tokens
    sampled = generate_on_ranks(random_model(), [1, 2, 3], temperature=1.0, seed=5)
    if dist.get_rank() == 0:
        torch.save(sampled, path / f"{dist.get_world_size()}.pt")


@pytest.fixture(scope="module")
def expected() -> dict:
    """The expected tokens, by the kind of the model and the number of the prompt."""
    return {
        (kind, i): generate_without_cache(random_model(**KINDS[kind]), prompt, NUM_TOKENS)
        for kind in KINDS
        for i, prompt in enumerate(PROMPTS)
        if i == 2 or kind in ("full", "window")
    }


@pytest.fixture(scope="module")
def early() -> tuple[int, list[int]]:
    """A token for `eos` that the model generates before the limit, and the tokens up to this token."""
    texts = ((eos, generate_without_cache(random_model(), PROMPTS[1], NUM_TOKENS, eos)) for eos in range(VOCAB))
    return next((eos, tokens) for eos, tokens in texts if 3 < len(tokens) < NUM_TOKENS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sampled")


@pytest.fixture(scope="module")
def tokens_of_one_rank(expected: dict, early: tuple, directory: Path) -> list[int]:
    """The sampled tokens of one rank, whose greedy tokens equal the expected ones."""
    run_ranks(check_tokens, 1, directory / "ranks1", expected, early, directory)
    return torch.load(directory / "1.pt")


SLOW_RANKS = [pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 4)]


@pytest.mark.parametrize("ranks", [3, *SLOW_RANKS], ids=lambda n: f"P{n}")
def test_caches_do_not_change_the_generated_tokens(
    ranks: int, expected: dict, early: tuple, directory: Path, tokens_of_one_rank: list[int]
) -> None:
    """Sampled tokens do not depend on the number of ranks either."""
    run_ranks(check_tokens, ranks, directory / f"ranks{ranks}", expected, early, directory)
    assert len(set(tokens_of_one_rank)) > 5
    assert torch.load(directory / f"{ranks}.pt") == tokens_of_one_rank


@pytest.mark.slow
def test_generation_does_not_compile_the_model(tmp_path: Path) -> None:
    run_ranks(check_eager, 1, tmp_path)


def check_eager() -> None:
    compiled = []

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    model = random_model()
    for block in model.blocks:
        block.before = torch.compile(block.before, backend=compiler)
    tokens = generate_on_ranks(model, PROMPTS[1], temperature=0.0)
    assert tokens == generate_on_ranks(random_model(), PROMPTS[1], temperature=0.0)
    assert not compiled
    # Outside of `generate`, the model is compiled.
    model(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1), plain_attention(Mask.causal()), lambda hidden, _: hidden)
    assert compiled


def test_expected_tokens_vary(expected: dict) -> None:
    """If the model repeated one token, the comparison above would not notice errors in the caches."""
    assert all(len(set(tokens[-NUM_TOKENS:])) > 3 for tokens in expected.values())
    assert len({tuple(expected[kind, 2]) for kind in KINDS}) == len(KINDS)


# The probabilities are exact in fp32. Sorted, they sum to 1/2, 3/4, 7/8 and 1.
# Of two equally likely tokens, the first one comes first.
NUCLEI = {0.5: {2}, 0.51: {2, 0}, 0.75: {2, 0}, 0.8: {2, 0, 1}, 0.875: {2, 0, 1}, 0.9: {2, 0, 1, 3}, 1.0: {2, 0, 1, 3}}


@pytest.mark.parametrize("top_p", NUCLEI)
def test_tokens_are_sampled_from_the_nucleus(top_p: float) -> None:
    """The smallest set of the most likely tokens whose probabilities sum to at least top_p, with their relative frequencies."""
    probabilities = torch.tensor([1 / 4, 1 / 8, 1 / 2, 1 / 8])
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.stack([_sample(probabilities.log(), 1.0, top_p, generator) for _ in range(800)]), minlength=4)
    assert set(counts.nonzero()[:, 0].tolist()) == NUCLEI[top_p]
    kept = torch.tensor([p if token in NUCLEI[top_p] else 0.0 for token, p in enumerate(probabilities.tolist())])
    torch.testing.assert_close(counts / 800, kept / kept.sum(), atol=0.06, rtol=0)
