"""Sampling from the model that was trained, on its own ring.

The prompt runs once, its rows spread over the ranks as in training, and leaves its keys and values where they are. Then one
token at a time runs on all ranks alike, and attends to the caches of all of them.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import KVCache, Layout, Mask, decode_attention, ring_attention
from ringattn.train.model.gpt import GPT


@torch.no_grad()
def generate(
    model: GPT,
    prompt: list[int],
    num_tokens: int,
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    vocab_size: int,
    eos: int,
    backend: str = "auto",
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """The prompt and `num_tokens` more, or fewer where the model ends the document; all ranks take part and return the same.

    The rank that holds the last position picks the next token and tells the others.

    Args:
        prompt: token ids. It is led by one `eos`, as documents are.
        temperature: of the softmax that is sampled from; 0 takes the likeliest token.
        seed: of the draws, which do not depend on the number of ranks.
    """
    ranks, rank = group.size(), group.rank()
    tokens = [eos, *prompt]
    layout = Layout.contiguous(seq_len=len(tokens), ranks=ranks)
    cache = partial(KVCache, len(tokens) + num_tokens, rank, ranks)
    attends = [_CachedAttention(cache(), layout, model.config.window, group, backend) for _ in model.blocks]
    rows, positions = layout.shard(torch.tensor([tokens]), rank), layout.positions(rank)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        logits = model(rows.to(device), positions.to(device), attends, _last_logits)
        token = torch.zeros((), dtype=torch.int64)
        if rank == ranks - 1:
            token = _pick(logits[0, :vocab_size].float().cpu(), temperature, generator)
        dist.broadcast(token, group=group, group_src=ranks - 1)
        rows, positions = token.view(1, 1), torch.tensor([len(tokens)])
        if token == eos:
            break
        tokens.append(int(token))
    return tokens[1:]


@dataclass
class _CachedAttention:
    """Attention in one layer: of the prompt's rows on the ring when called first, of one new token from then on."""

    cache: KVCache
    layout: Layout  # of the prompt
    window: int | None
    group: dist.ProcessGroup
    backend: str

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.cache.length == 0:
            self.cache.prefill(k, v, self.layout)
            mask = Mask.causal(self.window)
            return ring_attention(q, k, v, layout=self.layout, mask=mask, group=self.group, backend=self.backend)
        self.cache.append(k, v)
        return decode_attention(q, self.cache, group=self.group, window=self.window, backend=self.backend)


def _last_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """(1, padded vocabulary), or no row where this rank holds none of the sequence."""
    return hidden[0, -1:] @ head.T


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]
