"""Define `AttentionSpec`, the settings of an attention call, and validate the arguments of public calls.

A public call validates its arguments once. All internal functions rely on a valid spec.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringattn.choices import ROUTES, SCHEDULES
from ringattn.comm.calls import Call, shorten
from ringattn.comm.connect import TRANSPORTS
from ringattn.comm.transport import Transport
from ringattn.kernels import backends, validation
from ringattn.kernels.exact_products import under_autocast
from ringattn.layout import Layout
from ringattn.mask import Mask, check_mask


class AttentionSpec(NamedTuple):
    """The settings of one attention call. A compiler can trace the fields of a spec, which are tensors, numbers and strings.

    The order and the types of the fields define the schema of the operators, see `ringattn.custom_op.schema`.
    """

    numbers: Tensor  # `Mask.numbers`
    before: int  # `Mask.reach`
    after: int
    layout: str  # `Layout.kind`
    seq_len: int
    ranks: int
    scale: float
    group: str = ""  # name of the process group of the ring; "" for a ring of one
    schedule: str = "auto"  # "state", "kv" or "auto"
    route: str = "auto"  # "relay", "direct" or "auto"
    transport: str = "auto"  # "nvlink", "p2p" or "auto"
    dropout_p: float = 0.0
    seed: int = 0
    first_head: int = 0  # see `ring_attention`
    backend: str = "auto"  # see `ringattn.kernels.backends`
    precision: str = "ieee"  # "ieee", "tf32" or "fp8", see `flash_attention`
    keep: Tensor | None = None  # `BlockMask.keep`; None without a block mask, which only `flash_attention` accepts
    block_size: int = 0  # `BlockMask.size`

    @classmethod
    def create(cls, mask: Mask, layout: Layout, **options: Any) -> "AttentionSpec":
        """Return the spec for a mask and a layout. The dict `options` contains the other fields of the spec."""
        return cls(mask.numbers, *mask.reach, layout.kind, layout.seq_len, layout.ranks, **options)

    @property
    def mask(self) -> Mask:
        """The mask of the call."""
        numbers = self.numbers.tolist() if self.numbers.numel() else ()
        return Mask.from_numbers((self.before, self.after), numbers, self.seq_len)

    def count_pairs(self, batch: int, num_queries: int | None = None) -> float:
        """Count the (query, key) pairs per head that the mask allows, over `batch` batch entries.

        The queries are the last `num_queries` tokens of the sequence. None means all tokens.
        """
        counts = self.mask.pairs(self.seq_len, num_queries)
        return batch / len(counts) * sum(counts)

    def record_call(self, transport: Transport, name: str, q: Tensor, k: Tensor, v: Tensor, **others: object) -> None:
        """Let the watchdog of a transport compare this call with the calls of the other ranks."""
        if transport.size == 1:
            return
        key = name, q.shape, k.shape, v.shape, q.dtype, tuple(self.numbers.tolist()), self[1:], *others.values()
        transport.watchdog.record_call(key, partial(self.as_call, name, q, k, v, **others))

    def as_call(self, name: str, q: Tensor, k: Tensor, v: Tensor, **others: object) -> Call:
        """Return the settings that must be equal on all ranks, keyed by their names in error messages."""
        shapes = {
            "the call": name,
            "batch size": q.shape[0],
            "heads": q.shape[2],
            "key heads": k.shape[2],
            "dtype": str(q.dtype),
        }
        shapes |= {"head dim": q.shape[3], "value head dim": v.shape[3], "documents": shorten(self.numbers.tolist())}
        settings = {name: getattr(self, name) for name in ("layout", "seq_len", "schedule", "route", "scale", "dropout_p")}
        settings |= {"is_causal": self.after == 0, "window": None if self.mask.pieces else self.mask.window}
        # Ranks may differ in `seed` and `first_head` if there is no dropout.
        settings |= {name: getattr(self, name) if self.dropout_p else None for name in ("seed", "first_head")}
        # FP8 changes the sizes of the messages.
        return shapes | settings | {"FP8 forward": self.precision == "fp8"} | others


def resolve_scale(q: Tensor, scale: float | None) -> float:
    """Return `scale` as a float, or D ** -0.5 for None.

    Raises:
        ValueError: the scale is not a number, or is a tensor that requires a gradient.
    """
    if scale is None:
        # `check_attention` later rejects a q without dimensions or with head dim 0.
        return ((q.shape[-1] if q.ndim else 1) or 1) ** -0.5
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise ValueError("scale requires a gradient, which attention does not compute: multiply q by scale and pass scale=1.0")
    return validation.as_number("scale", scale)


def autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Under `torch.autocast`, cast all tensors except fp64 to the autocast dtype, as torch's own attention does."""
    if not torch._C._is_any_autocast_enabled():  # ten times as fast as `under_autocast`
        return tensors
    device = tensors[0].device
    if not under_autocast(device):
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)


def check_layout(layout: Layout, size: int | None = None) -> None:
    """Raise ValueError unless `layout` is a `Layout` with `size` ranks (None for any number)."""
    if not isinstance(layout, Layout):
        raise ValueError(f"layout is a {type(layout).__name__}: it must be a ringattn.Layout such as Layout.zigzag(S, ranks)")
    if size not in (None, layout.ranks):
        alone = " (group=None stands for this process alone)" if size == 1 else ""
        raise ValueError(f"the layout is for {layout.ranks} ranks but the group has {size}{alone}: the two must be equal")


def check_shard(q: Tensor, k: Tensor, layout: Layout, rank: int) -> None:
    rows = layout.rows(rank)
    if q.ndim != 4 or k.ndim != 4 or q.shape[1] == k.shape[1] == rows:
        return
    if q.shape[2] == k.shape[2] == rows:
        raise ValueError(
            f"q is {tuple(q.shape)}, and rank {rank} holds {rows} tokens: pass (batch, tokens, heads, head dim), which is "
            "x.transpose(1, 2)"
        )
    raise ValueError(f"q has {q.shape[1]} tokens and k has {k.shape[1]}, but rank {rank} holds {rows}: use layout.shard")


def check_choices(schedule: str, route: str, transport: str) -> None:
    """Raise ValueError if a name is unknown, or if the transport does not support the route."""
    choices = ("schedule", schedule, SCHEDULES), ("route", route, ROUTES), ("transport", transport, TRANSPORTS)
    for name, value, known in choices:
        validation.check_name(name, value, known)
    if route == "relay" and transport == "nvlink":
        raise ValueError("transport='nvlink' does not relay blocks: use transport='p2p', or route='direct'")


def check_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    seq_len: int,
    scale: float,
    dropout_p: float,
    seed: int,
    backend: str,
    precision: str,
) -> None:
    """Validate the arguments that all attention calls have in common. The tensors q, k and v must be dense.

    Raises:
        ValueError: an argument is invalid or unsupported. Each error message states the given value, the requirement and a
            remedy.
    """
    check_mask(mask)
    validation.check_fit(q, k, v)
    validation.check_scale(scale)
    validation.check_dropout(dropout_p, seed)
    _check_tokens_come_first(q, k, mask, seq_len)
    mask.check(seq_len, q.shape[0])
    validation.check_precision(precision)
    if precision == "fp8":
        validation.check_fp8(has_dropout=dropout_p > 0)
    backends.check_backend(backend)
    backends.choose_backend(q.device, q.dtype, backend, (q.shape[3], v.shape[3]), dropout_p == 0, precision)


def _check_tokens_come_first(q: Tensor, k: Tensor, mask: Mask, seq_len: int) -> None:
    if seq_len not in mask.totals and q.shape[2] == k.shape[2] and q.shape[2] in mask.totals:
        raise ValueError(
            f"q is {tuple(q.shape)}, and the mask is for {q.shape[2]} tokens: pass (batch, tokens, heads, head dim), which is "
            "x.transpose(1, 2)"
        )
