"""Train a GPT over a ring of ranks.

    torchrun --nproc_per_node=N train/run.py [overrides]        N ranks
    python train/run.py [overrides]                             one
    torchrun --nproc_per_node=N train/run.py -m a=1,2 b=3,4     a sweep: every combination, one after the other

Rank 0 alone reads the command line and hands each job, settings and output directory, to the other ranks: all do the
same thing, in one directory, and a mistake is reported once. `--help` and `--cfg job` show the settings.
"""

import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # Python searches a script's folder first and would find train/data.py as "data": the root takes its place
    here = Path(__file__).resolve().parent
    sys.path[:] = [str(here.parent)] + [entry for entry in sys.path if entry != str(here)]

import hydra
import torch.distributed as dist
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from ringattn.comm.watchdog import RingFault
from ringattn.train import sweep
from ringattn.train.config import Config, ConfigError
from ringattn.train.parallel import mesh as parallel
from ringattn.train.preemption import Stopped
from ringattn.train.step import Diverged
from ringattn.train.trainer import train

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
USER_ERRORS = (ConfigError, Diverged, HydraException, OmegaConfBaseException)


def main() -> int:
    """Join the other ranks and work off the jobs of the command line. Returns the exit status."""
    logging.raiseExceptions = False  # a log that cannot be written is no reason for a traceback a line
    store = parallel.start()
    try:
        status = lead(store) if dist.get_rank() == 0 else follow()
    except KeyboardInterrupt:
        end(store, "interrupted: the same name resumes from the newest checkpoint", 130)
    except Exception:
        crash(store)
    parallel.stop()
    return status


def leave(status: int) -> NoReturn:
    """End the process at once: gloo's threads sometimes abort one that ends in the usual way, after all is done."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def lead(store: dist.Store) -> int:
    """Rank 0: run every job that Hydra makes of the command line, the other ranks with it. Returns the exit status."""
    outcomes: list[sweep.Outcome] = []

    def job(settings: DictConfig) -> None:
        context = HydraConfig.get()
        given = OmegaConf.to_container(context.overrides.task, resolve=False)
        overrides = [override for override in given if not override.startswith("hydra")]
        try:
            config, directory = typed(settings), Path(context.runtime.output_dir)
            check_name(config.name, context)
            parallel.broadcast_object((config, directory))
            outcomes.append(sweep.Outcome(overrides, train(config, directory)))
        except USER_ERRORS as error:
            complain(error)
            outcomes.append(sweep.Outcome(overrides, None))
        except Stopped:
            outcomes.append(sweep.Outcome(overrides, None, stopped=True))
            raise
        except Exception:
            crash(store)  # here, because Hydra would go on with the next job
        finally:
            if context.mode == RunMode.MULTIRUN:  # after every job: a later one may crash
                (Path(context.sweep.dir) / "sweep.md").write_text(sweep.table(outcomes) + "\n")

    status = run_hydra(job)
    parallel.broadcast_object(None)
    if len(outcomes) > 1:
        print(sweep.table(outcomes), flush=True)
    return status or int(any(outcome.failed for outcome in outcomes))


def check_name(name: str | None, context: HydraConf) -> None:
    """Raise ConfigError for a name that gives a run, or the jobs of a sweep, no directory to itself."""
    if not name:
        given = "null" if name is None else name
        raise ConfigError(f"name={given} names no directory: give a name, or leave it out for the time of the launch")
    # Hydra wrote that file beside the directory of the launch, which what single jobs are named has no part in
    if context.mode == RunMode.MULTIRUN and not (Path(context.sweep.dir) / "multirun.yaml").exists():
        raise ConfigError(
            f"name={name} is one of several, which would scatter the sweep: give one name, under which each job has a directory"
        )


def run_hydra(job: Callable[[DictConfig], None]) -> int:
    """Let Hydra compose the settings and call `job`, once or for every job of a sweep. Returns the exit status."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of being printed
    ConfigStore.instance().store(name="schema", node=Config)
    try:
        hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")(job)()
    except USER_ERRORS as error:
        complain(error)
        return 1
    except OSError as error:  # those of a job do not come here
        complain(ConfigError(f"the run's directory cannot be made or written: {error}; check the disk, or give another name"))
        return 1
    except SystemExit as end:  # --help, --cfg, a flag that does not exist; or Stopped, which ends a whole sweep
        return int(end.code or 0)
    return 0


def typed(settings: DictConfig) -> Config:
    """The settings as dataclasses; an option forced in with `+` is refused as any other unknown one."""
    return OmegaConf.to_object(OmegaConf.merge(Config, OmegaConf.to_container(settings, resolve=True)))


def follow() -> int:
    """Any other rank: run the jobs that rank 0 hands out. A mistake ends a job on all ranks, and rank 0 reports it."""
    while (job := parallel.broadcast_object(None)) is not None:
        try:
            train(*job)
        except (*USER_ERRORS, Stopped):
            continue
    return 0


def complain(error: Exception) -> None:
    """One line for a mistake of the user's."""
    print("error:", describe(error), file=sys.stderr, flush=True)


def describe(error: Exception) -> str:
    """What is wrong, in one line; Hydra spreads it over several, and over the error's cause."""
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and is_dataclass(cause.object_type):
        known = ", ".join(field.name for field in fields(cause.object_type))
        return f"unknown option {cause.full_key}: choose one of {known}"
    if isinstance(error, OverrideParseException):
        *_, what = (line for line in error.message.splitlines() if line.strip(" ^") and not line.startswith("See https"))
        what = "no value that Hydra can read" if what.startswith("Lexer") else what
        return f"{error.override}: {what}; quote brackets, ~ and the like for Hydra, too: 'key=\"value\"'"
    if isinstance(cause, OmegaConfBaseException):
        where = f"{cause.full_key}: " if cause.full_key else ""
        return where + str(cause).splitlines()[0]
    text = " ".join(re.split("Config search path|See https", str(error))[0].split())
    return text + ("; begin the file with # @package _global_" if text.startswith("In 'experiment/") else "")


def crash(store: dist.Store) -> NoReturn:
    """End this process at once, since others may wait for it for ever in a collective; torchrun then ends them.

    Only the first rank to fail says why: the failures of the others follow from it.
    """
    what = outside_cause(sys.exc_info()[1]) or traceback.format_exc()
    end(store, f"rank {dist.get_rank()} failed: {what}", 1)


def outside_cause(error: BaseException) -> str | None:
    """One line for what is no mistake of the program, and where in it is of no interest: disks, and ranks that are gone."""
    if isinstance(error, RingFault):
        return str(error)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return f"{error}: check the disk; the same name goes on afterwards"
    if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
        return f"another rank is gone, and its own output may say why: {str(error).splitlines()[0]}"
    return None


def end(store: dist.Store, text: str, status: int) -> NoReturn:
    """End this process at once; only the first rank to do so says why."""
    if store.add("failures", 1) == 1:
        print(text, file=sys.stderr, flush=True)
    os._exit(status)


if __name__ == "__main__":
    leave(main())
