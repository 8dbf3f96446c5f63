"""Train a GPT over a ring of ranks.

    torchrun --nproc_per_node=N train/run.py [overrides]        on N ranks
    python train/run.py [overrides]                             on one rank
    torchrun --nproc_per_node=N train/run.py -m a=1,2 b=3,4     a sweep: one job per combination, one after another

In an installation, the command is `ringattn-train`. The option `--help` explains the common settings, and `--cfg job` shows all
settings.

Only rank 0 reads the command line. Rank 0 broadcasts the settings and the directory of every job. All ranks therefore run the
same job, and report an invalid setting only once.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

import hydra
import torch
import torch.distributed as dist
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ringattn.train.checkpoint import storage
from ringattn.train.commands.errors import USER_ERRORS, is_out_of_memory, terminate, terminate_on_error
from ringattn.train.commands.launch_settings import resolve_settings
from ringattn.train.commands.messages import describe_error, exit_process, report_error
from ringattn.train.files import replace_link
from ringattn.train.parallel.memory.capacity import InsufficientMemory
from ringattn.train.parallel.ranks import Launch, broadcast_object, connect_ranks, disconnect_ranks
from ringattn.train.preemption import TrainingStopped
from ringattn.train.reports import startup
from ringattn.train.reports.sweep_results import OUT_OF_MEMORY, Jobs, Outcome, log_to_wandb, sweep_table
from ringattn.train.settings.config import Config, ConfigError
from ringattn.train.settings.help import common_settings
from ringattn.train.settings.literal import literal_config
from ringattn.train.settings.overrides import check_options, check_overrides, checked_name, options_first, quote_paths
from ringattn.train.settings.sweep import is_job_of_sweep, job_directory, jobs_of_sweep, varied_lengths, varied_settings
from ringattn.train.settings.token_budget import by_ranks
from ringattn.train.trainer import check_job, train

log = logging.getLogger(__name__)

# resolve(settings of Hydra, overrides, directory of the job) returns the settings of a job.
Resolve = Callable[[DictConfig, list[str], Path], Config]

# The folder of the YAML files is configs/ in the repository, and ringattn/configs/ in an installation.
CONFIGS = Path(__file__).resolve().parents[2] / "configs"

# configs/recipe/gpu.yaml contains ${by_ranks:...}.
OmegaConf.register_new_resolver("by_ranks", by_ranks, replace=True)

# In a sweep, a file with this name in a job's directory shows that a rank ran out of memory.
MEMORY_MARKER = "out_of_memory"

startup.end_part("imports")


def main() -> NoReturn:
    exit_process(run_command_line())


def run_command_line() -> int:
    """Run all jobs of the command line together with the other ranks. Return the exit status."""
    logging.raiseExceptions = False  # Do not print a traceback for every line that cannot be written.
    launch = connect_ranks()
    startup.end_part("connection")
    try:
        status = run_as_rank_zero(launch) if dist.get_rank() == 0 else run_as_other_rank()
    except KeyboardInterrupt:
        terminate(launch.store, "interrupted; every completed step is saved", 130)
    except Exception as error:
        terminate_on_error(launch.store, error)
    disconnect_ranks()
    return status


def run_as_rank_zero(launch: Launch) -> int:
    jobs = Jobs()
    OmegaConf.register_new_resolver("launch_time", lambda: launch.time, replace=True)
    OmegaConf.register_new_resolver("job_directory", job_directory, replace=True)

    # A recipe from the command line counts as a choice of the user. A recipe from `select_recipe` does not.
    recipe_chosen = any(argument.startswith("recipe=") for argument in sys.argv)

    def resolve(settings: DictConfig, overrides: list[str], directory: Path) -> Config:
        given = [text for text in overrides if recipe_chosen or not text.startswith("recipe=")]
        check_overrides(given)
        return resolve_settings(to_config(settings), given, directory, jobs.lengths, dist.get_world_size())

    def run_job(settings: DictConfig) -> None:
        context = HydraConfig.get()
        directory, is_sweep = Path(context.runtime.output_dir), context.mode == RunMode.MULTIRUN
        jobs.directory = Path(context.sweep.dir).resolve() if is_sweep else None
        params = context.sweeper.get("params") if is_sweep else None
        overrides = cast("list[str]", OmegaConf.to_container(context.overrides.task, resolve=False))
        outcome = Outcome(overrides, varied_settings(overrides, params))
        jobs.outcomes.append(outcome)
        replace_link(directory / "run.log")
        try:
            check_name(settings.name, context)
            if is_sweep and jobs.rejected is None:
                check_jobs(jobs, resolve, directory, params)
            if (error := (jobs.rejected or {}).get(tuple(overrides))) is not None:
                outcome.result = describe_failure(error, directory)
                return
            resumes = storage.latest(directory / "checkpoints") is not None
            config = outcome.config = resolve(settings, overrides, directory)
            if is_sweep:
                check_earlier_attempt(directory, launch.attempt)
            if not resumes and context.runtime.choices.get("experiment") is None:
                log.info(f"{'recipe':<12}{context.runtime.choices['recipe']} (or recipe=cpu, recipe=gpu); override any setting")
            if launch.attempt > 1:
                log.info(f"{'attempt':<12}{launch.attempt}, because torchrun has restarted all ranks")
            outcome.result = run_on_all_ranks(train, config, directory)
        except (TrainingStopped, KeyboardInterrupt):
            outcome.result = "stopped"
            raise
        except Exception as error:
            outcome.result = describe_failure(error, directory)
            if isinstance(error, USER_ERRORS):
                report_error(error)
            elif is_sweep and outcome.result == OUT_OF_MEMORY and dist.get_world_size() == 1:
                report_error(InsufficientMemory(f"{outcome.name} ran out of memory: {error}"))
            else:
                # Do not raise `error`, because Hydra would catch it and continue with the next job.
                jobs.write_results()
                terminate_on_error(launch.store, error)
        finally:
            # Write the results after every job, because a later job may crash.
            jobs.write_results()

    status = run_hydra(run_job)
    broadcast_object(None)
    if len(jobs.outcomes) > 1:
        with suppress(BrokenPipeError):  # The program that reads the output may have exited.
            print(sweep_table(jobs.outcomes), flush=True)
    if jobs.directory is not None and all(outcome.result != "stopped" for outcome in jobs.outcomes):
        log_to_wandb(jobs.outcomes, jobs.directory)
    return status or int(jobs.has_errors())


def check_jobs(jobs: Jobs, resolve: Resolve, directory: Path, params: Mapping[str, Any] | None) -> None:
    """Check all jobs of a sweep, and record the errors of jobs that cannot run. `directory` is that of any of them."""
    jobs.rejected, valid = dict[tuple[str, ...], Exception](), set[int]()
    logging.disable(logging.INFO)  # Every job logs its choices again at its start.
    try:
        for overrides in jobs_of_sweep(params):
            job = Outcome(overrides, varied_settings(overrides, params))
            path = directory.parent / job_directory(overrides, params)
            try:
                config = resolve(hydra.compose("train", overrides), overrides, path)
                run_on_all_ranks(check_job, config, path)
                valid.add(config.data.seq_len)
            except USER_ERRORS as error:
                jobs.rejected[tuple(overrides)] = error
                report_error(ConfigError(f"{job.name} cannot run: {describe_error(error)}"))
    finally:
        logging.disable(logging.NOTSET)
    jobs.lengths = [length for length in varied_lengths(params) if length in valid]


def run_on_all_ranks(function: Callable[[Config, Path], Any], config: Config, directory: Path) -> Any:
    """Call `function(config, directory)` on all ranks. Only rank 0 calls `run_on_all_ranks`."""
    broadcast_object((function, config, directory))
    return function(config, directory)


def run_as_other_rank() -> int:
    """Run the functions that rank 0 broadcasts, until rank 0 broadcasts None. Return the exit status."""
    while (job := broadcast_object(None)) is not None:
        function, config, directory = job
        try:
            function(config, directory)
        except (*USER_ERRORS, TrainingStopped):
            pass
        except Exception as error:
            describe_failure(error, directory)
            raise
    return 0


def describe_failure(error: Exception, directory: Path) -> str:
    """Return the text that the table of a sweep shows for a failed job."""
    marker = directory / MEMORY_MARKER
    if is_out_of_memory(error) and not isinstance(error, InsufficientMemory) and is_job_of_sweep(directory):
        with suppress(OSError):
            marker.touch()
    return OUT_OF_MEMORY if is_out_of_memory(error) or marker.exists() else "failed"


def check_earlier_attempt(directory: Path, attempt: int) -> None:
    """Raise an error if the job ran out of memory in an earlier attempt of this launch."""
    marker = directory / MEMORY_MARKER
    if attempt == 1:
        marker.unlink(missing_ok=True)
    elif marker.exists():
        raise InsufficientMemory(
            f"{directory} ran out of memory before torchrun restarted the ranks: start the sweep again with more ranks"
        )


def run_hydra(run_job: Callable[[DictConfig], None]) -> int:
    """Let Hydra call `run_job` for every job. Return the exit status."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Let Hydra raise errors instead of printing them.
    select_recipe()
    ConfigStore.instance().store(name="schema", node=Config)
    # Hydra creates the directory of the run from ${run_name:...} in configs/train.yaml. Therefore, the resolver checks the
    # name.
    OmegaConf.register_new_resolver("run_name", checked_name, replace=True)
    # The help text in configs/train.yaml contains ${common_settings:}.
    OmegaConf.register_new_resolver("common_settings", common_settings, replace=True)
    sys.argv[1:] = options_first(quote_paths(sys.argv[1:]))
    try:
        check_options()
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(run_job)()
    except USER_ERRORS as error:
        report_error(error)
        return 1
    except BrokenPipeError:  # A program that reads the output, such as `head`, has exited.
        return 1
    except OSError as error:  # Hydra could not write the directory of the run.
        report_error(ConfigError(f"the run's directory cannot be written: {error}; check the disk, or choose another name"))
        return 1
    except Exception as error:  # If Hydra cannot use the command line, it raises errors of various types.
        report_error(ConfigError(f"Hydra cannot use the command line: {error}; see --help and --hydra-help"))
        return 1
    except SystemExit as request:  # Hydra raises SystemExit for --help, --cfg and unknown flags. TrainingStopped ends a sweep.
        return int(request.code or 0)
    return 0


def select_recipe() -> None:
    """On a GPU, add `recipe=gpu` to a command line without a recipe or an experiment."""
    chosen = [argument for argument in sys.argv if argument.startswith(("recipe=", "experiment=", "+experiment="))]
    if torch.cuda.is_available() and not chosen and "trainer.device=cpu" not in sys.argv:
        sys.argv.insert(1, "recipe=gpu")


def to_config(settings: DictConfig) -> Config:
    """Convert the settings. Reject unknown options, even if the user has added them with Hydra's `+`."""
    return literal_config(cast("dict[str, Any]", OmegaConf.to_container(settings, resolve=True)))


def check_name(name: str | None, context: HydraConf) -> None:
    """Check the name of a run. All jobs of a sweep must have the same name.

    Raises:
        ConfigError: the name is invalid, or the jobs of a sweep have different names.
    """
    checked_name(name)
    # Hydra writes only one multirun.yaml per sweep.
    if context.mode == RunMode.MULTIRUN and not (Path(context.sweep.dir) / "multirun.yaml").exists():
        raise ConfigError(
            f"name={name} is one of several names, but all jobs of a sweep must have the same name: each job has its own "
            "directory under this name"
        )
