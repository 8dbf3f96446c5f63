"""Generate text with the trained model on its own ring of ranks.

The prompt runs through the model once, with its tokens sharded over the ranks as in training, and each rank keeps its keys and
values in a cache. Then one new token at a time runs through the model on all ranks, and attends to the caches of all ranks.
"""

from dataclasses import dataclass

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
    """Sample a continuation of a prompt. All ranks of the group call this function together and return the same tokens.

    The rank that holds the last position samples each token and broadcasts it.

    Args:
        model: the model, with the same parameters on all ranks, or sharded by FSDP.
        prompt: token ids. The model reads one `eos` before them, as before every document in training.
        num_tokens: the largest number of tokens to generate.
        group: the ranks that share the sequence.
        device: the device of the model.
        vocab_size: the number of tokens of the tokenizer. Larger ids, which only pad the embedding, are never sampled.
        eos: the token that ends a document. Generation stops when the model generates it.
        backend: the attention kernels, as in `ring_attention`.
        temperature: divides the logits before the softmax; 0 selects the most likely token.
        seed: the seed of the sampling, which does not depend on the number of ranks.

    Returns:
        The prompt and the generated tokens, without `eos`.
    """
    ranks, rank = group.size(), group.rank()
    tokens = [eos, *prompt]
    layout = Layout.contiguous(seq_len=len(tokens), ranks=ranks)
    attend = [
        _CachedAttention(KVCache(len(tokens) + num_tokens, rank, ranks), layout, model.config.window, group, backend)
        for _ in model.blocks
    ]
    inputs, positions = layout.shard(torch.tensor([tokens]), rank), layout.positions(rank)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        logits = model(inputs.to(device), positions.to(device), attend, _last_logits)
        token = torch.zeros((), dtype=torch.int64)
        if rank == ranks - 1:
            token = _sample(logits[0, :vocab_size].float().cpu(), temperature, generator)
        dist.broadcast(token, group=group, group_src=ranks - 1)
        if token == eos:
            break
        inputs, positions = token.view(1, 1), torch.tensor([len(tokens)])
        tokens.append(int(token))
    return tokens[1:]


@dataclass
class _CachedAttention:
    """The attention of one layer. The first call computes the prompt on the ring; each later call computes one new token."""

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
    """Return the logits of this rank's last token, (1, padded vocabulary), or (0, padded vocabulary) if it has no token."""
    return hidden[0, -1:] @ head.T


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Sample one token from the logits, (vocabulary,)."""
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]
