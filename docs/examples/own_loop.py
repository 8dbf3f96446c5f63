"""Train a model whose sequences are sharded over all ranks. The losses are the same on any number of ranks.

torchrun --nproc_per_node=2 docs/examples/own_loop.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringattn import Layout, Mask, ring_attention

on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, group = dist.get_rank(), dist.group.WORLD
layout, mask = Layout.zigzag(seq_len=256, ranks=dist.get_world_size()), Mask.causal(documents=[100, 156])

torch.manual_seed(0)  # the same weights and the same tokens on all ranks
embed, to_qkv, to_logits = torch.nn.Embedding(64, 64), torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)
model = torch.nn.ModuleList([embed, to_qkv, to_logits]).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.randint(64, (1, 256), device=device)
labels = tokens.roll(-1, dims=1)
labels[:, [99, 255]] = -100  # the last token of a document has no label
own_tokens, own_labels = layout.shard(tokens, rank), layout.shard(labels, rank)

for step in range(10):
    q, k, v = to_qkv(embed(own_tokens)).unflatten(-1, (3, 4, 16)).unbind(2)  # each (1, tokens of this rank, 4 heads, 16)
    logits = to_logits(ring_attention(q, k, v, layout=layout, mask=mask, group=group).flatten(2))
    loss = F.cross_entropy(logits.flatten(0, 1), own_labels.flatten(), reduction="sum") / (labels >= 0).sum()
    optimizer.zero_grad()
    loss.backward()
    for x in (loss.detach(), *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(x)  # every rank has computed the contribution of its own tokens
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}\n" * (rank == 0), end="")
dist.destroy_process_group()
