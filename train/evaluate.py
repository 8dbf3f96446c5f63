"""Compute the loss on held-out text, overall and by context length, or the accuracy on a recall task.

    python train/evaluate.py run=NAME                                      at the sequence length of the training
    python train/evaluate.py run=NAME data.seq_len=4096,16384,65536        at several lengths
    python train/evaluate.py run=NAME evaluate=recall                      the accuracy on the recall task
    torchrun --nproc_per_node=N train/evaluate.py run=NAME ...             on N ranks, which share each sequence

The context length of a token is the number of earlier tokens that the token attends to. A model that benefits from long
sequences has a lower loss on tokens with a longer context.

The command only reads the files of the run. It writes a table, evaluation.md, and a plot, evaluation.png, to another folder. By
default, it evaluates the held-out text of the run. To evaluate other text, describe it by these settings:

    data=text, jsonl, parquet, hub or stdlib    the kind of text
    data.path=...                               the files or the dataset
    data.split=...                              the part of the text, all of it by default
    data.column=... data.subset=...             as in training

trainer.eval_tokens=N sets the minimum number of tokens per length. Other settings can follow as group.key=value, for example
trainer.device=cpu, trainer.batch_size=4, data.mask_documents=false or model.rope_factor=4. train/config.py explains them. With
trainer.fp8_attention=inference, attention uses FP8.

With evaluate=recall, the command generates the sequences of data=recall, and writes recall.md and recall.png. They show the
accuracy by the length of the sequence and by the position of the answer in the sequence. The default lengths are the sequence
length of the training, half of this length, a quarter, and so on. The command accepts models that were trained on any text.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # The root of the repository replaces the folder of this script on the search path. train/run.py explains the reason.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [str(folder.parent) if entry == str(folder) else entry for entry in sys.path]

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Mask
from ringattn.train.config import Config, ConfigError, DataConfig, check
from ringattn.train.data.batch import Batch
from ringattn.train.data.packing import PackedDataset, Sequences, load, load_documents, load_held_out, split_documents
from ringattn.train.data.tokenizer import Tokenizer
from ringattn.train.errors import exit_process
from ringattn.train.evaluate_recall import evaluate_model
from ringattn.train.inference import (
    RUN_HELP,
    Model,
    apply_overrides,
    find_model,
    option,
    parse,
    run_command,
    write_table_and_plot,
)
from ringattn.train.model.loss import IGNORE, token_losses
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.setup import InferenceRun, build_for_inference
from ringattn.train.step import forward, layout_of, mask_of

# The first group contains the tokens whose context is shorter than this number of tokens. The second group starts at this
# context length, and each further group starts at twice the context length of the previous group.
SHORTEST_CONTEXT = 128

# The settings that this command accepts, in addition to those of `ringattn.train.inference`.
SETTINGS = ("data", "trainer.eval_tokens", "trainer.batch_size")

# The values of the option `evaluate`.
EVALUATIONS = ("loss", "recall")

Results = dict[int, dict[str, float]]


@dataclass
class Options:
    """The options of this command."""

    run: str = option(RUN_HELP)
    evaluate: str = option(
        "What is evaluated: loss (the loss on held-out text) or recall (the accuracy on the recall task).", default="loss"
    )
    output: str = option(
        "The folder for the table and the plot. By default, this folder is next to the run, and its name is the name of the "
        "run followed by -evaluation. For a model in Hugging Face's format, the default folder is in outputs/.",
        default="",
    )


def main() -> NoReturn:
    """Run the command line and exit. This function is the entry point of `ringattn-evaluate`."""
    exit_process(run_command(run_command_line, Options, __doc__))


def run_command_line(arguments: list[str]) -> None:
    """Evaluate the model that the arguments name, and write the results on rank 0. All ranks call this function."""
    options, overrides = parse(arguments, Options, SETTINGS)
    if options.evaluate not in EVALUATIONS:
        raise ConfigError(f"unknown evaluate={options.evaluate}: choose one of {', '.join(EVALUATIONS)}")
    model = find_model(options.run)
    if options.evaluate == "recall":
        return evaluate_model(model, overrides, options.output)
    configs = evaluation_configs(model.config, overrides)
    with sync_errors():
        for config in configs:
            check(config, dist.get_world_size())
    run = build_for_inference(configs[0], model.path)
    results: Results = {}
    for config in configs:
        with sync_errors():
            held_out = load_text(config, model.config.data.seq_len, run.tokenizer)
        at_length = replace(run, config=config, held_out=held_out)
        results[config.data.seq_len] = evaluate(at_length) | {"tokens": num_sequences(at_length) * config.data.seq_len}
    with sync_errors():
        if dist.get_rank() == 0:
            write_results(results, model, configs[0], options.output)


def evaluation_configs(config: Config, overrides: dict[str, str]) -> list[Config]:
    """Return the settings of the evaluation at each sequence length.

    Evaluation uses only one text. In the overrides, data.path and data.split therefore describe the evaluated text.

    Args:
        config: the settings with which the model was trained.
        overrides: the values of settings, from the command line.

    Raises:
        ConfigError: there is no text to evaluate, or a sequence length is not an integer.
        OmegaConfBaseException: a setting is unknown, or its value has the wrong type.
    """
    overrides = {"data.source" if name == "data" else name: value for name, value in overrides.items()}
    if any(name.startswith("data.eval_") for name in overrides):
        raise ConfigError(
            "data.eval_path and data.eval_split: an evaluation uses only one text, so use data.path and data.split instead"
        )
    lengths = overrides.pop("data.seq_len", str(config.data.seq_len)).split(",")
    if (text := evaluated_text(config.data, overrides)) is not None:
        config = replace(config, data=replace(text, eval_fraction=DataConfig.eval_fraction))
    elif config.data.eval_fraction == 0:
        raise ConfigError(f"run={config.name} has no held-out text: name the text to evaluate, such as data=text data.path=...")
    configs = [apply_overrides(config, overrides | {"data.seq_len": length}) for length in lengths]
    if text is not None and text.source != "recall":
        for each in configs:
            each.data.eval_split, each.data.split = each.data.split, DataConfig.split
    return configs


def evaluated_text(data: DataConfig, overrides: dict[str, str]) -> DataConfig | None:
    """Return the settings of a separate corpus for the evaluation. The overrides have not been applied to these settings.

    The result is None if the evaluated text is the fraction of the training text that was held out.
    """
    if overrides.keys() & {"data.source", "data.path"}:
        source = overrides.get("data.source", data.source)
        return DataConfig(source=source, tokenizer=data.tokenizer, mask_documents=data.mask_documents)
    return data if data.held_out is None and "data.split" in overrides else data.held_out


def load_text(config: Config, trained_len: int, tokenizer: Tokenizer) -> Sequences:
    """Load the evaluated text, packed into sequences of `data.seq_len` tokens. All ranks call this function.

    The fraction of the text that the training has held out depends on the sequence length of the training, `trained_len`.
    """
    data = config.data
    if data.source == "recall":
        return load_held_out(data, tokenizer, load(data, tokenizer))
    if data.held_out is not None:
        return load(data.held_out, tokenizer, shuffle=False)
    _, documents = split_documents(load_documents(data, tokenizer), data.eval_fraction, trained_len)
    return PackedDataset(documents, data.seq_len, seed=0, shuffle=False)


def write_results(results: Results, model: Model, config: Config, output: str) -> None:
    """Print the table of the results, and write the table and the plot to a folder.

    Args:
        results: the result of `evaluate` and the number of evaluated tokens, by sequence length.
        model: the evaluated model.
        config: the settings of the evaluation at one of the lengths.
        output: the folder. If it is empty, the folder is next to the directory of the run.

    Raises:
        ConfigError: the folder cannot be written.
    """
    part = f"data.split={config.data.eval_split}" if config.data.held_out else f"data.eval_fraction={config.data.eval_fraction}"
    text = config.data.description + (f" {part}" if config.data.source != "recall" else "")
    attention = " with FP8 attention" if config.trainer.attention_precision(training=False) == "fp8" else ""
    table = f"Loss of {model.path}{attention} on {text}, in nats per token.\n\n{results_table(results)}\n"
    write_table_and_plot(model, output, "evaluation", table, partial(plot_results, results))


def results_table(results: Results) -> str:
    """Return the results as a Markdown table with one column per sequence length."""
    starts = context_groups(max(results))
    rows = [["sequence length", *(f"{length:,} tokens" for length in results)], ["---"] * (len(results) + 1)]
    rows.append(["evaluated tokens", *(f"{result['tokens']:,}" for result in results.values())])
    rows.append(["loss", *(f"{result['eval_loss']:.4f}" for result in results.values())])
    for start, stop in zip(starts, [*starts[1:], math.inf], strict=True):
        losses = [result.get(f"eval_loss/{start}") for result in results.values()]
        name = f"loss, context of {start:,} to {stop - 1:,}" if stop < math.inf else f"loss, context of {start:,} or more"
        rows.append([name, *("-" if loss is None else f"{loss:.4f}" for loss in losses)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plot_results(results: Results, output: Path) -> None:
    """Plot the loss by context length, with one curve per sequence length, and save the plot as a PNG file."""
    # The import of matplotlib is slow. Unlike pyplot, Figure needs no display and has no global state.
    from matplotlib.figure import Figure

    starts = context_groups(max(results))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for length, result in results.items():
        known = {i: result[f"eval_loss/{start}"] for i, start in enumerate(starts) if f"eval_loss/{start}" in result}
        axes.plot(list(known), list(known.values()), "o-", label=f"{length:,} tokens")
    axes.set_xticks(range(len(starts)), [f"{start:,}" for start in starts], rotation=45)
    axes.set_xlabel("minimum context length in tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.legend(title="sequence length", frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=150)


@torch.no_grad()
def evaluate(run: InferenceRun) -> dict[str, float]:
    """Compute the loss on the held-out text. All ranks call this function together and return the same losses.

    Evaluation always uses the same sequences of `run.held_out`, with at least `trainer.eval_tokens` tokens in total.

    Returns:
        A dict of losses in nats per token. `eval_loss` is the mean loss of all tokens. `eval_loss/c` is the mean loss of the
        tokens whose context has at least c tokens but fewer than the next larger c. The values of c are 0, SHORTEST_CONTEXT,
        2 SHORTEST_CONTEXT, and so on. Groups without tokens are left out.
    """
    starts = context_groups(run.config.data.seq_len)
    # Each row contains the sum of the losses of a group and the number of tokens in the group.
    sums = torch.zeros(len(starts), 2, dtype=torch.float64, device=run.device)
    loss_fn = partial(token_losses, vocab_size=run.tokenizer.vocab_size, compiled=run.compiled)
    for batch in held_out_batches(run):
        mask = mask_of(run.config, batch)
        layout = layout_of(run.config, run.mesh, mask)
        losses = forward(run, batch, mask, layout, loss_fn).double()
        groups = group_by_context(batch, mask, starts).masked_fill(batch.labels == IGNORE, -1)
        groups = layout.shard(groups, run.mesh.sequence.get_local_rank()).to(run.device)
        for group in range(len(starts)):
            is_member = groups == group
            sums[group] += torch.stack([losses.masked_fill(~is_member, 0).sum(), is_member.sum()])
    dist.all_reduce(sums)
    total, tokens = sums.sum(0).tolist()
    by_context = {f"eval_loss/{c}": loss / count for c, (loss, count) in zip(starts, sums.tolist(), strict=True) if count}
    return {"eval_loss": total / tokens} | by_context


def context_groups(seq_len: int) -> list[int]:
    """Return the shortest context length of each group, for sequences of `seq_len` tokens.

    The lengths are 0 and powers of two.
    """
    return [0, *(2**i for i in range(SHORTEST_CONTEXT.bit_length() - 1, (seq_len - 1).bit_length()))]


def group_by_context(batch: Batch, mask: Mask, starts: list[int]) -> Tensor:
    """Return the index of each token's group as int64 (B, S). `starts` contains the shortest context length of each group."""
    seq_len = batch.tokens.shape[1]
    context = torch.arange(seq_len) - mask.intervals(seq_len)[0]
    return torch.bucketize(context, torch.tensor(starts[1:]), right=True).expand_as(batch.tokens)


def num_sequences(run: InferenceRun) -> int:
    """Return the number of sequences that an evaluation uses."""
    return min(-(-run.config.trainer.eval_tokens // run.config.data.seq_len), run.held_out.sequences_per_epoch)


def held_out_batches(run: InferenceRun) -> Iterator[Batch]:
    """Yield this rank's batches of held-out sequences.

    The evaluated sequences are spread evenly over the held-out text, so that they represent the whole text. All ranks receive
    the same number of batches, because every batch requires communication between all ranks. The last batches may therefore
    contain sequences that must not be evaluated. The labels of these sequences are IGNORE.
    """
    dp, size, count = run.mesh.dp, run.config.trainer.batch_size, num_sequences(run)
    offset = dp.get_local_rank() * size
    for start in range(offset, offset + count, dp.size() * size):
        numbers = range(start, start + size)
        batch = run.held_out.batch(number * run.held_out.sequences_per_epoch // count for number in numbers)
        batch.labels[max(count - start, 0) :] = IGNORE
        yield batch


if __name__ == "__main__":
    main()
