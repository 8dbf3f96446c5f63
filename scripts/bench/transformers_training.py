"""Train a model of Hugging Face transformers with FlexAttention on one GPU, as a baseline for `scripts.bench.training`.

    torchrun --nproc_per_node=1 -m scripts.bench.transformers_training --model gemma-3-4b --seq-len 65536 --output outputs/flex

The model has random weights and the settings of a file in configs/model. For speed, this baseline keeps weights and AdamW state
in bf16. The baseline also computes the loss in chunks, and compiles every layer. The experts of gpt-oss use the grouped
products of transformers. Every layer is recomputed in the backward pass, because the activations of long sequences do not fit
into memory. The script trains on random tokens, and writes summary.json in the format of `train/run.py`.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn.train.commands.export import config_json
from ringattn.train.model.gpt import GPT
from ringattn.train.model.loss import cross_entropy
from ringattn.train.settings.config import ModelConfig
from scripts import command, gpus
from scripts.bench.stock_training import load_model_config, summarise


def build(config: ModelConfig, seq_len: int, device: torch.device) -> Any:
    """Create the model of transformers with the settings in `config`. On a CPU, as in tests, attention is eager."""
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = config_json(config, config.vocab_size or 256, seq_len, {"bos_token_id": 0, "eos_token_id": 0}, torch.bfloat16)
    settings: Any = AutoConfig
    settings = settings.for_model(**entries)
    attention = "flex_attention" if device.type == "cuda" else "eager"
    with device:
        model = AutoModelForCausalLM.from_config(settings, attn_implementation=attention, dtype=torch.bfloat16)
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def train(config: ModelConfig, seq_len: int, steps: int, device: torch.device) -> dict[str, Any]:
    model, on_gpu = build(config, seq_len, device), device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator, vocabulary = torch.Generator(device).manual_seed(1), model.config.vocab_size
    seconds: list[float] = []
    for step in range(steps):
        start = time.perf_counter()
        tokens = torch.randint(vocabulary, (1, seq_len + 1), generator=generator, device=device)
        hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        head = model.lm_head.weight
        loss = cross_entropy(hidden, head, tokens[:, 1:].contiguous(), vocabulary, seq_len, compiled=on_gpu)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        print(f"step {step + 1}/{steps}  loss {loss.item():.3f}  {seconds[-1]:.3f} s", flush=True)
    with torch.device("meta"):
        ours = GPT(config, vocabulary)
    return summarise(ours, seq_len, statistics.median(seconds[1:]), device, ranks=1)


@command.exit_without_memory()
def main(argv: list[str]) -> None:
    parser = command.new_parser(__doc__)
    parser.add_argument("--model", default="gemma-3-4b", help="a file in configs/model; default: gemma-3-4b")
    parser.add_argument("--seq-len", type=command.at_least(1), default=65536, help="tokens; default: 65536")
    parser.add_argument("--steps", type=command.at_least(2), default=8, help="the first step is not timed; default: 8")
    parser.add_argument("--output", type=Path, required=True, help="a directory for summary.json")
    args = parser.parse_args(argv)
    device = gpus.join_group()
    summary = train(load_model_config(args.model), args.seq_len, args.steps, device)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
