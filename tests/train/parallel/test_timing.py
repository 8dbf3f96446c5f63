"""The parts of a step that a GPU does not hide: copies to the host, and updates on its CPU."""

from dataclasses import replace

import pytest
import torch

from ringattn.train.parallel import timing
from ringattn.train.parallel.memory.capacity import GIB, Capacity
from ringattn.train.parallel.memory.plan import MemoryPlan
from ringattn.train.parallel.mesh import MeshShape
from ringattn.train.parallel.timing import Attention, Gpu, Machine, step_time
from ringattn.train.settings.config import Config, DataConfig, ModelConfig, TrainerConfig, with_settings

LLAMA = ModelConfig(layers=32, dim=4096, heads=32, kv_heads=8, ffn_dim=14336, tie_embeddings=False)
ALONE = MeshShape(1, 1, 1)
GPUS = Machine(
    torch.device("cuda"), Gpu.named("NVIDIA H200", 9), 1, 8, 128_256, True, True, Capacity(140 * GIB, 125 * GIB), cores=16
)
PARAMETERS = 218_103_808  # of a block
BLOCK_BYTES = 2 * 2 * 4096 + 4 * 32  # per token: the input, the attention output and the log-sum-exp
NO_ATTENTION = Attention(0.0, 0.0)
HOST = 32 * (timing.HOST_BLOCK + timing.HOST_HOP) + 33 * timing.HOST_GROUP


def seconds(
    tokens: int, attention: Attention = NO_ATTENTION, machine: Machine = GPUS, accumulate: int = 1, **plan: int
) -> float:
    trainer = TrainerConfig(accumulate=accumulate)
    config = Config(model=LLAMA, data=DataConfig(seq_len=tokens, mask_documents=False), trainer=trainer)
    return step_time(config, ALONE, machine, MemoryPlan(**plan), attention).seconds


def test_recomputation_repeats_a_third_of_the_matrix_products():
    extra = seconds(65_536, recomputed_blocks=32) - seconds(65_536)
    products = 2 * 65_536 * 32 * PARAMETERS / GPUS.gpu.matmul
    assert products < extra < 1.2 * products, "fused kernels also run again"


def test_attention_runs_again_only_where_the_plan_says_so():
    attention = Attention(8.0, 20.0)
    base, half = (seconds(65_536, attention, recomputed_blocks=32, attention_blocks=count) for count in (0, 16))
    assert half - base == pytest.approx(4.0 / timing.FORWARD_SPEEDUP)


def test_copies_of_activations_are_hidden_if_the_passes_are_long_enough():
    plan = dict(recomputed_blocks=32, offloaded_blocks=31)
    assert seconds(65_536, **plan) == pytest.approx(seconds(65_536, recomputed_blocks=32))
    # With a GPU of infinite speed, each block is copied in both passes.
    fast = GPUS._replace(gpu=Gpu(1e30, 1e30, 1e30))
    exposed = seconds(65_536, machine=fast, **plan) - seconds(65_536, machine=fast, recomputed_blocks=32)
    assert exposed == pytest.approx(2 * 31 * 65_536 * BLOCK_BYTES / timing.HOST_LINK - HOST, rel=1e-3)


def test_weights_and_gradients_pass_over_the_link():
    """The forward and the backward pass need the weights, and the backward pass also sends the gradients, in parallel."""
    fast = GPUS._replace(gpu=Gpu(1e30, 1e30, 1e30), cores=1e9)
    for accumulate, copies in ((1, 2), (2, 6)):  # With several micro-steps, the gradients also return.
        extra = seconds(1024, machine=fast, accumulate=accumulate, host_blocks=32) - timing.HOST_STEP
        expected = 32 * copies * 4 * PARAMETERS / timing.HOST_LINK
        assert extra == pytest.approx(max(expected, HOST), rel=0.01)


def test_the_next_forward_pass_hides_updates_on_the_cpu():
    """All blocks are updated in the order of the forward pass. The first update is never hidden."""
    update = PARAMETERS / (16 * timing.HOST_ADAM)
    long = Attention(32 * 10 * update, 32 * 10 * update)
    assert seconds(1024, long, host_blocks=32) - seconds(1024, long, host_blocks=32, machine=GPUS._replace(cores=1e9)) == (
        pytest.approx(update)
    )
    # The GPU then updates only half of the parameters.
    assert seconds(1024, long, host_blocks=16) < seconds(1024, long)
    short = seconds(1024, host_blocks=32) - seconds(1024, host_blocks=32, machine=GPUS._replace(cores=1e9))
    assert 31 * update < short < 32 * update


def test_float8_speeds_up_products_and_adds_traffic():
    config = Config(model=LLAMA, data=DataConfig(seq_len=65_536, mask_documents=False))
    config8 = with_settings(config, {"trainer.float8": True})
    times = [step_time(each, ALONE, GPUS, MemoryPlan(), NO_ATTENTION).seconds for each in (config, config8)]
    saved = 6 * 65_536 * 32 * PARAMETERS / GPUS.gpu.matmul * (1 - 32.3 / 61.1)
    added = 2 * 65_536 * 32 * (40 * 4096 + 12 * 14_336) / GPUS.gpu.memory * (20.1 / 11.7 - 1)
    assert times[0] - times[1] == pytest.approx(saved - added)


def test_float8_does_not_speed_up_experts():
    """The speedup then applies only to the products of attention's four matrices."""
    model = replace(LLAMA, experts=8, experts_per_token=2)
    config = Config(model=model, data=DataConfig(seq_len=65_536, mask_documents=False))
    config8 = with_settings(config, {"trainer.float8": True})
    machine = GPUS._replace(gpu=GPUS.gpu._replace(memory=1e30))
    times = [step_time(each, ALONE, machine, MemoryPlan(), NO_ATTENTION).seconds for each in (config, config8)]
    attention = 2 * 4096 * (32 + 8) * 128
    assert times[0] - times[1] == pytest.approx(6 * 65_536 * 32 * attention / GPUS.gpu.matmul * (1 - 32.3 / 61.1))


def test_moments_in_8_bits_save_memory_traffic():
    config = Config(model=LLAMA, data=DataConfig(seq_len=65_536, mask_documents=False))
    config8 = with_settings(config, {"memory.moments": "8bit"})
    times = [step_time(each, ALONE, GPUS, MemoryPlan(), NO_ATTENTION).seconds for each in (config, config8)]
    parameters = 32 * PARAMETERS + 2 * 128_256 * 4096
    assert times[0] - times[1] == pytest.approx(2 * (8 - 2 * (1 + 4 / 256)) * parameters / GPUS.gpu.memory)


def test_exposed_seconds_are_those_in_which_the_gpu_does_not_compute():
    config = Config(model=LLAMA, data=DataConfig(seq_len=65_536, mask_documents=False))
    attention = timing.kernels_alone(config, ALONE, GPUS.gpu)
    late = replace_forward(attention, 0.5)
    hidden, exposed = (step_time(config, ALONE, GPUS, MemoryPlan(), each) for each in (attention, late))
    assert exposed.seconds - hidden.seconds == pytest.approx(0.5)
    assert exposed.exposed - hidden.exposed == pytest.approx(0.5)
    assert hidden.exposed == pytest.approx(timing.HOST_STEP)


def replace_forward(attention: Attention, more: float) -> Attention:
    return attention._replace(forward=attention.forward + more)


def test_attention_without_communication_follows_from_the_pairs():
    """A causal mask of N tokens has N (N + 1) / 2 pairs, and each needs 4 D multiply-adds per head in the forward pass."""
    model = replace(LLAMA, layers=1)
    config = Config(model=model, data=DataConfig(seq_len=1000), trainer=TrainerConfig(batch_size=1))
    forward, backward = timing.kernels_alone(config, MeshShape(1, 4, 1), GPUS.gpu)
    assert forward == pytest.approx(4 * 4096 * 500_500 / 4 / GPUS.gpu.attention)
    assert backward == 2.5 * forward
