"""Compute the loss on held-out text at several sequence lengths, or the accuracy on a recall task.

    python train/evaluate.py run=NAME                                      at the sequence length of the training, and below
    python train/evaluate.py run=NAME data.seq_len=4096,16384,65536        at other lengths
    python train/evaluate.py run=NAME evaluate=recall                      the accuracy on the recall task
    torchrun --nproc_per_node=N train/evaluate.py run=NAME ...             on N ranks, which share each sequence

All losses are means over the same target tokens. The length only limits the number of earlier tokens to which a target token
can attend. A model that benefits from a long context therefore has a lower loss at a longer length. The table contains the
error of each loss, and the error of its difference to the loss at the shortest length. train/data/targets.py describes the
target tokens.

The command only reads the files of the run. It writes a table, evaluation.md, and a plot, evaluation.png, to another folder. By
default, it evaluates the held-out text of the run. To evaluate other text, describe it by these settings:

    data=text, jsonl, parquet, hub or stdlib    the kind of text
    data.path=...                               the files or the dataset
    data.split=...                              the part of the text, all of it by default
    data.column=... data.subset=...             as in training

trainer.eval_tokens=N sets the number of target tokens. Other settings can follow as group.key=value, for example
trainer.device=cpu, trainer.batch_size=4, data.mask_documents=false or model.rope_factor=4. train/config.py explains them. With
trainer.fp8_attention=inference, attention uses FP8.

With evaluate=recall, the command generates the sequences of data=recall, and writes recall.md and recall.png. They show the
accuracy by the length of the sequence and by the position of the answer in the sequence. The default lengths are the sequence
length of the training, half of this length, a quarter, and so on. The command accepts models that were trained on any text.
"""

import ctypes
import os
import signal
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # The root of the repository replaces the folder of this script on the search path. train/run.py explains the reason.
    folder = Path(__file__).resolve().parent
    sys.path[:] = [str(folder.parent) if entry == str(folder) else entry for entry in sys.path]

if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # If torchrun dies, this process ends. train/run.py explains the call.

import torch
import torch.distributed as dist
from datasets.utils import tqdm

from ringattn import Mask
from ringattn.train.config import Config, ConfigError, DataConfig, check, check_values
from ringattn.train.data.loader import choose_layout
from ringattn.train.data.packing import PackedDataset, Sequences, load, load_documents, load_held_out, split_documents
from ringattn.train.data.targets import Targets
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
from ringattn.train.loss_results import Losses, loss_table, plot_losses, to_metrics
from ringattn.train.model.loss import token_losses
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.setup import InferenceRun, build_for_inference
from ringattn.train.step import forward, until_stopped

# The shortest length at which a model is evaluated by default.
SHORTEST_LENGTH = 64

# The settings that this command accepts, in addition to those of `ringattn.train.inference`.
SETTINGS = ("data", "trainer.eval_tokens", "trainer.batch_size")

# The values of the option `evaluate`.
EVALUATIONS = ("loss", "recall")


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
    longest = max(configs, key=lambda config: config.data.seq_len)
    with sync_errors():
        for config in configs:
            check_values(config)
        check(longest, dist.get_world_size())
    run = build_for_inference(longest, model.path)
    with sync_errors():
        run.held_out = load_text(longest, model.config.data.seq_len, run.tokenizer)
    losses = evaluate_lengths(run, sorted({config.data.seq_len for config in configs}), show_progress=True)
    with sync_errors():
        if dist.get_rank() == 0:
            write_results(losses, model, run, options.output)


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
    source = overrides.get("data.source", config.data.source)
    lengths = overrides.pop("data.seq_len", ",".join(map(str, default_lengths(config.data.seq_len, source)))).split(",")
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
        kept = {name: getattr(data, name) for name in ("tokenizer", "eos_token", "special_tokens", "mask_documents")}
        return DataConfig(source=overrides.get("data.source", data.source), **kept)
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


def write_results(losses: Losses, model: Model, run: InferenceRun, output: str) -> None:
    """Print the table of the results, and write the table and the plot to a folder.

    Args:
        losses: the losses of the target tokens.
        model: the evaluated model.
        run: the run of the evaluation.
        output: the folder. If it is empty, the folder is next to the directory of the run.

    Raises:
        ConfigError: the folder cannot be written.
    """
    config = run.config
    part = f"data.split={config.data.eval_split}" if config.data.held_out else f"data.eval_fraction={config.data.eval_fraction}"
    text = config.data.description + (f" {part}" if config.data.source != "recall" else "")
    attention = " with FP8 attention" if config.trainer.attention_precision(training=False) == "fp8" else ""
    table = f"Loss of {model.path}{attention} on {text}, in nats per token.\n\n{loss_table(losses)}\n"
    title = run.plot_title(model.directory.name, f"{int(losses.tokens.sum()):,} target tokens")
    write_table_and_plot(model, output, "evaluation", table, partial(plot_losses, losses, title=title))


@torch.no_grad()
def evaluate_lengths(run: InferenceRun, lengths: list[int], show_progress: bool = False) -> Losses:
    """Compute the loss of the same target tokens at several lengths. All ranks call this function and return the same losses.

    Args:
        run: the run. `data.seq_len` is the number of tokens of the sequences that this rank processes.
        lengths: the lengths in tokens, in ascending order, and at most `data.seq_len`.
        show_progress: whether rank 0 shows a progress bar.

    Raises:
        StoppedEarly: on every rank, if any rank was asked to stop.
    """
    data, dp, size = run.config.data, run.mesh.dp, run.config.trainer.batch_size
    targets = Targets(run.held_out, data.seq_len, lengths, run.config.trainer.eval_tokens, data.mask_documents)
    # Each row contains the sum of the losses of a group and the number of its tokens. The last row is for all other tokens.
    sums = torch.zeros(targets.num_groups + 1, 2, dtype=torch.float64, device=run.device)
    loss_fn = partial(token_losses, vocab_size=run.tokenizer.vocab_size, compiled=run.compiled)
    offset = dp.get_local_rank() * size
    # Every batch requires communication between all ranks, so all ranks process the same number of batches.
    starts = range(offset, offset + targets.num_sequences, dp.size() * size)
    if show_progress and dist.get_rank() == 0:
        starts = tqdm(starts, desc="evaluate", unit=" batches")
    for start in until_stopped(run, starts):
        batch, groups = targets.batch(range(start, start + size))
        mask = Mask.causal(run.config.model.window, batch.documents)
        layout = choose_layout(run.config, run.mesh.shape, mask)
        losses = forward(run, batch, mask, layout, loss_fn).double().flatten()
        groups = layout.shard(groups, run.mesh.sequence.get_local_rank()).to(run.device).flatten()
        sums.index_add_(0, groups, torch.stack([losses, torch.ones_like(losses)], 1))
    dist.all_reduce(sums)
    losses, tokens = sums[:-1].cpu().numpy().T.reshape(2, len(lengths), -1)
    assert (tokens == targets.tokens).all(), "the losses at all lengths must be means over the same target tokens"
    return Losses(lengths, targets.tokens, losses, targets.checksum)


def evaluate(run: InferenceRun) -> dict[str, float]:
    """Return the losses on the held-out text at the lengths of `default_lengths`, see `ringattn.train.loss_results.to_metrics`.

    All ranks call this function together and return the same losses.

    Raises:
        StoppedEarly: on every rank, if any rank was asked to stop.
    """
    data = run.config.data
    return to_metrics(evaluate_lengths(run, default_lengths(data.seq_len, data.source)))


def default_lengths(seq_len: int, source: str) -> list[int]:
    """Return the lengths of an evaluation if the user has not chosen any: `seq_len`, and shorter lengths in ascending order.

    The shorter lengths are SHORTEST_LENGTH, 4 SHORTEST_LENGTH, 16 SHORTEST_LENGTH and so on. There are no shorter lengths for
    the recall task, because `ringattn.train.evaluate_recall` evaluates this task at several lengths.
    """
    lengths = [SHORTEST_LENGTH]
    while lengths[-1] < seq_len:
        lengths.append(4 * lengths[-1])
    return [*(lengths[:-1] if source != "recall" else []), seq_len]


if __name__ == "__main__":
    main()
