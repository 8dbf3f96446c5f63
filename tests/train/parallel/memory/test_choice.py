"""Choices of memory plans: as few costs as possible, within the memory of the GPU and of the host."""

import math
from itertools import product

import pytest
import torch

from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.capacity import GIB, Capacity
from ringattn.train.parallel.memory.choice import COMFORTABLE_TIMES, EQUAL_TIMES, choose_plan
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.parallel.timing import Gpu, Machine, kernels_alone, step_time
from ringattn.train.settings.config import Config, DataConfig, MemoryConfig, ModelConfig

LLAMA = ModelConfig(layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, tie_embeddings=False)
H200 = Gpu.named("NVIDIA H200", 9)


def machine(ranks: int, gpu: float = 139.8, host: float = 125, device: str = "cuda") -> Machine:
    capacity = Capacity(gpu * GIB if device == "cuda" else None, host * GIB)
    return Machine(torch.device(device), H200, ranks, 8, 128_256, True, True, capacity)


def job(seq_len: int, layers: int = 32, **memory: object) -> Config:
    model = ModelConfig(**(vars(LLAMA) | {"layers": layers}))
    return Config(model=model, data=DataConfig(seq_len=seq_len, mask_documents=False), memory=MemoryConfig(**memory))


def choose(config: Config, gpus: Machine) -> MemoryPlan:
    return choose_plan(config, MeshShape(1, gpus.ranks, 1), gpus)[0]


@pytest.mark.parametrize(
    ("setting", "plan"),
    [
        ("keep", MemoryPlan()),
        ("recompute", MemoryPlan(recomputed_blocks=32)),
        ("recompute-all", MemoryPlan(recomputed_blocks=32, attention_blocks=32)),
        ("offload", MemoryPlan(recomputed_blocks=32, offloaded_blocks=31)),
        ("offload-inputs", MemoryPlan(recomputed_blocks=32, attention_blocks=32, offloaded_blocks=31)),
    ],
)
def test_settings_determine_the_plan(setting, plan):
    for tokens in (1024, 131_072):
        assert choose(job(tokens, activations=setting, optimizer="keep"), machine(8)) == plan


def test_the_optimizer_is_offloaded_as_the_settings_say():
    hosts = [choose(job(8192, optimizer=setting), machine(8)).host_blocks for setting in ("keep", "offload", "auto")]
    assert hosts == [0, 32, 0]
    # One H200 cannot hold the optimizer of 8 billion parameters, and its host has just enough memory for it.
    assert choose(job(65_536), machine(1)).host_blocks > 0


def test_short_sequences_keep_everything_on_the_gpu():
    assert choose(job(8192), machine(8)) == MemoryPlan()


def test_no_more_blocks_are_recomputed_than_necessary():
    """Without host memory, 13 of 32 blocks are recomputed, as in a measured run of four H200s at 131,072 tokens."""
    gpus = machine(4, host=5)
    plan, needs = choose_plan(job(131_072, optimizer="keep"), MeshShape(1, 4, 1), gpus)
    assert plan == MemoryPlan(recomputed_blocks=13)
    limit = gpus.capacity._replace(fraction=0.85)
    assert limit.fits(needs)
    assert not limit.fits(estimate.needs(job(131_072), MeshShape(1, 4, 1), 128_256, True, True, MemoryPlan(12)))


def test_cpus_never_recompute_by_default():
    assert choose(job(1_048_576), machine(4, host=100_000, device="cpu")) == MemoryPlan()


def test_attention_is_recomputed_only_if_nothing_else_fits():
    config = job(1_048_576)
    assert choose(config, machine(4)).attention_blocks == 0
    assert choose(config, machine(4, host=20)).attention_blocks > 0


def test_if_no_plan_fits_the_one_that_needs_the_least_memory_is_returned():
    gpus = machine(1, gpu=20, host=30)
    plan, needs = choose_plan(job(1_048_576), MeshShape(1, 1, 1), gpus)
    assert not gpus.capacity.fits(needs)
    assert plan.attention_blocks == plan.recomputed_blocks == 32


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "host"), [(20, 40), (30, 10), (25, 25), (35, 60), (60, 60)])
def test_no_other_plan_is_faster(gpu, host):
    """The model has so few layers that the test can compare all plans. None of them has chunks."""
    config, shape, gpus = job(131_072, layers=4, chunk=0), MeshShape(1, 1, 1), machine(1, gpu, host)
    attention = kernels_alone(config, shape, H200)

    def seconds(plan: MemoryPlan) -> float:
        return step_time(config, shape, gpus, plan, attention).seconds

    def fits(plan: MemoryPlan, fraction: float) -> bool:
        needs = estimate.needs(config, shape, gpus.vocab_size, True, True, plan)
        return gpus.capacity._replace(fraction=fraction).fits(needs)

    def fastest(fraction: float) -> float:
        return min((seconds(plan) for plan in plans if fits(plan, fraction)), default=math.inf)

    counts = product(range(5), range(5), range(4), range(5))
    plans = [MemoryPlan(*each) for each in counts if max(each[1], each[2]) <= each[0]]
    plan = choose(config, gpus)
    assert fits(plan, 0.95) == (fastest(0.95) < math.inf)
    if fastest(0.95) < math.inf:
        is_comfortable = fastest(0.85) <= COMFORTABLE_TIMES * fastest(0.95)
        assert seconds(plan) <= EQUAL_TIMES * fastest(0.85 if is_comfortable else 0.95)
