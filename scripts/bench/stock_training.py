"""Training steps of our GPT as one writes them with stock PyTorch alone: the peer of `benchmark_training.py`.

    torchrun --nproc-per-node 4 -m scripts.bench.stock_training --model 1.4b --seq-len 65536 --output outputs/stock

FSDP2 block by block, context_parallel over cuDNN's attention, torch.compile around it, fused AdamW, the loss over all logits at
once; with --checkpointing torch's own activation checkpointing of whole blocks. Causal attention over random tokens. Rank 0
writes summary.json as `train/run.py` does, with the same count of FLOPs.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

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

from ringattn.train import optim
from ringattn.train.config import ModelConfig, OptimConfig
from ringattn.train.data.tokenizer import BytesTokenizer
from ringattn.train.model import flops
from ringattn.train.model.gpt import GPT, padded_vocabulary
from ringattn.train.parallel import mesh as parallel
from ringattn.train.trainer import peak_memory_gib
from scripts.bench import gpus
from scripts.bench.peers import stock_attention

ROOT = Path(__file__).resolve().parents[2]


def model_of(name: str) -> ModelConfig:
    """The settings of a file in configs/model."""
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return ModelConfig(**compose(f"model/{name}").model)


def build(config: ModelConfig, mesh: DeviceMesh, checkpointing: bool) -> GPT:
    """The model on this rank's GPU, sharded."""
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.device("cuda"):
        model = GPT(config, BytesTokenizer.vocab_size)
    parallel.compile_blocks(model)
    options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False))
    for block in model.blocks:
        block.init_weights(generator)
        if checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        fully_shard(block, **options)
    model.init_weights(generator)
    return fully_shard(model, **options)


@torch.compile
def mean_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).flatten(0, 1).float(), labels.flatten())


def take_step(model: GPT, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, sequence: Tensor) -> None:
    """One optimizer step on a `sequence` (1, S + 1), shared out over the mesh."""
    tokens, labels = sequence[:, :-1].contiguous(), sequence[:, 1:].contiguous()
    positions = torch.arange(tokens.shape[1], device="cuda")[None]
    buffers = [tokens, labels, positions]
    around = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), around, torch.autograd.set_multithreading_enabled(False):
        model(tokens, positions, partial(stock_attention, is_causal=True), partial(mean_loss, labels=labels)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1.4b", help="of configs/model; default: 1.4b")
    parser.add_argument("--seq-len", type=int, default=65536, help="tokens, over all ranks; default: 65536")
    parser.add_argument("--steps", type=int, default=8, help="the first is not timed; default: 8")
    parser.add_argument("--checkpointing", action="store_true", help="recompute blocks in the backward, attention too")
    parser.add_argument("--output", type=Path, required=True, help="a directory")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps {arguments.steps}: give 2 or more, the first is not timed")
    try:
        config = model_of(arguments.model)
    except MissingConfigException:
        parser.error(f"--model {arguments.model}: there is none in {ROOT / 'configs' / 'model'}")
    device = gpus.join()
    set_rotate_method("allgather")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = build(config, mesh, arguments.checkpointing)
    optimizer = optim.build(model, OptimConfig())
    generator = torch.Generator(device).manual_seed(1)  # the same on every rank
    shape, vocabulary = (1, arguments.seq_len + 1), padded_vocabulary(config, BytesTokenizer.vocab_size)
    seconds = []
    for step in range(arguments.steps):
        began = time.perf_counter()
        take_step(model, optimizer, mesh, torch.randint(vocabulary, shape, generator=generator, device=device))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{arguments.steps}  {seconds[-1]:.3f} s", flush=True)
    if dist.get_rank() == 0:
        arguments.output.mkdir(parents=True, exist_ok=True)
        summary = summarise(model, arguments.seq_len, statistics.median(seconds[1:]), device)
        (arguments.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    dist.destroy_process_group()


def summarise(model: GPT, seq_len: int, seconds: float, device: torch.device) -> dict[str, float | None]:
    """As the training loop does, for a step of `seconds`."""
    ranks, step_flops = dist.get_world_size(), flops.step_flops(model, seq_len, seq_len * (seq_len + 1) // 2)
    return {
        "ranks": ranks,
        "seconds_per_step": seconds,
        "tokens_per_s": seq_len / seconds,
        **flops.utilisation(step_flops / seconds / ranks, flops.peak_flops(device)),
        "peak_memory_gib": peak_memory_gib(device),
    }


if __name__ == "__main__":
    main()
