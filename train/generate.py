"""Sampling from the model that was trained, on its own ring: the whole sequence runs again for every token.

Slow for long texts, but it needs nothing beside the training forward, and shows it at work on growing lengths.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Layout, Mask, ring_attention
from train.model import GPT


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
    """The prompt and `num_tokens` more; all ranks take part and return the same.

    The rank that holds the last position picks the next token and tells the others.

    Args:
        prompt: token ids. It is led by one `eos`, as documents are, or by as many as give every rank a row.
        temperature: of the softmax that is sampled from; 0 takes the likeliest token.
        seed: of the draws, which do not depend on the number of ranks.
    """
    ranks, rank = group.size(), group.rank()
    tokens = [eos] * max(ranks - len(prompt), 1) + prompt
    start = len(tokens) - len(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        layout = Layout.contiguous(seq_len=len(tokens), ranks=ranks)
        attend = partial(
            ring_attention,
            layout=layout,
            mask=Mask.causal(model.config.window),
            group=group,
            backend=backend,
        )
        rows = layout.shard(torch.tensor([tokens]), rank=rank).to(device)
        logits = model(rows, layout.positions(rank).to(device), attend, _last_logits)[:vocab_size]
        token = _pick(logits.float().cpu(), temperature, generator)
        dist.broadcast(token, group=group, group_src=ranks - 1)
        tokens.append(int(token))
    return tokens[start:]


def _last_logits(hidden: Tensor, head: Tensor) -> Tensor:
    return head @ hidden[0, -1]


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[0]
