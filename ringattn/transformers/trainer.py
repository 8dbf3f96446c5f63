"""Hugging Face's `Trainer` on sequences that are sharded over a ring of ranks.

`RingMixin` gives the ranks of a ring the same batches, and shards each batch before the loss. `RingMixin` also corrects the
numbers that Trainer counts or gathers over all ranks. The mean loss equals the loss of Trainer in one process.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader
from transformers import Trainer

from ringattn.layout import Layout
from ringattn.transformers.batch import layout_of, next_labels, ring_of, shard_batch
from ringattn.transformers.loader import ignore_repeated_rows, prepare_loader
from ringattn.transformers.model import put_on_ring

Base = Trainer if TYPE_CHECKING else object


class RingMixin(Base):
    """Put this class in front of a trainer: `class RingSFTTrainer(RingMixin, SFTTrainer): pass`.

    The TrainingArguments decide whether accelerate replicates the parameters (DDP), or shards the parameters over all ranks
    (FSDP2).

    Args:
        ring_size: the number of neighbouring ranks that share a sequence; None for all ranks. Other rings receive other
            batches, like the ranks of data-parallel training. `per_device_train_batch_size` counts the sequences per ring.

    Raises:
        ValueError: the model or an argument of the trainer is not supported on a ring.
    """

    def __init__(self, *args: Any, ring_size: int | None = None, **kwargs: Any) -> None:
        check_class(type(self))
        self._requested_ring_size = ring_size
        super().__init__(*args, **kwargs)
        check_trainer(self)
        assert self.model is not None
        put_on_ring(self.model, self.ring_mesh)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.ring_mesh = _create_mesh(self._requested_ring_size, self.accelerator.num_processes, self.accelerator.device)
        self.ring_size = 1 if self.ring_mesh is None else self.ring_mesh.size()
        trainer: Any = self
        trainer.accelerator.prepare_data_loader = self._prepare_loader
        trainer.accelerator.prepare_model = partial(_prepare_model, trainer.accelerator.prepare_model)
        trainer.accelerator.gather_for_metrics = trainer.gather_function = self._gather_over_rings

    def call_model_init(self, *args: Any, **kwargs: Any) -> Any:
        model = super().call_model_init(*args, **kwargs)
        put_on_ring(model, self.ring_mesh)
        return model

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        arguments = shard_batch(inputs, self.ring_mesh)
        own_items = arguments.pop("num_items_in_batch", None)
        if num_items_in_batch is None and own_items is not None:
            num_items_in_batch = own_items * self.accelerator.num_processes
        result: Any = super().compute_loss(model, arguments, return_outputs, num_items_in_batch)
        loss = result[0] if return_outputs else result
        if self.ring_mesh is not None:
            # Report the mean loss of the ring, but keep the gradient of this rank's loss.
            mean = loss.detach().clone()
            dist.all_reduce(mean, group=self.ring_mesh.get_group())
            loss = loss + (mean / self.ring_size - loss.detach())
        return (loss, result[1]) if return_outputs else loss

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None) -> Any:
        inputs = ignore_repeated_rows(inputs, self.ring_size, self.accelerator)
        has_labels = next_labels(inputs) is not None
        arguments = inputs if has_labels else shard_batch(self._prepare_inputs(inputs), self.ring_mesh)
        loss, logits, labels = super().prediction_step(model, arguments, prediction_loss_only, ignore_keys)
        if loss is not None:
            loss = self.accelerator.reduce(loss, "mean")  # each ring has divided by the labels of all rings
        if logits is not None:
            logits = tree_map(partial(_unshard, layout=layout_of(inputs, self.ring_size), mesh=self.ring_mesh), logits)
        return loss, logits, labels

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        batches = (ignore_repeated_rows(batch, self.ring_size, self.accelerator) for batch in epoch_iterator)
        return super().get_batch_samples(batches, num_batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        samples = [{**batch, "shift_labels": labels} for batch in batch_samples if (labels := next_labels(batch)) is not None]
        num_items = super()._get_num_items_in_batch(samples, device)
        # All ranks of a ring count the same labels.
        return None if num_items is None else num_items / self.ring_size

    def _prepare_loader(self, loader: DataLoader[Any], **_: object) -> DataLoader[Any]:
        return prepare_loader(loader, self.ring_size, self.accelerator)

    def _gather_over_rings(self, data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object:
            raise ValueError("eval_use_gather_object=True is not supported on a ring: set it to False")
        rest = getattr(self.accelerator.gradient_state.active_dataloader, "rest", 0)

        def gather(x: Tensor) -> Tensor:
            gathered = self.accelerator.gather(x)
            if x.ndim == 0:
                return gathered
            gathered = gathered.unflatten(0, (-1, self.ring_size, len(x)))[:, 0].flatten(0, 1)
            return gathered[:rest] if rest > 0 else gathered  # the last batch may repeat rows

        return tree_map(gather, data)

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // self.ring_size

    def floating_point_ops(self, inputs: Any) -> Any:
        return super().floating_point_ops(inputs) / self.ring_size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.ring_size


class RingTrainer(RingMixin, Trainer):
    """`Trainer` on a ring. Arguments and errors as for `Trainer` and `RingMixin`."""


def check_class(kind: type) -> None:
    """Raise ValueError for trainers of TRL whose batches have another format, such as GRPOTrainer."""
    for base in kind.__mro__:
        name = base.__name__
        if base.__module__.split(".")[0] == "trl" and name.endswith("Trainer") and name not in ("SFTTrainer", "_BaseTrainer"):
            raise ValueError(f"{kind.__name__} is a {name}, which a ring does not support: use token_logprobs in your own loop")


def check_trainer(trainer: RingMixin) -> None:
    """Raise ValueError if an argument of the trainer would change the loss or the batches of a ring."""
    args = trainer.args
    parallelism = trainer.accelerator.parallelism_config
    sizes = [getattr(parallelism, name, 1) or 1 for name in ("tp_size", "cp_size", "sp_size")]
    unsupported = {
        "label_smoothing_factor": args.label_smoothing_factor != 0,
        "compute_loss_func": trainer.compute_loss_func is not None,
        "use_liger_kernel": args.use_liger_kernel,
        "neftune_noise_alpha": args.neftune_noise_alpha is not None,  # the noise depends on the tokens of a rank
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        "train_sampling_strategy='batch_rebalance'": args.train_sampling_strategy == "batch_rebalance",
        "tensor, context or sequence parallelism of accelerate": max(sizes) > 1,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "several GPUs in one process": args.n_gpu > 1,
        f"{type(trainer.model).__name__}, which ignores num_items_in_batch,": not trainer.model_accepts_loss_kwargs,
    }
    if found := [name for name, is_given in unsupported.items() if is_given]:
        raise ValueError(f"{type(trainer).__name__} does not support {', '.join(found)} on a ring")


def _prepare_model(prepare: Callable[..., Any], model: Any, **options: Any) -> Any:
    """Prepare a model for training or evaluation. Training after an evaluation prepares the model again.

    Accelerate would not wrap the model by DDP after an evaluation, so the ranks would not average gradients.
    """
    prepared = prepare(model, **options)
    prepared._is_accelerate_prepared = not options.get("evaluation_mode")
    return prepared


def _create_mesh(ring_size: int | None, ranks: int, device: torch.device) -> DeviceMesh | None:
    ring_size = ranks if ring_size is None else ring_size
    if ring_size < 1 or ranks % ring_size:
        raise ValueError(f"ring_size={ring_size}: it must divide the number of ranks, which is {ranks}")
    if ranks == 1:
        return None
    return init_device_mesh(device.type, (ranks // ring_size, ring_size), mesh_dim_names=("replicas", "ring"))["ring"]


def _unshard(x: Any, layout: Layout, mesh: DeviceMesh | None) -> Any:
    if not isinstance(x, Tensor) or x.ndim < 2 or x.shape[1] != layout.rows(ring_of(mesh)[1]):
        raise ValueError("the model returns other outputs than logits: pass their names as ignore_keys")
    return layout.unshard(x, None if mesh is None else mesh.get_group())
