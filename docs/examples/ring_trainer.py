"""Train a model of Hugging Face on packed sequences that are sharded over all ranks. The losses do not depend on the number of
ranks.

torchrun --nproc_per_node=2 docs/examples/ring_trainer.py
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

from ringattn.transformers import RingTrainer

torch.manual_seed(0)  # the same weights on all ranks; usually AutoModelForCausalLM.from_pretrained(...)
sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)
model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_hidden_layers=2))


def packed_row(seed: int) -> dict[str, torch.Tensor]:
    """Two documents that count upwards. At the start of each document, the positions restart at 0, and the first token is not a
    label."""
    begin = torch.randint(64, (2,), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(100), torch.arange(156)])
    tokens = (begin.repeat_interleave(torch.tensor([100, 156])) + positions) % 64
    return {"input_ids": tokens, "position_ids": positions, "labels": tokens.masked_fill(positions == 0, -100)}


with tempfile.TemporaryDirectory() as folder:
    small = dict(max_steps=10, per_device_train_batch_size=1, learning_rate=1e-2, logging_steps=1, lr_scheduler_type="constant")
    quiet = dict(save_strategy="no", report_to=[], disable_tqdm=True)
    args = TrainingArguments(folder, use_cpu=not torch.cuda.is_available(), **small, **quiet)
    trainer = RingTrainer(model=model, args=args, train_dataset=[packed_row(i) for i in range(10)])
    trainer.train()

if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("\n".join(f"step {step}: loss {loss:.3f}" for step, loss in enumerate(losses)))
if dist.is_initialized():
    dist.destroy_process_group()
