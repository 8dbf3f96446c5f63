"""Train the GPT of this project with only stock PyTorch, as a baseline for `scripts.bench.training`.

    torchrun --nproc_per_node=4 -m scripts.bench.stock_training --model 1.4b --seq-len 65536 --output outputs/stock

The script shards each block with FSDP2, and distributes attention with context_parallel, which uses cuDNN. The script compiles
the operations before and after attention, and uses fused AdamW. The loss is computed from all logits at once. With
--checkpointing, whole blocks are recomputed with torch's activation checkpointing. The training data are random tokens. Rank 0
writes summary.json in the format of `train/run.py`.
"""

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ringattn import Mask
from ringattn.train import optim
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.model import flops
from ringattn.train.model.gpt import GPT, padded_vocabulary
from ringattn.train.parallel.shard import compile_blocks
from ringattn.train.reports.summary import peak_memory_gib
from ringattn.train.settings.config import ModelConfig, OptimConfig
from scripts import command, gpus
from scripts.bench.peers import stock_attention

CONFIGS = command.ROOT / "configs"


def load_model_config(name: str) -> ModelConfig:
    """Return the model settings in the file configs/model/{name}.yaml.

    Raises:
        MissingConfigException: configs/model has no file with this name.
    """
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return ModelConfig(**compose(f"model/{name}").model)


def build(config: ModelConfig, mesh: DeviceMesh, use_checkpointing: bool) -> GPT:
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.device("cuda"):
        model = GPT(config, BytesTokenizer.vocab_size)
    compile_blocks(model)
    options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False))
    blocks: list[Any] = list(model.blocks)
    for block in blocks:
        block.init_weights(generator)
        if use_checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, **options)
    model.init_weights(generator)
    fully_shard(model, **options)
    return model


@torch.compile
def mean_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).flatten(0, 1).float(), labels.flatten())


def take_step(model: GPT, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, sequence: Tensor) -> None:
    """Take one optimizer step on `sequence` (1, S + 1), which context_parallel shards over the mesh."""
    tokens, labels = sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device="cuda")[None]
    buffers = [tokens, labels, positions]
    sharded = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), sharded, torch.autograd.set_multithreading_enabled(False):
        model(tokens, positions, partial(stock_attention, is_causal=True), partial(mean_loss, labels=labels)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def train(config: ModelConfig, seq_len: int, steps: int, use_checkpointing: bool, device: torch.device) -> dict[str, Any]:
    set_rotate_method("allgather")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = build(config, mesh, use_checkpointing)
    optimizer = optim.build(model, OptimConfig())
    generator = torch.Generator(device).manual_seed(1)  # the same on every rank
    shape, vocabulary = (1, seq_len + 1), padded_vocabulary(config, BytesTokenizer.vocab_size)
    seconds = []
    for step in range(steps):
        start = time.perf_counter()
        take_step(model, optimizer, mesh, torch.randint(vocabulary, shape, generator=generator, device=device))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{steps}  {seconds[-1]:.3f} s", flush=True)
    return summarise(model, seq_len, statistics.median(seconds[1:]), device, dist.get_world_size())


def summarise(model: GPT, seq_len: int, seconds: float, device: torch.device, ranks: int) -> dict[str, float | None]:
    """Return the speed and the peak memory if a step takes `seconds`."""
    pairs = sum(sum(Mask.causal(window).pairs(seq_len)) for window in model.config.windows)
    step_flops = flops.step_flops(model, seq_len, pairs)
    return {
        "ranks": ranks,
        "seconds_per_step": seconds,
        "tokens_per_s": seq_len / seconds,
        **flops.utilisation(step_flops / seconds / ranks, flops.peak_flops(device)),
        "peak_memory_gib": peak_memory_gib(device),
    }


@command.exit_without_memory()
def main(argv: list[str]) -> None:
    parser = command.new_parser(__doc__)
    parser.add_argument("--model", default="1.4b", help="a file in configs/model; default: 1.4b")
    parser.add_argument("--seq-len", type=command.at_least(1), default=65536, help="tokens over all ranks; default: 65536")
    parser.add_argument("--steps", type=command.at_least(2), default=8, help="the first step is not timed; default: 8")
    parser.add_argument("--checkpointing", action="store_true", help="recompute blocks in the backward, including attention")
    parser.add_argument("--output", type=Path, required=True, help="a directory for summary.json")
    args = parser.parse_args(argv)
    try:
        config = load_model_config(args.model)
    except MissingConfigException:
        parser.error(f"--model {args.model}: no such file in {CONFIGS / 'model'}")
    device = gpus.join_group()
    summary = train(config, args.seq_len, args.steps, args.checkpointing, device)
    if dist.get_rank() == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
