"""Evaluate a model on the recall task: `python train/evaluate.py run=NAME evaluate=recall`."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ringattn.train.commands.arguments import settings_by_length
from ringattn.train.commands.options import Model, write_table_and_plot
from ringattn.train.data.recall import CHANCE, check_length, check_vocabulary, evaluation_lengths
from ringattn.train.inference.recall import evaluate_recall
from ringattn.train.parallel.ranks import sync_errors
from ringattn.train.reports.recall_results import accuracy_table, plot_accuracies
from ringattn.train.settings.config import Config, ConfigError, DataConfig, check
from ringattn.train.setup import build_for_inference


def evaluate_model(model: Model, overrides: dict[str, str], folder: Path) -> None:
    """Evaluate a model, and write the results to a folder. All ranks call this function.

    Raises:
        ConfigError: on every rank, if a setting is invalid or has no effect on this evaluation.
    """
    configs = evaluation_configs(model.config, overrides)
    with sync_errors():
        for config in configs:
            check_length(config.data.seq_len)
            check(config, dist.get_world_size())
    run = build_for_inference(max(configs, key=lambda config: config.data.seq_len), model.path)
    with sync_errors():
        check_vocabulary(run.tokenizer.vocab_size)
    accuracies = evaluate_recall(run, [config.data.seq_len for config in configs], show_progress=True)
    with sync_errors():
        if dist.get_rank() == 0:
            title = run.plot_title(model.directory.name, f"{run.config.trainer.eval_tokens:,} tokens per length")
            text = f"Accuracy of {model.path} on the recall task. The accuracy of guesses would be {CHANCE:.1%}.\n\n"
            text += accuracy_table(accuracies) + "\n"
            write_table_and_plot(folder, "recall", text, partial(plot_accuracies, accuracies, CHANCE, title=title))


def evaluation_configs(config: Config, overrides: dict[str, str]) -> list[Config]:
    """Return one set of settings per evaluated length. The default lengths are those of `evaluation_lengths`.

    Raises:
        ConfigError: an override has no effect on the recall task, or a sequence length is not an integer.
    """
    for name in overrides:
        if name.startswith("data") and name not in ("data.seq_len", "data.tokenizer", "data.eos_token"):
            raise ConfigError(f"{name} has no effect with evaluate=recall, which generates its text: leave it out")
    data = DataConfig(source="recall", tokenizer=config.data.tokenizer, eos_token=config.data.eos_token)
    return settings_by_length(replace(config, data=data), overrides, evaluation_lengths(config.data.seq_len))
