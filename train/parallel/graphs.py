"""Replay the forward pass and the backward pass of a small model from two CUDA graphs.

For short shards, the launches on the host take longer than the kernels on the GPU. Launching a CUDA graph launches all kernels
of a pass at once.

A graph always runs the same kernels, although the documents differ from step to step. Attention therefore uses a plan with
fixed schedules (`Plan.is_fixed`). Before every replay, the tables of the plan are copied to the memory of the graph
(`ringattn.planning.plan_slots`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.func import functional_call

from ringattn import Layout, Mask
from ringattn.comm import connect
from ringattn.kernels.choices import MAX_HEAD_DIM
from ringattn.load_balance import MAX_CHUNKS, TILE, always_has_equal_shards
from ringattn.planning.plan_slots import PlanSlots
from ringattn.planning.rank_plan import Plan, use_plans
from ringattn.train.model.gpt import GPT, padded_vocabulary
from ringattn.train.model.loss import cross_entropy
from ringattn.train.parallel.memory import estimate
from ringattn.train.parallel.memory.capacity import Capacity, Needs
from ringattn.train.parallel.mesh import Masks, Mesh, MeshShape, attention, causal_masks, choose_layout
from ringattn.train.settings.config import Config, ConfigError

# If the matrix products of a block need fewer than MAX_BLOCK_FLOPS, the host may limit the speed. An H100 computes 1e12 FLOPs
# in 1.5 ms.
MAX_BLOCK_FLOPS = 1e12

# Every layout gives all ranks equal shares if the tokens per rank are a multiple of EQUAL_SHARE.
EQUAL_SHARE = TILE * MAX_CHUNKS


def can_capture(config: Config, shape: MeshShape, device: torch.device, compiled: bool, bf16: bool) -> bool:
    """Return whether CUDA graphs of a micro-step are possible. Arguments as in `uses_graphs`."""
    model, seq_len = config.model, config.data.seq_len
    # PyTorch's attention reads the mask on the host.
    has_kernel = config.parallel.kernel in ("auto", "hopper", "triton") and model.resolved_head_dim <= MAX_HEAD_DIM
    # The hooks of several FSDP groups cannot be captured.
    one_group = estimate.blocks_per_group(model, bf16, shape.ranks) == model.layers
    # Message sizes must not depend on the documents, so all shards must have the same length.
    has_equal_parts = seq_len % shape.sequence == 0 and always_has_equal_shards(seq_len, shape.ring)
    # Graphs support neither the load-balancing loss of experts nor sinks.
    is_dense = model.experts is None and not model.sinks
    # CUDA graphs with several attention masks were tested only on one GPU.
    has_one_mask = shape.sequence == 1 or len({*model.windows}) == 1
    is_supported = is_dense and has_one_mask and compiled and has_kernel and one_group and has_equal_parts
    return device.type == "cuda" and is_supported


def uses_graphs(config: Config, shape: MeshShape, device: torch.device, compiled: bool, bf16: bool) -> bool:
    """Return whether a run uses CUDA graphs. By default, a run uses graphs if the host would be slower than the GPU.

    `compiled` is True if all blocks are compiled, are not recomputed, and are not in host memory.

    Raises:
        ConfigError: `trainer.cuda_graphs` is True, but CUDA graphs are not possible.
    """
    wanted, possible = config.trainer.cuda_graphs, can_capture(config, shape, device, compiled, bf16)
    if wanted and not possible:
        raise ConfigError(
            "trainer.cuda_graphs=true requires a CUDA device, a model without experts and sinks, trainer.compile=true, "
            "parallel.kernel=auto, hopper or triton, equal windows in all layers if ranks share a sequence, blocks that are "
            f"neither recomputed nor in host memory and have at most {estimate.GROUP_BYTES >> 20} MiB of parameters, or "
            f"{estimate.SMALL_MODEL >> 20} MiB on one rank, and a data.seq_len that gives every rank an equal share, such as "
            f"{EQUAL_SHARE * shape.sequence:,}: leave trainer.cuda_graphs out, or change these settings"
        )
    if not possible or wanted is not None:
        return possible and bool(wanted)
    tokens = config.trainer.batch_size * estimate.tokens_per_rank(config, shape)
    return 2 * tokens * estimate.block_parameters(config.model) <= MAX_BLOCK_FLOPS


def choose_graphs(
    config: Config,
    shape: MeshShape,
    device: torch.device,
    compiled: bool,
    bf16: bool,
    vocab_size: int,
    needs: Needs,
    capacity: Capacity,
) -> tuple[bool, Needs]:
    """Return whether a run uses CUDA graphs, and the bytes that a rank then needs, by purpose.

    `needs` contains the bytes without graphs. By default, a run uses no graphs if the graphs do not fit into memory. Other
    arguments and errors as in `uses_graphs`.
    """
    if not uses_graphs(config, shape, device, compiled, bf16):
        return False, needs
    with_graphs = needs._replace(device=needs.device | {"CUDA graphs": graph_bytes(config, shape, vocab_size, bf16)})
    if config.trainer.cuda_graphs is None and not capacity.fits(with_graphs):
        return False, needs
    return True, with_graphs


def graph_bytes(config: Config, shape: MeshShape, vocab_size: int, bf16: bool) -> float:
    """Estimate the bytes that CUDA graphs add to the peak memory of a step."""
    model, size = config.model, 2 if bf16 else 4
    head = padded_vocabulary(model, vocab_size) * model.dim
    parameters = model.layers * estimate.block_parameters(model) + head * (1 if model.tie_embeddings else 2)
    evaluation = size * (6 * model.dim + 3 * model.resolved_ffn_dim)
    if shape.sequence > 1:
        evaluation += 8 * model.heads * model.resolved_head_dim  # two fp32 outputs of attention
    tokens = config.trainer.batch_size * estimate.tokens_per_rank(config, shape)
    return 2 * size * parameters + max((size + 4) * parameters, tokens * evaluation)


class ModelGraphs:
    """Captures and replays two CUDA graphs: the forward pass and the backward pass of a micro-step.

    FSDP gathers the parameters at different addresses in every step. Every replay first copies the parameters to the memory of
    the graphs.

    Args:
        model: the model, with compiled blocks. One FSDP group contains all parameters.
        mesh: the ranks that share a sequence must capture their graphs together.

    Attributes:
        slots: the memory of each mask's attention plan.
        uncounted_bytes: the graphs' memory, which torch does not count as allocated.
    """

    def __init__(self, model: GPT, config: Config, mesh: Mesh, vocab_size: int, bf16: bool, device: torch.device) -> None:
        batch, dtype = config.trainer.batch_size, torch.bfloat16 if bf16 else torch.float32
        # Capture with one document per sequence, because no shape depends on the documents.
        documents = [[config.data.seq_len]] * batch if config.data.mask_documents else None
        masks = causal_masks(config.model, documents)
        layout = choose_layout(config, mesh.shape, masks)
        self._model = model
        self._rows = [layout.rows(rank) for rank in range(layout.ranks)]
        owners = ((key, *key.rpartition(".")[::2]) for key, _ in model.named_parameters())
        self._parameters = {f"model.{key}": (model.get_submodule(owner), name) for key, owner, name in owners}
        attend = attention(config, mesh, masks, layout, training=True)
        options = {"vocab_size": vocab_size, "num_valid": 1, "compiled": True}
        whole = _WithoutHooks(model)

        def compute(tokens: Tensor, positions: Tensor, labels: Tensor, *parameters: Tensor) -> Tensor:
            finish = partial(cross_entropy, labels=labels, **options)
            named = dict(zip(self._parameters, parameters, strict=True))
            return functional_call(whole, named, (tokens, positions, attend, finish))

        positions = layout.positions(mesh.sequence.get_local_rank()).to(device)
        tokens = torch.zeros(batch, len(positions), dtype=torch.int64, device=device)
        shapes = [parameter.shape for parameter in model.parameters()]
        parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for shape in shapes]
        inputs = tokens, positions, tokens.clone(), *parameters
        self._ring_rank = mesh.ring.get_local_rank()
        plans = [Plan(mask, layout.whole, self._ring_rank, device, is_fixed=True) for mask in masks.values()]
        with torch.autograd.set_multithreading_enabled(False):
            with use_plans(plans):
                # The first call connects the ranks, compiles the kernels and requests all tables of the attention plans. Use
                # copies of the parameters, because autograd would bind the parameters to the stream of the capture.
                copies = [nn.Parameter(x.detach()) for x in parameters]
                torch.autograd.grad(compute(*inputs[:3], *copies), copies)
            self.slots = [PlanSlots(plan, device) for plan in plans]
            unused = _unused_bytes(device)
            # torch keeps a warm-up pass alive and warns about its stream, which only matters if gradients are accumulated.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
            with use_plans([slots.plan for slots in self.slots]):
                self._graphed: Any = torch.cuda.make_graphed_callables(compute, inputs)
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)
        self.uncounted_bytes = _unused_bytes(device) - unused
        self._copies = [x.detach() for x in parameters]
        if documents is None:
            for slots, mask in zip(self.slots, masks.values(), strict=True):
                slots.write(slots.pack(self._plan(mask, layout)))
        object.__setattr__(model, "replay", self._replay)
        register_fsdp_forward_method(model, "replay")
        axes = (mesh.ring, config.parallel.route == "relay"), (mesh.ulysses, False)
        groups = [(axis.get_group().group_name, relays) for axis, relays in axes if axis.size() > 1]
        self._watchdogs = [connect.connect(name, device, relays=relays).watchdog for name, relays in groups]
        self._hops: list[tuple[Any, Any]] = []

    def pack(self, masks: Masks, layout: Layout, plans: Sequence[Plan]) -> list[Tensor]:
        """Return the attention plans in the format that `compute_loss` takes, or [] if the masks have no documents.

        `plans` contains fixed plans on the CPU for these masks and this layout. If `plans` is empty, this method computes the
        plans.
        """
        assert [layout.rows(rank) for rank in range(layout.ranks)] == self._rows, "all layouts give the ranks equal shares"
        if any(mask.documents is None for mask in masks.values()):
            return []
        plans = plans or [self._plan(mask, layout) for mask in masks.values()]
        return [slots.pack(plan) for slots, plan in zip(self.slots, plans, strict=True)]

    def _plan(self, mask: Mask, layout: Layout) -> Plan:
        return Plan(mask, layout.whole, self._ring_rank, torch.device("cpu"), is_fixed=True)

    def compute_loss(self, tokens: Tensor, positions: Tensor, labels: Tensor, packed: Sequence[Tensor]) -> Tensor:
        """Return the sum of the losses of this rank's tokens. The result supports a backward pass. Call `finish` afterwards.

        `packed` contains the results of `pack`.
        """
        for slots, each in zip(self.slots, packed, strict=False):
            slots.write(each)
        # Watchdogs do not see the hops of a graph, so a whole micro-step counts as one hop.
        self._hops = [(watchdog, watchdog.start("replay of a CUDA graph", 0, 1, ())) for watchdog in self._watchdogs]
        replay: Any = self._model.replay
        return replay(tokens, positions, labels)

    def finish(self) -> None:
        for watchdog, hop in self._hops:
            watchdog.finished(hop)
        self._hops = []

    def _replay(self, *inputs: Tensor) -> Tensor:
        parameters = (getattr(owner, name) for owner, name in self._parameters.values())
        return self._graphed(*inputs, *_Copy.apply(self._copies, *parameters))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  # torch does not declare the parameters
        ctx: Any, copies: list[Tensor], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        torch._foreach_copy_(copies, parameters)
        return tuple(x.detach() for x in copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad.detach() for grad in grads)


def _unused_bytes(device: torch.device) -> int:
    """Return the bytes that torch has reserved, but neither uses nor can release."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


class _WithoutHooks(nn.Module):
    """Runs a model without the hooks of FSDP."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Tensor:
        return self.model.forward(*inputs)
