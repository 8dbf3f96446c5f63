"""Decode new tokens with a cache of keys and values that is sharded over all ranks.

torchrun --nproc_per_node=2 docs/examples/decode.py
"""

import os

import torch
import torch.distributed as dist

from ringattn import KVCache, Layout, Mask, decode_attention, flash_attention, ring_attention

PROMPT, NEW = 1000, 20
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD

generator = torch.Generator(device).manual_seed(0)  # the same tokens on all ranks
q, k, v = (torch.randn(1, PROMPT + NEW, heads, 64, device=device, generator=generator) for heads in (8, 2, 2))

# Every rank computes attention of its own shard of the prompt, and stores the keys and values of this shard.
layout = Layout.zigzag(seq_len=PROMPT, ranks=ranks)
prompt = [layout.shard(x[:, :PROMPT], rank) for x in (q, k, v)]
outputs = [layout.unshard(ring_attention(*prompt, layout=layout, mask=Mask.causal(), group=group), group)]
cache = KVCache(capacity=PROMPT + NEW, rank=rank, ranks=ranks)
cache.prefill(prompt[1], prompt[2], layout)

# For every new token, all ranks pass the same q, k and v. One rank stores the key and value, and all ranks compute the output
# together.
for i in range(PROMPT, PROMPT + NEW):
    cache.append(k[:, i : i + 1], v[:, i : i + 1])
    outputs.append(decode_attention(q[:, i : i + 1], cache, group=group))

expected = flash_attention(q, k, v, mask=Mask.causal())
error = (torch.cat(outputs, dim=1) - expected).abs().max().item()
print(f"rank {rank} holds {cache.rows[rank]} of {cache.length} tokens; largest difference from one rank: {error:.0e}")
dist.destroy_process_group()
