"""Lab 5: compare a training step of GPT-2 in Hugging Face transformers with a training step of this project's GPT.

    python -m scripts.labs.gpt2

The variants `eager` and `sdpa` are the GPT2LMHeadModel of transformers with these attention implementations. The variant
`ringattn` is the GPT of this project with `flash_attention` and the loss in chunks. All weights are random, and nothing is
downloaded. Every step has the same number of tokens, and consists of the forward pass, the backward pass and AdamW. On a GPU,
the models have the shape of GPT-2 124M (configs/model/124m.yaml) and bf16 parameters. On a CPU, the models are small and use
fp32. No dropout is applied. No model is compiled, unless --compile is given.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ringattn import flash_attention
from ringattn.train import optim
from ringattn.train.config import ModelConfig, OptimConfig
from ringattn.train.model.gpt import GPT, padded_vocabulary
from ringattn.train.model.loss import cross_entropy
from ringattn.train.parallel.shard import compile_blocks
from scripts import command
from scripts.bench.stock_training import load_model_config
from scripts.labs import measure
from scripts.labs.measure import MIB
from scripts.plots import clean_axes, plt, short_length
from scripts.tables import markdown_table

VARIANTS = ("eager", "sdpa", "ringattn")
SMALL = ModelConfig(vocab_size=1024, layers=2, dim=256, heads=4, kv_heads=4)
LENGTHS = {"cpu": [128, 512], "cuda": [1024, 8192]}
Loss = Callable[[Tensor, Tensor], Tensor]  # the loss of (tokens, labels), both (B, N)


class Row(NamedTuple):
    """The figures of a training step. tokens_per_s and bytes are None if the memory was exhausted."""

    variant: str
    length: int
    parameters: int
    tokens_per_s: float | None = None
    bytes: int | None = None  # the peak memory without parameters and optimizer state


def build_hugging_face(
    attention: str, config: ModelConfig, max_length: int, device: torch.device, compiled: bool
) -> tuple[nn.Module, Loss]:
    """Return GPT-2 of transformers with this attention implementation, and its loss."""
    import transformers

    sizes = dict(n_embd=config.dim, n_layer=config.layers, n_head=config.heads, n_positions=max_length)
    sizes |= dict(vocab_size=padded_vocabulary(config, 0), bos_token_id=0, eos_token_id=0)
    gpt2 = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(gpt2, attn_implementation=attention)
    model.loss_type = "ForCausalLM"  # transformers does not recognise the type by the name of this class, and would warn
    run = torch.compile(model) if compiled else model
    # transformers shifts the labels by one token itself, so the tokens are the labels.
    return model, lambda tokens, labels: run(input_ids=tokens, labels=tokens, use_cache=False).loss


def build_ringattn(config: ModelConfig, device: torch.device, compiled: bool) -> tuple[nn.Module, Loss]:
    """Return the GPT of this project, and its loss."""
    generator = torch.Generator(device).manual_seed(0)
    with device:
        model = GPT(config, vocab_size=0)
    model.init_weights(generator)
    for block in model.blocks:
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


def training_step(loss: Loss, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    """Take one step on tokens (B, N + 1)."""
    loss(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure_variant(variant: str, config: ModelConfig, lengths: list[int], device: torch.device, compiled: bool) -> list[Row]:
    """Measure the training step of a variant at all lengths. Every step has as many tokens as the longest sequence."""
    if variant == "ringattn":
        model, loss = build_ringattn(config, device, compiled)
    else:
        model, loss = build_hugging_face(variant, config, max(lengths), device, compiled)
    model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).train()
    optimizer = optim.build(model, OptimConfig())
    row = Row(variant, 0, sum(x.numel() for x in model.parameters()))
    rows = []
    for length in lengths:
        tokens = torch.randint(padded_vocabulary(config, 0), (max(lengths) // length, length + 1), device=device)
        step = partial(training_step, loss, optimizer, tokens)
        try:
            step()  # the first step allocates the state of the optimizer
            seconds = measure.milliseconds(step, device) / 1e3
            rows.append(
                row._replace(length=length, tokens_per_s=max(lengths) / seconds, bytes=measure.peak_bytes(step, device))
            )
        except RuntimeError as error:
            if not measure.is_out_of_memory(error):
                raise
            rows.append(row._replace(length=length))
        optimizer.zero_grad()
    return rows


def results_table(rows: list[Row]) -> str:
    """Return the table of all variants and lengths."""
    lines = []
    for row in sorted(rows, key=lambda row: row.length):
        figures = ["out of memory", "-"]
        if row.bytes is not None:
            figures = [f"{row.tokens_per_s:,.0f}", f"{row.bytes / MIB:,.0f}"]
        lines.append([f"{row.length:,}", row.variant, f"{row.parameters / 1e6:,.1f}", *figures])
    return markdown_table("tokens of a sequence | variant | parameters, million | tokens/s | memory of a step, MiB", lines)


def plot(rows: list[Row], title: str) -> plt.Figure:
    """Draw the speed and the memory of every variant, grouped by the length."""
    lengths, variants = ([*dict.fromkeys(values)] for values in ((row.length for row in rows), (row.variant for row in rows)))
    figure, (speeds, peaks) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for number, variant in enumerate(variants):
        chosen = [row for row in rows if row.variant == variant]
        places = [lengths.index(row.length) + 0.27 * (number - (len(variants) - 1) / 2) for row in chosen]
        for axes, figures in ((speeds, [row.tokens_per_s for row in chosen]), (peaks, [row.bytes for row in chosen])):
            scale = 1 if axes is speeds else MIB
            bars = axes.bar(places, [(x or 0) / scale for x in figures], width=0.25, label=variant)
            axes.bar_label(bars, [f"{x / scale:,.0f}" if x else "out of\nmemory" for x in figures], fontsize=8)
    for axes, name in ((speeds, "tokens/s of a training step"), (peaks, "memory of a training step, MiB")):
        axes.set_xticks(range(len(lengths)), [f"{short_length(length)} tokens" for length in lengths])
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
    parser.add_argument("--compile", action="store_true", help="compile all models with torch.compile")
    args = measure.parse(parser, argv)
    on_gpu = args.device.type == "cuda"
    lengths = sorted(args.lengths or LENGTHS[args.device.type])
    config = load_model_config("124m") if on_gpu else SMALL
    rows = []
    for variant in args.variants:
        try:
            rows += measure_variant(variant, config, lengths, args.device, args.compile)
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            parser.error("the package transformers is not installed: run pip install 'transformers>=5'")
        if on_gpu:
            torch.cuda.empty_cache()
    print(results_table(rows), end="")
    model = f"GPT-2, {config.layers} layers of dim {config.dim}"
    title = f"{model}, {max(lengths):,} tokens per step, {measure.describe_machine(args.device)}"
    measure.write_picture(plot(rows, title), args.output)


if __name__ == "__main__":
    main(sys.argv[1:])
