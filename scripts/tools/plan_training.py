"""Predict the fastest mesh and memory plan for a model and a sequence length. No GPU is required.

    python -m scripts.tools.plan_training --model 8b --seq-len 1048576 --gpus 1 4 8
    python -m scripts.tools.plan_training --model 8b --seq-len 262144 --gpus 2 --gpu h100 --host-gib 500 trainer.float8=true

For each number of GPUs, the script prints the mesh (data parallel, ring, Ulysses) with the highest predicted tokens/s. The
script also prints the memory plan, the memory, the seconds per step and the MFU. If the fastest mesh trains several sequences
per step, the script also prints the fastest mesh with one sequence. If no mesh fits into memory, the script prints how many
GPUs, tokens or GiB of host memory would suffice. The same code chooses the memory plan of a run (`train/parallel/memory`).

All figures are predictions for bf16 with torch.compile, for sequences of one document. They follow from these measurements:

- attention: the speed of the kernels and of the interconnect on one to four H200s (`ringattn/planning/cost_model.py`)
- matrix products, fused kernels, collectives and the time of the host: runs on one to four H100s and H200s
  (`train/parallel/timing.py`, tests/train/parallel/test_prediction.py)
- copies to the host at 51 GB/s per direction and GPU, and updates of 4.3e9 parameters/s on 16 cores: one H200
- memory: the peaks of runs on H100s and H200s (tests/train/parallel/memory/test_estimate.py), also with CUDA graphs
  (tests/train/parallel/test_graphs.py)

The speed of the network between hosts is an assumption (40 GB/s per GPU). Figures of GPUs other than H100 and H200 are also
assumptions. Further arguments are settings of train/run.py, such as memory.optimizer=keep. The settings parallel.ring and
parallel.ulysses restrict the meshes.
"""

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from math import gcd

import hydra
import torch
from hydra.core.config_store import ConfigStore

from ringattn.planning.ulysses_degree import MAX_PLANNED_RANKS
from ringattn.train.commands.errors import USER_ERRORS
from ringattn.train.commands.messages import describe_error
from ringattn.train.commands.run import CONFIGS
from ringattn.train.model import float8
from ringattn.train.parallel import prediction
from ringattn.train.parallel.graphs import choose_graphs
from ringattn.train.parallel.memory.capacity import GIB, Capacity, Needs, describe_bytes
from ringattn.train.parallel.memory.choice import choose_plan
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.parallel.timing import Gpu, Machine, StepTime, sequences_per_step, step_time
from ringattn.train.settings.config import Config, ConfigError, check_mesh, check_values, with_settings
from ringattn.train.settings.literal import to_config
from ringattn.train.settings.overrides import check_overrides
from scripts import command

# (name of the GPU, major compute capability, memory in GiB as CUDA reports it)
GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 9, 79.2),
    "h200": ("NVIDIA H200", 9, 139.8),
    "b200": ("NVIDIA B200", 10, 178.4),
    "a100": ("NVIDIA A100-SXM4-80GB", 8, 79.2),
}
# (GiB of host memory, cores) per GPU of the machines on which we measured
HOST_GIB_PER_GPU, CORES_PER_GPU = 125, 16
MOST_GPUS = 4096  # in the search for a number of GPUs that suffices


@dataclass(frozen=True)
class Cluster:
    gpu: str  # a key of GPUS
    gpus: int
    gpus_per_host: int
    host_gib: float | None  # None: HOST_GIB_PER_GPU

    def machine(self, vocab_size: int) -> Machine:
        name, capability, gib = GPUS[self.gpu]
        per_host = min(self.gpus, self.gpus_per_host)
        host = HOST_GIB_PER_GPU if self.host_gib is None else self.host_gib / per_host
        gpu, capacity = Gpu.named(name, capability), Capacity(gib * GIB, host * GIB)
        device = torch.device("cuda")
        return Machine(device, gpu, self.gpus, self.gpus_per_host, vocab_size, True, True, capacity, CORES_PER_GPU)


@dataclass(frozen=True)
class Result:
    shape: MeshShape
    plan: MemoryPlan
    needs: Needs
    time: StepTime
    speed: float  # tokens/s of all GPUs


def meshes(config: Config, ranks: int) -> list[MeshShape]:
    """Return the meshes that have the given `parallel.ring` and `parallel.ulysses`."""
    ring, ulysses = config.parallel.ring, config.parallel.ulysses
    return [
        shape
        for shape in prediction.possible_shapes(config, ranks)
        if ring in (None, shape.sequence)
        and shape.ulysses == (gcd(shape.sequence, config.model.heads) if ulysses == 0 else ulysses or shape.ulysses)
    ]


def fitting(config: Config, machine: Machine) -> Iterator[tuple[MeshShape, MemoryPlan, Needs]]:
    """Yield the meshes that fit into memory. Raise ConfigError if some meshes fit, but none permits `trainer.cuda_graphs`."""
    count, impossible = 0, None
    for shape in meshes(config, machine.ranks):
        plan, needs = choose_plan(config, shape, machine)
        if machine.capacity.fits(needs):
            situation = config, shape, machine.device, plan == MemoryPlan(), True
            try:
                _, needs = choose_graphs(*situation, machine.vocab_size, needs, machine.capacity)
            except ConfigError as error:
                impossible = error
                continue
        if machine.capacity.fits(needs):
            count += 1
            yield shape, plan, needs
    if impossible is not None and not count:
        raise impossible


def results(config: Config, machine: Machine) -> list[Result]:
    found = []
    for shape, plan, needs in fitting(config, machine):
        time = step_time(config, shape, machine, plan, prediction.attention_of_layers(config, shape, machine))
        tokens = config.data.seq_len * sequences_per_step(config, shape)
        found.append(Result(shape, plan, needs, time, tokens / time.seconds))
    return sorted(found, key=lambda each: -each.speed)


def describe(config: Config, machine: Machine, result: Result) -> str:
    sequences = sequences_per_step(config, result.shape)
    flops = result.speed / config.data.seq_len * prediction.model_flops(config, machine.vocab_size) / machine.ranks
    gpu, host = machine.capacity.gpu or 0, machine.capacity.host
    peak = machine.gpu.peak if machine.gpu else 0
    lines = {
        "mesh": f"{prediction.describe_shape(result.shape)}, {sequences} sequence{'s' * (sequences > 1)} per step",
        "memory plan": result.plan.describe(config.model.layers) or "everything stays on the GPU",
        "GPU memory": f"{describe_bytes(result.needs.device)} of {gpu / GIB:.1f} GiB per GPU",
        "host memory": f"{describe_bytes(result.needs.host) or '0 GiB'} of {host / GIB:.1f} GiB per GPU",
        "step": f"{result.time.seconds:.4g} s, {result.time.exposed:.2g} s exposed, {result.speed:,.0f} tokens/s, "
        f"{flops / 1e12:.0f} TFLOP/s per GPU, MFU {flops / peak:.1%}",
    }
    return "".join(f"  {name:<13}{text}\n" for name, text in lines.items())


def alternatives(config: Config, cluster: Cluster, vocab_size: int) -> list[str]:
    """Return changes that make the job fit into memory."""

    def fits(cluster: Cluster, config: Config = config) -> bool:
        with suppress(ConfigError):
            return any(True for _ in fitting(config, cluster.machine(vocab_size)))
        return False

    seq_len, found = config.data.seq_len, list[str]()
    counts = [2**n for n in range(MOST_GPUS.bit_length()) if 2**n > cluster.gpus]
    if (count := next((n for n in counts if fits(replace(cluster, gpus=n))), None)) is not None:
        found.append(f"{count} GPUs")
    lengths = [seq_len * part // 16 for part in range(15, 0, -1)]
    if (length := first(lengths, lambda n: fits(cluster, with_settings(config, {"data.seq_len": n})))) is not None:
        found.append(f"{length:,} tokens")
    per_host = min(cluster.gpus, cluster.gpus_per_host)
    sizes = [per_host * n for n in range(HOST_GIB_PER_GPU, 4001, 25)]
    if (size := first(sizes, lambda n: fits(replace(cluster, host_gib=n)))) is not None:
        found.append(f"hosts with {size:,} GiB")
    return found


def first(values: list[int], is_true: Callable[[int], bool]) -> int | None:
    """Return the first value for which `is_true` returns True. The function `is_true` must be monotonic."""
    index = bisect_left(values, True, key=is_true)
    return values[index] if index < len(values) else None


def report(config: Config, cluster: Cluster) -> str:
    vocab_size = config.model.vocab_size or 257
    machine = cluster.machine(vocab_size)
    lines = f"{cluster.gpus} GPU{'s' * (cluster.gpus > 1)}\n"
    try:
        found = results(config, machine)
    except ConfigError as error:
        return f"{lines}  {error}\n"
    if not found:
        what = "; ".join(alternatives(config, cluster, vocab_size)) or "none of more GPUs, a shorter length or larger hosts"
        return f"{lines}  does not fit. Each of these would fit: {what}\n"
    chosen = [found[0]] + [each for each in found if each.shape.dp == 1][:1] * (found[0].shape.dp > 1)
    return lines + "\n".join(describe(config, machine, each) for each in chosen)


def compose(model: str, seq_len: int, settings: list[str]) -> Config:
    ConfigStore.instance().store(name="schema", node=Config)
    overrides = [f"model={model}", f"data.seq_len={seq_len}", "data.mask_documents=false", "trainer.device=cuda", "name=plan"]
    if not any(setting.startswith("parallel=") for setting in settings):
        overrides.append("parallel.ulysses=null")  # The default is 1.
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = to_config(hydra.compose("train", [*overrides, *settings]))
    check_values(config)
    return config


def check_assumptions(config: Config, settings: list[str], gpu: str) -> None:
    """Raise ConfigError if a setting contradicts an option, the GPU or the assumptions of the predictions."""
    for setting in settings:
        options = {"model": "--model", "trainer.init_from": "--model", "data.seq_len": "--seq-len"}
        if option := options.get(setting.partition("=")[0].lstrip("+")):
            raise ConfigError(f"{setting} contradicts {option}: use only the option {option}")
    trainer = config.trainer
    contradictions = {
        "trainer.precision=fp32": trainer.precision == "fp32",
        "trainer.compile=false": trainer.compile is False,
        "trainer.device=cpu": trainer.device == "cpu",
        "data.mask_documents=true": config.data.mask_documents,
    }
    for setting in (name for name, is_given in contradictions.items() if is_given):
        raise ConfigError(
            f"{setting} is impossible: predictions are for bf16 with torch.compile on GPUs, and for sequences of one document; "
            "leave it out"
        )
    name, capability, _ = GPUS[gpu]
    if trainer.float8 and (capability, 0) < float8.CAPABILITY:
        raise ConfigError(f"trainer.float8=true is impossible on {name}: choose another --gpu, or leave trainer.float8 out")


def main(argv: list[str]) -> None:
    parser = command.new_parser(__doc__)
    parser.add_argument("--model", default="8b", help="a file in configs/model/; default: 8b")
    parser.add_argument("--seq-len", type=command.at_least(1), required=True, help="the tokens of a sequence")
    parser.add_argument("--gpus", type=command.at_least(1), nargs="+", default=[1, 4, 8], help="default: 1 4 8")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="default: h200")
    parser.add_argument("--gpus-per-host", type=command.at_least(1), default=8, help="default: 8")
    parser.add_argument("--host-gib", type=float, help=f"the memory of a host; default: {HOST_GIB_PER_GPU} per GPU")
    settings = [argument for argument in argv if "=" in argument and not argument.startswith("-")]
    args = parser.parse_args([argument for argument in argv if argument not in settings])
    if args.host_gib is not None and not args.host_gib > 0:
        parser.error(f"argument --host-gib: {args.host_gib} must be greater than 0")
    try:
        check_overrides(settings)
        config = compose(args.model, args.seq_len, settings)
        check_assumptions(config, settings, args.gpu)
        for count in args.gpus:
            if not meshes(config, count):
                check_mesh(config, count)
                raise ConfigError(
                    f"no mesh of {count} GPUs has these settings: use at most {MAX_PLANNED_RANKS} ranks per sequence, and a "
                    "multiple of the tokens of a micro-step as trainer.tokens_per_step"
                )
    except USER_ERRORS as error:
        sys.exit(f"error: {describe_error(error)}")
    print(f"Predictions for {args.model} with {args.seq_len:,} tokens per sequence on {GPUS[args.gpu][0]}\n")
    for count in args.gpus:
        print(report(config, Cluster(args.gpu, count, args.gpus_per_host, args.host_gib)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
