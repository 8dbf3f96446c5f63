"""Evaluate a model on facts in a long text: `python train/evaluate.py run=NAME evaluate=needle`."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ringattn.train.commands.arguments import settings_by_length
from ringattn.train.commands.options import Model, write_table_and_plot
from ringattn.train.data.chat import load_template
from ringattn.train.data.needle import MAX_COUNT, NUM_DEPTHS, NeedleDocuments
from ringattn.train.data.packing import PackedDataset, load
from ringattn.train.inference.losses import default_lengths
from ringattn.train.inference.needle import evaluate_needle
from ringattn.train.inference.recall import number_of_documents
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.reports.recall_results import accuracy_table, plot_accuracies
from ringattn.train.settings.config import Config, ConfigError, DataConfig, check, with_settings
from ringattn.train.setup import build_for_inference

SHORTEST_LENGTH = 256


def evaluate_model(model: Model, task: str, overrides: dict[str, str], folder: Path) -> None:
    """Evaluate a model on a task, and write the results to a folder. All ranks call this function.

    Raises:
        ConfigError: on every rank, if a setting is invalid, or the text or a length is too short.
    """
    data, configs = evaluation_configs(model.config, overrides)
    with sync_errors():
        for config in configs:
            check(config, dist.get_world_size())
        if data.format == "chat":
            load_template(data.tokenizer)  # raises an error before the model is loaded
    run = build_for_inference(configs[-1], model.path)
    with sync_errors():
        text = load(replace(configs[-1].data, eval_fraction=0.0), run.tokenizer, shuffle=False)
        assert isinstance(text, PackedDataset)
        documents = NeedleDocuments.of(task, text, run.tokenizer, data)
        lengths = [config.data.seq_len for config in configs]
        padding = dist.get_world_size() * configs[0].trainer.batch_size  # documents that only fill up the last batch
        documents.check(lengths[0], number_of_documents(configs[0], lengths[0], NUM_DEPTHS) + padding)
    accuracies = evaluate_needle(run, documents, lengths)
    with sync_errors():
        if dist.get_rank() == 0:
            chance = 1 / MAX_COUNT if task == "counting" else 0.0
            title = run.plot_title(model.directory.name, f"up to {lengths[-1]:,} tokens")
            table = f"Accuracy of {model.path} on the task {task} in {configs[-1].data.description}.\n\n"
            table += accuracy_table(accuracies) + "\n"
            write_table_and_plot(folder, task, table, partial(plot_accuracies, accuracies, chance, title=title))


def evaluation_configs(config: Config, overrides: dict[str, str]) -> tuple[DataConfig, list[Config]]:
    """Return (data, configs). The settings `data` contain the tokenizer and the chat template. The list `configs` has one entry
    per length, in ascending order.

    By default, the facts are hidden in Python's standard library. The argument `overrides` may select another text. Raise
    ConfigError if `data.format` is neither text nor chat.
    """
    form = overrides.get("data.format", "chat" if config.data.format == "chat" else "text")
    if form not in ("text", "chat"):
        raise ConfigError(f"data.format={form} is impossible with facts in a long text: choose text or chat")
    data = DataConfig(tokenizer=config.data.tokenizer, eos_token=config.data.eos_token)
    default = [length for length in default_lengths(config.data.seq_len, "text") if length >= SHORTEST_LENGTH]
    given = overrides | {"data.format": "text"}
    configs = settings_by_length(replace(config, data=data), given, default or [config.data.seq_len])
    if (source := configs[0].data.source) in ("recall", "mix"):
        raise ConfigError(f"data.source={source} is impossible with facts in a long text: choose another source")
    chat = with_settings(configs[0], {"data.format": form})
    return chat.data, sorted(configs, key=lambda each: each.data.seq_len)
