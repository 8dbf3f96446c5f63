"""Compute the loss on held-out text at several sequence lengths, or the accuracy on a recall task.

    python train/evaluate.py run=NAME                                      at the training length and shorter lengths
    python train/evaluate.py run=NAME data.seq_len=4096,16384,65536        at other lengths
    python train/evaluate.py run=NAME evaluate=recall                      the accuracy on the recall task
    torchrun --nproc_per_node=N train/evaluate.py run=NAME ...             on N ranks, which share each sequence

The losses at all lengths are means over the same target tokens. A model that benefits from a long context has a lower loss at a
longer length. For each loss and its difference from the loss at the shortest length, the table contains a 95% interval.

The command only reads the files of the run. The table evaluation.md and the plot evaluation.png are written to another folder.
By default, the command evaluates the held-out text of the run. These settings select another text:

    data=text, jsonl, parquet, hub or stdlib    the kind of text
    data.path=...                               the files or the dataset
    data.split=...                              the part of the text, all of it by default
    data.column=... data.subset=... data.format=...   as in training

trainer.eval_tokens=N sets the number of target tokens. Other settings can follow as group.key=value, for example
trainer.device=cpu, trainer.batch_size=4, data.mask_documents=false or model.rope_factor=4. docs/settings.md explains all
settings. With trainer.fp8_attention=inference, attention uses FP8.

With evaluate=recall, the command generates the sequences of data=recall. The files recall.md and recall.png contain the
accuracy by sequence length and by position of the answer. By default, the recall task is evaluated at the training length
divided by 1, 2, 4 and so on. Any model can be evaluated.

With evaluate=needle, the command hides a fact in a long text, and asks the model for the fact. The accuracy is measured by
length and depth. Similar tasks hide four facts (evaluate=needles), a chain of variables (evaluate=variables) or sentences to
count (evaluate=counting). By default, the facts are hidden in the source code of Python's standard library. With
data.format=chat, the chat template of the tokenizer is used.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from ringattn.train.checkpoint import storage
from ringattn.train.commands import evaluate_needle
from ringattn.train.commands.arguments import option, parse, settings_by_length
from ringattn.train.commands.evaluate_recall import evaluate_model
from ringattn.train.commands.messages import exit_process
from ringattn.train.commands.options import RUN_HELP, Model, find_model, results_folder, run_command, write_table_and_plot
from ringattn.train.data.needle import TASKS
from ringattn.train.data.packing import Sequences, load, load_fraction
from ringattn.train.data.recall import EVALUATION_SEED, RecallDataset, check_vocabulary
from ringattn.train.data.tokenizer import Tokenizer
from ringattn.train.inference.losses import default_lengths, evaluate_lengths
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.reports.loss_results import Losses, loss_table, plot_losses
from ringattn.train.settings.config import Config, ConfigError, DataConfig, check, check_values, with_settings
from ringattn.train.setup import InferenceRun, build_for_inference

# The settings that this command accepts in addition to those of `ringattn.train.commands.options`.
SETTINGS = ("data", "trainer.eval_tokens", "trainer.batch_size")

# The settings that replace the held-out text of the run by another text.
OTHER_TEXT = {"data.source", "data.path", "data.split"}

# The settings that change training sequences, but not the held-out text.
UNUSED = {f"data.{name}" for name in ("streaming", "shuffle_buffer", "exhausted", "packing", "group_size", "seed")}

# The values of the option `evaluate`.
EVALUATIONS = ("loss", "recall", *TASKS)


@dataclass
class Options:
    run: str = option(RUN_HELP)
    evaluate: str = option(
        "What is evaluated: loss (on held-out text), or the accuracy on recall, needle, needles, variables or counting.",
        default="loss",
    )
    output: str = option(
        "The folder for the table and the plot. By default, this folder is next to the run, and its name is the name of the "
        "run followed by -evaluation. For a model in Hugging Face's format, the default folder is in outputs/.",
        default="",
    )


def main() -> NoReturn:
    exit_process(run_command(run_command_line, Options, __doc__))


def run_command_line(arguments: list[str]) -> None:
    """Evaluate the model that the arguments select. All ranks call this function."""
    options, overrides = parse(arguments, Options, SETTINGS)
    if options.evaluate not in EVALUATIONS:
        raise ConfigError(f"unknown evaluate={options.evaluate}: choose one of {', '.join(EVALUATIONS)}")
    if unused := sorted(overrides.keys() & UNUSED):
        raise ConfigError(f"{unused[0]}={overrides[unused[0]]} has no effect on an evaluation: leave it out")
    model = find_model(options.run)
    folder = results_folder(model, options.output)
    if options.evaluate in TASKS:
        return evaluate_needle.evaluate_model(model, options.evaluate, overrides, folder)
    if options.evaluate == "recall":
        return evaluate_model(model, overrides, folder)
    configs = evaluation_configs(model.config, overrides)
    longest = max(configs, key=lambda config: config.data.seq_len)
    with sync_errors():
        for config in configs:
            check_values(config)
        check(longest, dist.get_world_size())
    run = build_for_inference(longest, model.path)
    with sync_errors():
        text = load_text(longest, model.config.data.seq_len, run.tokenizer)
        if not overrides.keys() & OTHER_TEXT:
            check_held_out(text, model)
    run = replace(run, held_out=text)
    losses = evaluate_lengths(run, sorted({config.data.seq_len for config in configs}), show_bar=True)
    with sync_errors():
        if dist.get_rank() == 0:
            write_results(losses, model, run, folder)


def evaluation_configs(config: Config, overrides: dict[str, str]) -> list[Config]:
    """Return one set of settings per evaluated sequence length.

    Raises:
        ConfigError: there is no text to evaluate, or a sequence length is not an integer.
    """
    for name, value in overrides.items():
        if name.startswith("data.eval_"):
            raise ConfigError(
                f"{name}={value} is impossible: an evaluation uses only one text, so use data.path and data.split instead"
            )
    lengths = default_lengths(config.data.seq_len, overrides.get("data.source", config.data.source))
    if (text := evaluated_text(config.data, overrides)) is not None:
        config = replace(config, data=replace(text, eval_fraction=DataConfig.eval_fraction))
    elif config.data.eval_fraction == 0:
        raise ConfigError(f"run={config.name} has no held-out text: name the text to evaluate, such as data=text data.path=...")
    configs = settings_by_length(config, overrides, lengths)
    if text is not None and text.source != "recall":
        configs = [
            with_settings(each, {"data.eval_split": each.data.split, "data.split": DataConfig.split}) for each in configs
        ]
    return configs


def evaluated_text(data: DataConfig, overrides: dict[str, str]) -> DataConfig | None:
    """Return the settings of the evaluated corpus before `overrides` are applied.

    Return None if the evaluated text is a held-out fraction of the training text.
    """
    if overrides.keys() & {"data.source", "data.path"}:
        kept = {name: getattr(data, name) for name in ("tokenizer", "eos_token", "special_tokens", "mask_documents")}
        return DataConfig(source=overrides.get("data.source", data.source), **kept)
    return data if data.held_out is None and "data.split" in overrides else data.held_out


def load_text(config: Config, trained_len: int, tokenizer: Tokenizer) -> Sequences:
    """Load the evaluated text, packed into sequences of `data.seq_len` tokens. All ranks call this function.

    The held-out fraction of the text depends on the sequence length of the training, `trained_len`.
    """
    data = config.data
    if data.source == "recall":
        check_vocabulary(tokenizer.vocab_size)
        return RecallDataset(data.seq_len, EVALUATION_SEED)
    if data.held_out is not None:
        return load(data.held_out, tokenizer, shuffle=False)
    return load_fraction(data, tokenizer, trained_len)


def check_held_out(text: Sequences, model: Model) -> None:
    """Raise ConfigError if the held-out text of a run has changed, because it may then contain training text."""
    saved, current = storage.read_meta(model.path).get("held_out") or {}, text.fingerprint
    if any(name in saved and saved[name] != current.get(name) for name in ("documents", "checksum")):
        raise ConfigError(
            f"the held-out text of {model.path} or its settings have changed since the training, so it may contain training "
            "text: restore them, or name a text to evaluate, such as data=text data.path=..."
        )


def write_results(losses: Losses, model: Model, run: InferenceRun, folder: Path) -> None:
    """Print the table of the losses, and write the table and a plot to a folder."""
    config = run.config
    part = f"data.split={config.data.eval_split}" if config.data.held_out else f"data.eval_fraction={config.data.eval_fraction}"
    text = config.data.description + (f" {part}" if config.data.source != "recall" else "")
    attention = " with FP8 attention" if config.trainer.attention_precision(training=False) == "fp8" else ""
    table = f"Loss of {model.path}{attention} on {text}, in nats per token.\n\n{loss_table(losses)}\n"
    title = run.plot_title(model.directory.name, f"{int(losses.tokens.sum()):,} target tokens")
    write_table_and_plot(folder, "evaluation", table, partial(plot_losses, losses, title=title))
