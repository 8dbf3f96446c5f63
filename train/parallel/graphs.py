"""Replay the parts of small blocks from CUDA graphs.

The host needs about 0.4 ms to launch one compiled part of a block, and about 0.1 ms to replay a graph of the same kernels. With
short shards, the kernels of a part take less time than their launch. Attention is not part of the graphs, because its kernels
and messages depend on the documents, which change in every step.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ringattn.train.config import Config, ConfigError
from ringattn.train.model.gpt import GPT, Block
from ringattn.train.parallel import memory
from ringattn.train.parallel.mesh import MeshShape

# If one block has fewer FLOPs than this in its matrix products, the host limits its speed. On an H100, these FLOPs take 1 ms.
MAX_BLOCK_FLOPS = 6e11

# The modules and parameters of a block that `Block.after` uses. `Block.before` uses all others.
AFTER = ("output", "ffn_norm", "gate", "up", "down")


def uses_graphs(config: Config, shape: MeshShape, device: torch.device, compiled: bool, bf16: bool) -> bool:
    """Return the value of `trainer.cuda_graphs`. If this setting is None, return whether the host would limit the speed.

    Graphs keep copies of all parameters of the blocks and of their gradients. If the setting is None, the blocks of a model
    whose parameters FSDP shards again after the forward pass are therefore never captured.

    Args:
        config: the settings of the run.
        shape: the numbers of ranks.
        device: the device of this rank.
        compiled: whether the blocks are compiled and are not recomputed in the backward pass.
        bf16: whether the model computes in bf16.

    Raises:
        ConfigError: `trainer.cuda_graphs` is True, but these blocks cannot be captured.
    """
    wanted, possible = config.trainer.cuda_graphs, device.type == "cuda" and compiled
    if wanted and not possible:
        raise ConfigError(
            "trainer.cuda_graphs=true requires a CUDA device, trainer.compile=true and blocks that are not recomputed in the "
            "backward pass: leave trainer.cuda_graphs out, or set parallel.activation_checkpointing=false"
        )
    if not possible or wanted is not None:
        return possible and bool(wanted)
    if memory.reshard_after_forward(config.model, bf16):
        return False
    tokens = config.trainer.batch_size * memory.tokens_per_rank(config, shape)
    return 2 * tokens * memory.block_parameters(config.model) <= MAX_BLOCK_FLOPS


def graph_bytes(config: Config, shape: MeshShape, bf16: bool) -> float:
    """Return the bytes by which graphs raise the peak of a step: copies of all parameters, their gradients and the inputs.

    The number of copies of the inputs was fitted to the default model with 8,192 and 16,384 tokens per rank.
    """
    model, size = config.model, 2 if bf16 else 4
    tokens = config.trainer.batch_size * memory.tokens_per_rank(config, shape)
    return 2 * size * model.layers * (memory.block_parameters(model) + tokens * model.dim)


def graph_blocks(model: GPT, batch: int, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Capture both parts of every block in CUDA graphs, and replay the graphs for inputs of the captured shapes.

    Each graph reads its inputs and the parameters of its block from memory of its own, because FSDP gathers the parameters at
    different addresses in every step. The inputs and parameters are copied before every replay. Results are bitwise the same as
    without graphs.

    Args:
        model: the model, whose blocks `compile_blocks` has compiled.
        batch: the number of batch entries.
        tokens: the number of tokens of a sequence on this rank. Inputs with another number of tokens do not use the graphs.
        dtype: the dtype in which the model computes.
        device: the device of this rank.
    """
    config = model.config
    x = torch.empty(batch, tokens, config.dim, dtype=dtype, device=device, requires_grad=True)
    attention = x.new_empty(batch, tokens, config.heads, config.resolved_head_dim, requires_grad=True)
    angles = torch.empty(1, tokens, 1, config.resolved_head_dim // 2, device=device)
    parts = [part for block in model.blocks for part in (_Part(block, "before"), _Part(block, "after"))]
    samples = []
    for part in parts:
        inputs = (x, angles, angles) if part.name == "before" else (x, attention)
        parameters = [nn.Parameter(torch.empty(shape, dtype=dtype, device=device)) for shape in part.shapes]
        samples.append((*(y.detach().clone().requires_grad_(y.requires_grad) for y in inputs), *parameters))
    # The parts are captured in the order in which they run, so that their graphs can share memory.
    graphed = torch.cuda.make_graphed_callables(tuple(part.as_function() for part in parts), tuple(samples))
    for part, function, inputs in zip(parts, graphed, samples, strict=True):
        part.replace(function, inputs[0].shape)


class _Part(nn.Module):
    """One part of a block as a function of its inputs and its parameters."""

    def __init__(self, block: Block, name: str) -> None:
        super().__init__()
        self.block, self.name = block, name
        self.names = [key for key, _ in block.named_parameters() if (key.split(".")[0] in AFTER) == (name == "after")]
        self.owners = [(block.get_submodule(key.rpartition(".")[0]), key.rpartition(".")[2]) for key in self.names]
        self.shapes = [block.get_parameter(key).shape for key in self.names]

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return getattr(self.block, self.name)(*inputs)

    def as_function(self) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        """Return a function of the inputs, followed by the parameters."""
        count = len(self.names)
        keys = [f"block.{key}" for key in self.names]
        return lambda *values: functional_call(self, dict(zip(keys, values[-count:], strict=True)), values[:-count])

    def replace(self, graphed: Callable[..., Tensor | tuple[Tensor, ...]], shape: torch.Size) -> None:
        """Make the block call `graphed` for inputs of the captured shape."""
        eager, owners = getattr(self.block, self.name), self.owners

        def run(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
            if inputs[0].shape != shape:
                return eager(*inputs)
            return graphed(*inputs, *(getattr(owner, key) for owner, key in owners))

        setattr(self.block, self.name, run)
