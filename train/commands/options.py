"""Run generate, evaluate and export, and find the model that their options name."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from ringattn.train.checkpoint import huggingface, storage
from ringattn.train.checkpoint.resume import saved_config
from ringattn.train.commands.arguments import run_program
from ringattn.train.commands.errors import terminate, terminate_on_error
from ringattn.train.commands.messages import SETTING_ERRORS
from ringattn.train.files import write_atomically
from ringattn.train.parallel.ranks import broadcast_object, connect_ranks, disconnect_ranks, sync_errors
from ringattn.train.settings.config import Config, ConfigError, DataConfig, TrainerConfig

RUN_HELP = (
    "The model: the name of a run in outputs/, the path of the directory of a run, the path of a checkpoint, or the path of a "
    "folder in Hugging Face's format. The newest checkpoint of a run is used."
)
ANOTHER_FOLDER = "choose another folder with output=..."


@dataclass
class Model:
    """Describes the model that the option `run` selects.

    Attributes:
        path: the checkpoint, or a folder in Hugging Face's format.
        directory: the directory of the checkpoint's run, or `path`.
        config: the settings of the training. Settings of the machine, such as the device, have their defaults.
    """

    path: Path
    directory: Path
    config: Config


def run_command(command: Callable[[list[str]], None], options: type, doc: str | None) -> int:
    """Run a command on all ranks, and return the exit status. The command must raise SETTING_ERRORS on all ranks."""

    def run(arguments: list[str]) -> None:
        launch = connect_ranks()
        try:
            command(arguments)
        except SETTING_ERRORS:
            raise
        except KeyboardInterrupt:
            terminate(launch.store, "interrupted", 130)
        except BrokenPipeError:
            terminate(launch.store, "stopped, because the reader of the output has exited", 1)
        except Exception as error:
            terminate_on_error(launch.store, error)
        finally:
            disconnect_ranks()

    return run_program(run, options, doc)


def find_model(run: str) -> Model:
    """Find the model that the option `run` selects. All ranks call this function.

    Raises:
        ConfigError: on every rank, if the model does not exist or cannot be read.
    """
    with sync_errors():
        found = _find_model(run) if dist.get_rank() == 0 else None
    return broadcast_object(found)


def _find_model(run: str) -> Model:
    for path in (Path("outputs", run), Path(run).expanduser()):
        path = path.resolve()
        if huggingface.is_model(path):
            return Model(path, Path("outputs", path.name), folder_config(path))
        checkpoint = path if (path / "meta.json").is_file() else storage.latest(path / "checkpoints")
        if checkpoint is not None:
            directory = checkpoint.parents[1] if checkpoint.parent.name == "checkpoints" else checkpoint
            return Model(checkpoint, directory, _settings_for_inference(saved_config(storage.read_meta(checkpoint))))
    names = sorted({path.parents[1].name for path in Path("outputs").glob("*/checkpoints/step_*")})
    listed = f"the runs in outputs/ are {', '.join(names[:20])}{', ...' * (len(names) > 20)}" if names else "none exists"
    raise ConfigError(
        f"run={run} must be the name of a run in outputs/ that has a checkpoint ({listed}), the path of such a run or of a "
        "checkpoint, or the path of a folder in Hugging Face's format, which contains a config.json"
    )


def results_folder(model: Model, output: str) -> Path:
    """Return the folder `output`, or by default a folder next to the directory of the run.

    Raises:
        ConfigError: on every rank, if the folder cannot be written.
    """
    folder = Path(output).expanduser() if output else model.directory.with_name(f"{model.directory.name}-evaluation")
    existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    with sync_errors():
        if dist.get_rank() == 0 and not os.access(f"{existing}/", os.W_OK):
            raise ConfigError(f"{folder} cannot be written: {existing} is not a writable folder; {ANOTHER_FOLDER}")
    return folder


def write_table_and_plot(folder: Path, name: str, table: str, plot: Callable[[Path], None]) -> None:
    """Print the table of an evaluation, and write the table and a plot to a folder.

    Args:
        folder: the folder, which may be new.
        name: the name of both files, without the suffix.
        table: the content of the Markdown file.
        plot: a function that writes the plot to a path.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plot(folder / f"{name}.png")
        write_atomically(folder / f"{name}.md", table.encode())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}; {ANOTHER_FOLDER}") from error
    finally:  # Print last, because the program that reads the output may have exited.
        print(table, end="", flush=True)
    print(f"{folder}/{name}.md and {folder}/{name}.png contain this table and its plot.", file=sys.stderr)


def _settings_for_inference(config: Config) -> Config:
    has_text = config.data.held_out is not None or config.data.eval_fraction > 0
    trainer = TrainerConfig(
        precision=config.trainer.precision,
        fp8_attention=config.trainer.fp8_attention,
        compile=False,
        eval_tokens=config.trainer.eval_tokens if has_text else TrainerConfig.eval_tokens,
    )
    return Config(name=config.name, model=config.model, data=config.data, trainer=trainer)


def folder_config(path: Path) -> Config:
    """Return the settings of a model in Hugging Face's format.

    Raises:
        ConfigError: config.json does not describe a supported model.
    """
    data = DataConfig(tokenizer=str(path / "tokenizer.json"), eval_fraction=0.0)
    return Config(path.name, huggingface.model_config(path), data, trainer=TrainerConfig(compile=False))
