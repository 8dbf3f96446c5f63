"""Lab 5: compare training steps of GPT-2 in Hugging Face transformers with training steps of this project's GPT.

    python -m scripts.labs.gpt2

The variants `eager` and `sdpa` are transformers' GPT2LMHeadModel with the attention implementations "eager" and "sdpa". The
variant `ringattn` is the GPT of this project, with `flash_attention` and a loss that is computed in chunks. Each variant runs
with and without torch.compile at each length. All weights are random, nothing is downloaded, and no dropout is applied. A step
consists of the forward pass, the backward pass and AdamW.

All variants first train on the same text. The text is the source code of Python's standard library, with one token per byte.
The table contains the loss on text that follows the training text. On a GPU, the models have the shape of GPT-2 124M
(configs/model/124m.yaml) and bf16 parameters. On a CPU, the models are small and use fp32.
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringattn import flash_attention
from ringattn.train import optim
from ringattn.train.commands.errors import is_out_of_memory
from ringattn.train.model.gpt import GPT, Block, padded_vocabulary
from ringattn.train.model.loss import cross_entropy
from ringattn.train.parallel.shard import compile_blocks
from ringattn.train.reports.figures import clean_axes
from ringattn.train.settings.config import ModelConfig, OptimConfig
from scripts import command
from scripts.bench.stock_training import load_model_config
from scripts.labs import measure
from scripts.labs.measure import MIB
from scripts.plots import plt, short_length
from scripts.tables import markdown_table

VARIANTS = ("eager", "sdpa", "ringattn")
SMALL = ModelConfig(vocab_size=1024, layers=2, dim=256, heads=4, kv_heads=4)
LENGTHS = {"cpu": [128, 512], "cuda": [1024, 8192]}
TRAINING_STEPS = 20  # before the loss is compared. The time is measured afterwards.
TIMED_STEPS = 10  # on a GPU
Loss = Callable[[Tensor, Tensor], Tensor]  # the loss of (tokens, labels), both (B, N)


class Row(NamedTuple):
    """The measurements of a training step. If the step ran out of memory, the last four fields are None."""

    variant: str
    compiled: bool
    length: int
    parameters: int
    tokens_per_s: float | None = None
    host_ms: float | None = None  # the time that the host needs to launch a step
    bytes: int | None = None  # the peak memory without parameters and optimizer state
    loss: float | None = None  # nats per token


def build_hugging_face(
    attention: str, config: ModelConfig, max_length: int, device: torch.device, compiled: bool
) -> tuple[nn.Module, Loss]:
    import transformers

    sizes: dict[str, Any] = dict(n_embd=config.dim, n_layer=config.layers, n_head=config.heads, n_positions=max_length)
    sizes |= dict(vocab_size=padded_vocabulary(config, 0), bos_token_id=0, eos_token_id=0)
    gpt2 = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(gpt2, attn_implementation=attention)
    model.loss_type = "ForCausalLM"  # transformers does not recognise the type by the name of this class, and would warn
    run = torch.compile(model) if compiled else model
    # Without shift_labels, transformers shifts the labels by one token.
    return model, lambda tokens, labels: run(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss


def build_ringattn(config: ModelConfig, device: torch.device, compiled: bool) -> tuple[nn.Module, Loss]:
    generator = torch.Generator(device).manual_seed(0)
    with device:
        model = GPT(config, vocab_size=0)
    model.init_weights(generator)
    for block in model.blocks:
        assert isinstance(block, Block)
        block.init_weights(generator)
    if compiled:
        compile_blocks(model)
    attend = partial(flash_attention, is_causal=True)
    vocabulary = padded_vocabulary(config, 0)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        options = dict(labels=labels, vocab_size=vocabulary, num_valid=labels.numel(), compiled=compiled)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return model(tokens, positions, attend, partial(cross_entropy, **options))

    return model, loss


def text_of_steps(steps: int, tokens: int, vocabulary: int) -> Tensor:
    """Return the tokens of Python's standard library, one per byte, as int64 (steps, tokens + 1). Consecutive rows share one
    token.

    Raises:
        ValueError: the text is too short.
    """
    text = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        if len(text) > steps * tokens:
            break
        text += path.read_bytes()
    if len(text) <= steps * tokens:
        raise ValueError(f"{steps} steps of {tokens} tokens are longer than the text, {len(text)} tokens: use shorter lengths")
    return (torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % vocabulary).unfold(0, tokens + 1, tokens)[:steps]


def training_step(loss: Loss, optimizer: torch.optim.Optimizer, text: Tensor, length: int) -> None:
    """Take one step on `text` (tokens + 1,), split into sequences of `length` tokens."""
    loss(text[:-1].view(-1, length), text[1:].view(-1, length)).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure_variant(variant: str, config: ModelConfig, length: int, text: Tensor, device: torch.device, compiled: bool) -> Row:
    torch.manual_seed(0)
    torch._dynamo.reset()  # otherwise, the second length would be compiled for dynamic shapes
    if variant == "ringattn":
        model, loss = build_ringattn(config, device, compiled)
    else:
        model, loss = build_hugging_face(variant, config, text.shape[1] - 1, device, compiled)
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).train()
    row = Row(variant, compiled, length, sum(x.numel() for x in model.parameters()))
    optimizer = optim.build(model, OptimConfig())
    for group in optimizer.param_groups:
        group["lr"] = optim.default_lr(row.parameters, qk_norm=False, continued=False)
    try:
        for step in text[:-1]:
            training_step(loss, optimizer, step, length)
        final = loss(*(x.view(-1, length) for x in (text[-1, :-1], text[-1, 1:]))).item()
        step = partial(training_step, loss, optimizer, text[0], length)
        seconds, host = time_steps(step, device)
        tokens_per_s = (text.shape[1] - 1) / seconds
        return row._replace(tokens_per_s=tokens_per_s, host_ms=1e3 * host, bytes=measure.peak_bytes(step, device), loss=final)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return row


def time_steps(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return the seconds per step, and the host's seconds to launch a step."""
    if device.type == "cpu":
        return (measure.milliseconds(step, device) / 1e3,) * 2
    step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / TIMED_STEPS, host


def results_table(rows: list[Row]) -> str:
    lines = []
    for row in sorted(rows, key=lambda row: (row.length, row.compiled)):
        figures = ["out of memory", *"---"]
        if row.bytes is not None:
            figures = [f"{row.tokens_per_s:,.0f}", f"{row.host_ms:.1f}", f"{row.bytes / MIB:,.0f}", f"{row.loss:.3f}"]
        compiled = "yes" if row.compiled else "no"
        lines.append([f"{row.length:,}", compiled, row.variant, f"{row.parameters / 1e6:,.1f}", *figures])
    names = "tokens of a sequence | compiled | variant | parameters, million | tokens/s | host, ms"
    return markdown_table(f"{names} | memory of a step, MiB | loss after {TRAINING_STEPS} steps", lines)


def plot(rows: list[Row], title: str) -> plt.Figure:
    groups = sorted({(row.length, row.compiled) for row in rows})
    variants = list(dict.fromkeys(row.variant for row in rows))
    figure, (speeds, peaks) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for number, variant in enumerate(variants):
        chosen = [row for row in rows if row.variant == variant]
        offset = 0.27 * (number - (len(variants) - 1) / 2)
        places = [groups.index((row.length, row.compiled)) + offset for row in chosen]
        for axes, figures in ((speeds, [row.tokens_per_s for row in chosen]), (peaks, [row.bytes for row in chosen])):
            scale = 1e3 if axes is speeds else MIB
            number_format = ",.1f" if axes is speeds else ",.0f"
            bars = axes.bar(places, [(x or 0) / scale for x in figures], width=0.25, label=variant)
            axes.bar_label(bars, [f"{x / scale:{number_format}}" if x else "out of\nmemory" for x in figures], fontsize=8)
    labels = [f"{short_length(length)} tokens" + "\ncompiled" * compiled for length, compiled in groups]
    for axes, name in ((speeds, "thousand tokens/s of a training step"), (peaks, "memory of a training step, MiB")):
        axes.set_xticks(range(len(groups)), labels)
        axes.set(title=name)
        axes.margins(y=0.12)
        clean_axes(axes)
    figure.legend(*speeds.get_legend_handles_labels(), loc="outside lower center", ncols=len(variants), frameon=False)
    figure.suptitle(title)
    return figure


def main(argv: list[str]) -> None:
    parser = measure.new_parser(__doc__, "gpt2")
    parser.add_argument("--lengths", type=command.at_least(2), nargs="+", help="tokens; the default depends on the device")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    parser.add_argument("--compile", choices=("no", "yes", "both"), help="default: both on a GPU, no on a CPU")
    args = measure.parse(parser, argv)
    on_gpu = args.device.type == "cuda"
    lengths = sorted(args.lengths or LENGTHS[args.device.type])
    if any(max(lengths) % length for length in lengths):
        parser.error(f"--lengths {' '.join(map(str, lengths))}: every length must divide the longest one")
    config = load_model_config("124m") if on_gpu else SMALL
    try:
        text = text_of_steps(TRAINING_STEPS + 1, max(lengths), padded_vocabulary(config, 0)).to(args.device)
    except ValueError as error:
        parser.error(str(error))
    chosen = {"no": [False], "yes": [True], "both": [False, True]}[args.compile or ("both" if on_gpu else "no")]
    rows = []
    for compiled, variant, length in product(chosen, args.variants, lengths):
        start = time.perf_counter()
        try:
            rows.append(measure_variant(variant, config, length, text, args.device, compiled))
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            parser.error("the package transformers is not installed: run pip install 'transformers>=5'")
        gc.collect()  # a compiled model contains reference cycles, which only the garbage collector frees
        if on_gpu:
            torch.cuda.empty_cache()
        print(f"{variant}, {length:,} tokens{', compiled' * compiled}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(results_table(rows), end="")
    model = f"GPT-2, {config.layers} layers of dim {config.dim}"
    title = f"{model}, {max(lengths):,} tokens per step, {measure.describe_machine(args.device)}"
    measure.write_picture(plot(rows, title), args.output)


if __name__ == "__main__":
    main(sys.argv[1:])
