"""Compare the training of a Hugging Face model on rings with the same training in one process.

    torchrun --nproc_per_node=8 -m scripts.check.parity                    # a tiny model with random weights
    torchrun --nproc_per_node=8 -m scripts.check.parity --model FOLDER     # a model of your own, in fp32

Run this script before a long training run. The script tests one ring size for each divisor of the number of ranks. The
reference computes one document after the other with the attention of transformers, without a ring, masks or padding. The script
prints the largest difference over all ranks, relative to the largest element of each result. The exit status is 1 if a
difference exceeds the limit. The gradients of LoRA need the package peft.
"""

import argparse
import copy
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringattn.train.commands.messages import exit_process
from ringattn.train.parallel.ranks import connect_ranks, disconnect_ranks, pick_device, sync_errors
from ringattn.train.settings.config import ConfigError
from scripts import command
from scripts.check.model_types import largest_error
from scripts.tables import markdown_table

QUANTITIES = ("training loss", "evaluation loss", "log-probabilities", "gradients", "gradients of LoRA")
LIMIT = 1e-4  # in fp32, typical differences are below 1e-5, and an ignored document or label causes more than 1e-3
IGNORE = -100
MISSING = "not installed"  # instead of a difference, if there is no peft


class Batch(NamedTuple):
    """A batch, and the (row, first token, end) of each document."""

    arguments: dict[str, Tensor]
    documents: list[tuple[int, int, int]]


Row = tuple[int, list[int], int]  # the padding on the left, the lengths of documents, and the padding on the right
# Cases: the rows of every micro-batch, and the number of tokens of a row that have labels.
CASES: dict[str, tuple[list[list[Row]], int | None]] = {
    "one document": ([[(0, [101], 0)]], None),
    "two rows": ([[(0, [64], 0)] * 2], None),
    "packed": ([[(0, [40, 1, 37, 25], 0), (0, [103], 0)]], None),
    "padding on the left": ([[(30, [45], 0), (0, [75], 0)]], None),
    "padding on the right": ([[(0, [20, 9], 46), (0, [75], 0)]], None),
    "accumulation": ([[(0, [101], 0)], [(0, [7], 0)], [(0, [50, 11], 0)]], None),
    "ranks without labels": ([[(0, [96], 0)]], 4),
}


def make_batch(rows: list[Row], labelled: int | None, vocab_size: int, device: torch.device, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    arguments: dict[str, list[Tensor]] = {"input_ids": [], "attention_mask": [], "position_ids": [], "labels": []}
    documents = []
    for i, (left, lengths, right) in enumerate(rows):
        tokens = torch.randint(min(8, vocab_size - 1), vocab_size, (left + sum(lengths) + right,), generator=generator)
        positions, labels = torch.zeros_like(tokens), torch.full_like(tokens, IGNORE)
        end = left
        for length in lengths:
            begin, end = end, end + length
            documents.append((i, begin, end))
            positions[begin:end] = torch.arange(length)
            labels[begin + 1 : end] = tokens[begin + 1 : end]  # the first token cannot be predicted
        labels[left + (labelled or len(tokens)) :] = IGNORE
        mask = torch.zeros_like(tokens)
        mask[left:end] = 1
        for values, value in zip(arguments.values(), (tokens, mask, positions, labels), strict=True):
            values.append(value)
    return Batch({name: torch.stack(values).to(device) for name, values in arguments.items()}, documents)


Results = list[list[Tensor]]  # the tensors of the first four quantities


def in_one_process(model: nn.Module, batches: list[Batch]) -> Results:
    logprobs = []
    for batch in batches:
        tokens, positions, labels = (batch.arguments[name] for name in ("input_ids", "position_ids", "labels"))
        found = torch.zeros(tokens.shape, device=tokens.device)
        for i, begin, end in batch.documents:
            part = slice(i, i + 1), slice(begin, end)
            logits = model(input_ids=tokens[part], position_ids=positions[part], use_cache=False).logits.float()
            losses = F.cross_entropy(logits[0, :-1], labels[i, begin + 1 : end], reduction="none", ignore_index=IGNORE)
            found[i, begin : end - 1] = -losses
        logprobs.append(found)
    count = sum(int((batch.arguments["labels"] != IGNORE).sum()) for batch in batches)
    loss = -torch.stack([x.sum() for x in logprobs]).sum() / count
    loss.backward()
    return [[loss.detach()], [loss.detach()], [x.detach() for x in logprobs], take_gradients(model)]


def on_ring(model: nn.Module, batches: list[Batch], mesh: DeviceMesh | None) -> Results:
    from ringattn.transformers import shard_batch, token_logprobs

    ranks = 1 if mesh is None else mesh.size()
    count = sum(int((batch.arguments["labels"] != IGNORE).sum()) for batch in batches)

    def mean_loss(backward: bool) -> Tensor:
        total = torch.zeros((), device=next(model.parameters()).device)
        for batch in batches:
            arguments = shard_batch(batch.arguments, mesh) | {"num_items_in_batch": torch.tensor(count / ranks)}
            loss = model(**arguments).loss
            if backward:
                loss.backward()
            total += loss.detach()
        return average(total, mesh)

    training = mean_loss(backward=True)
    gradients = [average(x, mesh) for x in take_gradients(model)]
    with torch.no_grad():
        evaluation, logprobs = mean_loss(backward=False), [token_logprobs(model, batch.arguments) for batch in batches]
    return [[training], [evaluation], logprobs, gradients]


def take_gradients(model: nn.Module) -> list[Tensor]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    model.zero_grad(set_to_none=True)
    return gradients


def average(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    if mesh is None:
        return x
    x = x.clone()
    dist.all_reduce(x, group=mesh.get_group())
    return x / mesh.size()


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base: Any = copy.deepcopy(model)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    return get_peft_model(base, config)


def check(make_model: Callable[[], nn.Module], device: torch.device) -> list[list[str]]:
    """Return rows of (ring size, case, difference of each quantity). All ranks return the same rows."""
    from ringattn.transformers import put_on_ring

    models = {"": make_model().to(device)}
    if importlib.util.find_spec("peft"):
        models["LoRA"] = with_lora(models[""])
    config: Any = models[""].config
    vocab_size = config.get_text_config().vocab_size
    batches = {
        name: [make_batch(rows, labelled, vocab_size, device, seed) for seed, rows in enumerate(case)]
        for name, (case, labelled) in CASES.items()
    }
    expected = {(kind, name): in_one_process(model, batches[name]) for kind, model in models.items() for name in CASES}
    world = dist.get_world_size()
    table: list[list[str]] = []
    for size in (size for size in range(1, world + 1) if world % size == 0):
        mesh = init_device_mesh(device.type, (world // size, size), mesh_dim_names=("replicas", "ring"))["ring"]
        for model in models.values():
            put_on_ring(model, mesh)
        for name in CASES:
            results = {kind: on_ring(model, batches[name], mesh) for kind, model in models.items()}
            pairs = list(zip(results[""], expected["", name], strict=True))
            pairs += [(results[kind][3], expected[kind, name][3]) for kind in models if kind]
            errors = torch.tensor([largest_error(*pair) for pair in pairs], device=device)
            dist.all_reduce(errors, dist.ReduceOp.MAX)
            cells = [f"{error:.1e}" for error in errors.tolist()] + [MISSING] * (len(QUANTITIES) - len(errors))
            table.append([str(size), name, *cells])
    return table


def tiny_model() -> nn.Module:
    """Return a model with sliding windows and large random weights, so that attention affects the loss."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_attention_heads=8, num_key_value_heads=2, head_dim=16
    )
    windows = dict(num_hidden_layers=2, sliding_window=16, layer_types=["sliding_attention", "full_attention"])
    config = AutoConfig.for_model("qwen3", **sizes, **windows, use_sliding_window=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    return model


def load_model(folder: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    except Exception as error:  # Each part of transformers raises errors of its own types.
        reason = next(iter(str(error).splitlines()), "")
        raise SystemExit(f"transformers cannot load {folder}: {type(error).__name__}: {reason}") from None
    longest = max(max(lengths) for case, _ in CASES.values() for rows in case for _, lengths, _ in rows)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or longest
    learned = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not model.get_input_embeddings()]
    if learned and positions < longest:
        raise SystemExit(f"{folder} has {positions} learned positions: this check needs a model with at least {longest}")
    return model


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.new_parser(__doc__)
    parser.add_argument("--model", help="the folder of a causal model in Hugging Face's format; the default is a tiny model")
    args = parser.parse_args(argv)
    if args.model is not None and not Path(args.model, "config.json").is_file():
        parser.error(f"argument --model: {args.model} has no config.json: pass the folder of a model in Hugging Face's format")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    model = tiny_model() if args.model is None else load_model(args.model)
    connect_ranks()
    try:
        with sync_errors():
            device = pick_device("auto")
    except ConfigError as error:
        if dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        disconnect_ranks()
        return 1
    try:
        table = check(lambda: model, device)
    except ValueError as error:  # A ring does not support the model.
        reason = f"rank {dist.get_rank()}: {args.model or 'the model'} cannot be checked: {error}"
        disconnect_ranks()
        raise SystemExit(reason) from None
    failures = [row for row in table if any(cell != MISSING and not float(cell) <= LIMIT for cell in row[2:])]
    if dist.get_rank() == 0:
        print(markdown_table(" | ".join(("ring", "data", *QUANTITIES, "limit")), ([*row, f"{LIMIT:.0e}"] for row in table)))
        print(f"{len(failures)} rows exceed the limit" if failures else "every difference is within its limit")
    dist.barrier()
    disconnect_ranks()
    return 1 if failures else 0


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
