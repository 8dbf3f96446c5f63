"""Blocks that are replayed from CUDA graphs: when graphs are used, and that the results stay the same."""

import pytest
import torch
import torch.distributed as dist

from ringattn.train import setup, step
from ringattn.train.config import Config, ConfigError, DataConfig, ModelConfig, TrainerConfig
from ringattn.train.model.gpt import Block
from ringattn.train.parallel import graphs
from ringattn.train.parallel.mesh import MeshShape
from tests.train.jobs import job, one_rank

CUDA = torch.device("cuda", 0)
DEFAULT = ModelConfig(layers=4, dim=1024, heads=8, kv_heads=8, ffn_dim=2816, qk_norm=True)


def uses(tokens: int, ranks: int, wanted: bool | None = None, device: torch.device = CUDA, compiled: bool = True) -> bool:
    config = Config(model=DEFAULT, data=DataConfig(seq_len=tokens), trainer=TrainerConfig(cuda_graphs=wanted, batch_size=1))
    return graphs.uses_graphs(config, MeshShape(1, ranks, 1), device, compiled, bf16=True)


def test_only_short_shards_use_graphs():
    assert uses(32_768, 4) and uses(32_768, 2)
    assert not uses(131_072, 4) and not uses(32_768, 1)
    assert uses(131_072, 4, wanted=True) and not uses(32_768, 4, wanted=False)
    assert not uses(32_768, 4, device=torch.device("cpu")) and not uses(32_768, 4, compiled=False)


def test_large_models_do_not_use_graphs():
    """Each rank would keep all parameters of the model, which FSDP shards."""
    model = ModelConfig(layers=32, dim=4096, heads=32, kv_heads=32, ffn_dim=11_008)
    config = Config(model=model, data=DataConfig(seq_len=4096), trainer=TrainerConfig(batch_size=1))
    assert not graphs.uses_graphs(config, MeshShape(1, 8, 1), CUDA, compiled=True, bf16=True)


@pytest.mark.parametrize(
    ("tokens", "seq_len", "ranks", "before", "after"), [(8192, 8192, 1, 1.96, 2.43), (16_384, 32_768, 2, 2.86, 3.11)]
)
def test_the_memory_of_graphs_is_estimated(tokens, seq_len, ranks, before, after):
    """The measured peaks of the default model without and with graphs, in GiB. The estimate is within 10% of the peak."""
    config = Config(model=DEFAULT, data=DataConfig(seq_len=seq_len), trainer=TrainerConfig(batch_size=1))
    estimate = graphs.graph_bytes(config, MeshShape(1, ranks, 1), bf16=True) / 2**30
    assert before + estimate == pytest.approx(after, rel=0.1)


@pytest.mark.parametrize("impossible", [{"device": torch.device("cpu")}, {"compiled": False}])
def test_graphs_that_are_impossible_are_rejected(impossible):
    with pytest.raises(ConfigError, match="trainer.cuda_graphs=true requires a CUDA device"):
        uses(32_768, 4, wanted=True, **impossible)


def test_a_part_is_a_function_of_its_inputs_and_parameters():
    """The parameters of the block do not affect the function, and each parameter belongs to exactly one part."""
    torch.manual_seed(0)
    block = Block(ModelConfig(dim=32, heads=2, kv_heads=2, qk_norm=True, qkv_bias=True))
    block.init_weights(torch.Generator())
    x, angles = torch.randn(1, 5, 32), torch.rand(1, 5, 1, 8)
    parts = {name: graphs._Part(block, name) for name in ("before", "after")}
    assert sorted(parts["before"].names + parts["after"].names) == sorted(name for name, _ in block.named_parameters())
    inputs = {"before": (x, angles, angles), "after": (x, torch.randn(1, 5, 2, 16))}
    for name, part in parts.items():
        expected = getattr(block, name)(*inputs[name])
        parameters = [block.get_parameter(key).detach().clone() for key in part.names]
        with torch.no_grad():
            for key in part.names:
                block.get_parameter(key).add_(1)
        torch.testing.assert_close(part.as_function()(*inputs[name], *parameters), expected, rtol=0, atol=0)


def test_other_shapes_are_computed_without_graphs():
    block = Block(ModelConfig(dim=32, heads=2, kv_heads=2))
    block.init_weights(torch.Generator())
    graphs._Part(block, "after").replace(lambda *inputs: len(inputs), torch.Size((1, 5, 32)))
    assert block.after(torch.zeros(1, 5, 32), None) == 2 + 5  # the inputs and the five parameters
    assert block.after(torch.zeros(1, 6, 32), torch.zeros(1, 6, 2, 16)).shape == (1, 6, 32)


@pytest.mark.gpu
def test_training_with_graphs_gives_the_same_losses(corpus):
    """Four steps with and without graphs, with two micro-steps each, give the same bits."""
    losses = {}
    for wanted in (False, True):
        config = job(corpus, 1)
        config.model = ModelConfig(layers=2, dim=128, heads=2, kv_heads=1, qk_norm=True)
        config.trainer.device, config.trainer.cuda_graphs, config.trainer.deterministic = "cuda", wanted, True
        config.trainer.accumulate, config.trainer.steps, config.optim.lr = 2, 4, 1e-3
        with one_rank():
            run = setup.build(config)
            losses[wanted] = [step.take_step(run, i, run.sequences_per_step * (i - 1))[0]["loss"] for i in range(1, 5)]
            assert dist.get_world_size() == 1
        torch.use_deterministic_algorithms(False)
    assert losses[True] == losses[False] and losses[True][-1] < losses[True][0]
