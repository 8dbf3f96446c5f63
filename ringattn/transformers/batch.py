"""Shard batches that collators of Hugging Face or TRL create. All sequences of a batch have the same layout."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringattn.comm.connect import Group
from ringattn.comm.same_batch import check_same
from ringattn.layout import Layout
from ringattn.mask import Mask

IGNORE = -100  # the label of tokens that do not contribute to the loss
# Descriptions of packed documents for FlashAttention and other layers. One of the first three entries is enough.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k")
LABELS = ("labels", "shift_labels", "num_items_in_batch")
# The entries in FLAGS do not depend on the tokens.
FLAGS = ("return_dict", "use_cache", "fused_lm_head")
TENSORS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "seq_idx", "labels", "shift_labels"}
KNOWN = {*TENSORS, *PACKING, *LABELS, *FLAGS}


class RingBatch:
    """A `RingBatch` contains the properties of a batch that attention needs. The model passes the `RingBatch` to every layer as
    the keyword `ring_batch`.

    `RingBatch` must not be a dataclass, because FSDP copies dataclasses.
    """

    padding: Tensor | None = None  # bool (B, N): tokens that attend to nothing; None if they have no labels

    def __init__(
        self, layout: Layout, documents: list[list[int]] | None, group: Group | None, last: Tensor, counts_padding: bool
    ) -> None:
        self.layout, self.documents, self.group, self.last_position = layout, documents, group, last
        self.counts_padding = counts_padding  # in the positions of tokens after padding
        self._masks: dict[int | None, Mask] = {}

    @property
    def is_used(self) -> bool:
        return bool(self._masks)

    def mask(self, window: int | None) -> Mask:
        if window not in self._masks:
            self._masks[window] = Mask.causal(window=window, documents=self.documents)
        return self._masks[window]


def shard_batch(batch: Mapping[str, Any], mesh: DeviceMesh | None) -> dict[str, Any]:
    """Return the arguments of `model(...)` for this rank's tokens of a batch.

    A document begins where `position_ids` jump or `seq_idx` changes, at each entry of `cu_seq_lens_q` or `cu_seq_lens_k`, and
    where padding begins or ends. Padding on the left or on the right is a document of its own. If the first token after padding
    has a label, the last padding token predicts it and attends to nothing, as with SDPA in transformers.

    Args:
        batch: the same on all ranks. One entry is input_ids (B, S) or inputs_embeds (B, S, dim). Optional entries are
            attention_mask (B, S) of 0 and 1, position_ids (B, S), seq_idx (B, S), cu_seq_lens_q, cu_seq_lens_k, and labels
            (B, S) or shift_labels (B, S). In shift_labels, the label of a token is the next token. Labels are shifted before
            they are sharded.
        mesh: the one-dimensional mesh of the ranks that share the batch; None for one process.

    Returns:
        The arguments. The average of the ranks' losses is the mean over all labels of the batch. For gradient accumulation, set
        num_items_in_batch in the batch to the number of labels of all accumulated batches.

    Raises:
        ValueError: the ranks have different batches, or a ring does not support an entry of the batch.
    """
    return shard_for(batch, *ring_of(mesh))


def shard_for(batch: Mapping[str, Any], group: Group | None, rank: int, ranks: int) -> dict[str, Any]:
    """Shard a batch as `shard_batch` does, for one rank of a ring."""
    _check(batch)
    check_same({name: value for name, value in batch.items() if value is not None}, group)
    inputs = inputs_of(batch)
    entries, seq_len = inputs.shape[:2]
    layout = layout_of(batch, ranks)
    if not all(layout.rows(other) for other in range(ranks)):
        raise ValueError(f"the batch has {seq_len} tokens per row, too few for {ranks} ranks: pad it to {2 * ranks} tokens")
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is None:
        mask = torch.ones(entries, seq_len, dtype=torch.int64, device=inputs.device)
    counts_padding = positions is None and bool((mask[:, 0] == 0).any())
    if positions is None:
        positions = torch.arange(seq_len, device=inputs.device)[None]
    whole = {"attention_mask": mask, "position_ids": positions.expand(entries, -1)}
    whole |= {name: batch[name] for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None}
    labels = next_labels(batch)
    if labels is not None:
        whole |= {"labels": labels, "shift_labels": labels}
    arguments = {name: layout.shard(value, rank) for name, value in whole.items()}
    if labels is not None:
        count = batch.get("num_items_in_batch")
        arguments["num_items_in_batch"] = ((labels != IGNORE).sum().clamp(min=1) if count is None else count) / ranks
    arguments |= {name: batch[name] for name in FLAGS if name in batch}
    ring_batch = RingBatch(layout, documents_of(batch), group, positions.max(), counts_padding)
    if labels is not None and ((labels != IGNORE) & (mask == 0)).any():
        ring_batch.padding = arguments["attention_mask"] == 0
    return arguments | {"use_cache": False, "ring_batch": ring_batch}


def layout_of(batch: Mapping[str, Any], ranks: int) -> Layout:
    return Layout.zigzag(seq_len=inputs_of(batch).shape[1], ranks=ranks)


def inputs_of(batch: Mapping[str, Any]) -> Tensor:
    return batch["input_ids"] if batch.get("input_ids") is not None else batch["inputs_embeds"]


def ring_of(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup | None, int, int]:
    """Return the process group of a mesh, the index of this rank, and the number of ranks."""
    if mesh is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("mesh=None means one process, but there are several: pass the mesh of the ranks of the ring")
        return None, 0, 1
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        raise ValueError(f"mesh={mesh}: it must be a DeviceMesh with one dimension, for example mesh['ring']")
    return mesh.get_group(), mesh.get_local_rank(), mesh.size()


def _check(batch: Mapping[str, Any]) -> None:
    given = {name for name, value in batch.items() if value is not None}
    if unknown := given - KNOWN:
        raise ValueError(f"the batch contains {', '.join(sorted(unknown))}, which a ring does not support: remove it")
    if len(given & {"input_ids", "inputs_embeds"}) != 1:
        raise ValueError("the batch must contain either input_ids or inputs_embeds")
    for name in given & TENSORS:
        if not isinstance(value := batch[name], Tensor) or value.ndim < 2:
            kind = f"has the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
            raise ValueError(f"{name} {kind}: it must be a tensor (batch, tokens)")
    entries, seq_len = inputs_of(batch).shape[:2]
    for name in given & TENSORS - {"input_ids", "inputs_embeds"}:
        shapes = [(entries, seq_len), (1, seq_len)] if name in ("position_ids", "seq_idx") else [(entries, seq_len)]
        if tuple(batch[name].shape) not in shapes:
            raise ValueError(f"{name} has the shape {tuple(batch[name].shape)}: it must be {shapes[0]}")
    mask = batch.get("attention_mask")
    if mask is None:
        return
    if ((mask != 0) & (mask != 1)).any():
        raise ValueError("attention_mask contains other values than 0 and 1: mark documents with position_ids")
    if (mask.int().diff(prepend=mask.new_zeros(entries, 1).int()) == 1).sum(1).gt(1).any():
        raise ValueError("attention_mask has padding between tokens: only padding on the left and on the right is supported")


def next_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the label of every token, int64 (B, S): the next token, or IGNORE. Return None if the batch has no labels."""
    labels, shifted, mask = (batch.get(name) for name in ("labels", "shift_labels", "attention_mask"))
    name = "labels" if shifted is None else "shift_labels"
    if shifted is None:
        if labels is None:
            return None
        shifted = labels.roll(-1, dims=1)
        shifted[:, -1] = IGNORE
    if mask is not None:
        padding = mask == 0
        padding[:, :-1] &= padding[:, 1:].clone()  # the last padding may predict a token
        if ((shifted != IGNORE) & padding).any():
            raise ValueError(f"{name} of padding must be {IGNORE}")
    return shifted


def documents_of(batch: Mapping[str, Any]) -> list[list[int]] | None:
    """Return the document lengths of every row, or None if each row is one document without padding."""
    starts = document_starts(batch)
    if not starts[:, 1:].any():
        return None
    seq_len = starts.shape[1]
    return [np.diff(np.append(np.flatnonzero(row), seq_len)).tolist() for row in starts]


def document_starts(batch: Mapping[str, Any]) -> np.ndarray:
    """Mark the tokens at which a document begins: bool (B, S)."""
    starts = np.zeros(inputs_of(batch).shape[:2], dtype=bool)
    starts[:, :1] = True
    for name, step in (("position_ids", 1), ("seq_idx", 0)):
        if batch.get(name) is not None:
            starts[:, 1:] |= (batch[name].diff(dim=1) != step).cpu().numpy()
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if batch.get(name) is not None:
            starts = _packed_starts(name, batch[name].cpu().numpy(), starts)
    if batch.get("attention_mask") is not None:
        mask = batch["attention_mask"].bool().cpu().numpy()
        starts[:, 1:] |= mask[:, 1:] != mask[:, :-1]
        starts[:, 1:] &= mask[:, 1:] | mask[:, :-1]  # padding is one document, although its positions may be constant
    return starts


def _packed_starts(name: str, edges: np.ndarray, restarts: np.ndarray) -> np.ndarray:
    entries, seq_len = restarts.shape
    if entries != 1 or edges[0] != 0 or edges[-1] != seq_len or (np.diff(edges) < 0).any():
        raise ValueError(f"{name} must rise from 0 to {seq_len}, for one row of tokens, but the batch has {entries} rows")
    starts = np.zeros_like(restarts)
    starts[0, edges[edges < seq_len]] = True
    if (restarts & ~starts).any():
        raise ValueError(f"position_ids restart inside a document of {name}, or another entry ends it: remove all but one")
    return starts
