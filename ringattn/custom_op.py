"""How an attention call becomes one operator: what a compiler sees as a node, with autograd and a fake of its own.

By the library's own calls rather than by `torch.library.custom_op`, whose layers cost some 0.1 ms a call on the host: as much
as the kernels of a short sequence take.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils.flop_counter import register_flop_formula

from ringattn.checkpointing import once
from ringattn.kernels.reference import state_dtype

_library = torch.library.Library("ringattn", "FRAGMENT")


class Keeping(NamedTuple):
    """An operator that keeps tensors of its own for the backward, in the place of its results."""

    fake_results: Callable[..., tuple[Tensor, Tensor, list[Tensor]]]  # as forward, in shapes alone
    fake_gradients: Callable[..., tuple[Tensor, Tensor, Tensor]]  # as backward
    inputs_too: Callable[[tuple], bool]  # whether q, k and v are kept before them, by the settings


def register(
    name: str,
    settings: str,
    forward: Callable[..., tuple],
    backward: Callable[..., tuple],
    pairs: Callable[..., float],
    keeping: Keeping | None = None,
) -> Callable[..., tuple]:
    """Make `ringattn::name`(q, k, v, *settings) -> (out, lse), differentiable in q, k and v; return the call of it.

    q is (B, Nq, Hq, D), k (B, Nk, Hkv, D), v (B, Nk, Hkv, Dv); out (B, Nq, Hq, Dv) in q's dtype, lse (B, Nq, Hq) in fp32 (fp64
    for fp64 inputs).

    Args:
        settings: what follows v, in the notation of operator schemas: values, so that a traced graph holds them.
        forward: forward(q, k, v, *settings).
        backward: backward(q, k, v, out, lse, dout, dlse, *settings) -> (dq, dk, dv) with the dtypes of q, k, v; dlse is None
            where lse has no gradient.
        pairs: pairs(batch, num_queries, num_keys, *settings), how many (query, key) pairs of one head a call computes, for
            `torch.utils.flop_counter`.
        keeping: then forward returns (out, lse, kept), as the operator does, and backward is backward(kept, dout, dlse,
            *settings).
    """
    tags = (torch.Tag.pt2_compliant_tag,)
    inputs = "Tensor q, Tensor k, Tensor v"
    returned, saved = "Tensor, Tensor", f"{inputs}, Tensor out, Tensor lse"
    if keeping:
        returned, saved = "Tensor, Tensor, Tensor[]", "Tensor[] kept"
    _library.define(f"{name}({inputs}, {settings}) -> ({returned})", tags=tags)
    saved = f"{saved}, Tensor dout, Tensor? dlse"
    _library.define(f"{name}_backward({saved}, {settings}) -> (Tensor, Tensor, Tensor)", tags=tags)
    operator = getattr(torch.ops.ringattn, name).default
    differential = getattr(torch.ops.ringattn, f"{name}_backward").default

    def gradients(ctx, dout, dlse, *_):
        kept = ctx.saved_tensors[: ctx.count]
        dout = kept[0].new_zeros(ctx.shape) if dout is None else dout
        run = backward if _is_plain(*kept, dout) else differential
        return *run(*([list(kept)] if keeping else kept), dout, dlse, *ctx.settings), None

    def results(q, k, v, *settings):
        run = forward if _is_plain(q, k, v) else operator
        with torch._C._AutoDispatchBelowAutograd():
            return run(q, k, v, *settings)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, settings):
            out, lse, *own = once(partial(results, q, k, v, *settings), q)
            own = own[0] if keeping else []
            inputs = [q, k, v] if not keeping or keeping.inputs_too(settings) else []
            kept = [*inputs, *(own if keeping else (out, lse))]
            # a zero gradient for lse, which seldom has one, would be an allocation, a kernel and a read
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*own)
            # those of the settings too: autograd refuses what was changed in the meantime
            ctx.save_for_backward(*kept, *[x for x in settings if isinstance(x, Tensor)])
            ctx.settings, ctx.count, ctx.shape = settings, len(kept), out.shape
            return out, lse, *own

        @staticmethod
        def backward(ctx, dout, dlse, *_):
            if not torch.is_grad_enabled():
                return gradients(ctx, dout, dlse)
            # someone may ask for second derivatives; where q, k, v are not kept, a backward through everything meets the leaf
            with torch.no_grad():
                *grads, none = gradients(ctx, dout, dlse)
            leaf = torch.zeros(0, device="cpu", requires_grad=True)
            return *_OnceDifferentiable.apply(*grads, dout, dlse, leaf, *ctx.saved_tensors), none

    def differentiable(q, k, v, *settings):
        # as one argument the settings cost autograd nothing
        out, lse, *own = Differentiable.apply(q, k, v, settings)
        return (out, lse, own) if keeping else (out, lse)

    def call(*arguments):
        # a compiler needs the node; otherwise the dispatcher would only lead to autograd
        if torch.compiler.is_compiling():
            return operator(*arguments)
        arguments = _in_mode(arguments) if torch._C._len_torch_dispatch_stack() else arguments
        return differentiable(*arguments)

    _library.impl(name, forward, "CompositeExplicitAutograd")
    _library.impl(name, differentiable, "Autograd")
    _library.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    fakes = (keeping.fake_results, keeping.fake_gradients) if keeping else (_fake_results, _fake_gradients)
    torch.library.register_fake(f"ringattn::{name}", fakes[0], lib=_library)
    torch.library.register_fake(f"ringattn::{name}_backward", fakes[1], lib=_library)
    _register_flops(name, pairs, bool(keeping))
    return call


def _register_flops(name: str, pairs: Callable[..., float], keeping: bool) -> None:
    """FLOPs as of torch's own attention: two products a pair forward, and five backward, the scores anew included."""

    pairs = unset_fake_temporarily()(pairs)  # of tensors that hold nothing, too: masks are known

    @register_flop_formula(getattr(torch.ops.ringattn, name), get_raw=True)
    def of_forward(q, k, v, *settings, out_val=None):
        count = pairs(q.shape[0], q.shape[1], k.shape[1], *settings)
        return round(2 * q.shape[2] * (q.shape[3] + v.shape[3]) * count)

    @register_flop_formula(getattr(torch.ops.ringattn, f"{name}_backward"), get_raw=True)
    def of_backward(*arguments, out_val=None):
        if keeping:
            (q, k, *_), dout, _, *settings = arguments
        else:
            q, k, _, _, _, dout, _, *settings = arguments
        count = pairs(dout.shape[0], dout.shape[1], k.shape[1], *settings)
        return round(2 * dout.shape[2] * (3 * q.shape[3] + 2 * dout.shape[3]) * count)


class _OnceDifferentiable(torch.autograd.Function):
    """(dq, dk, dv) as they are; a derivative of them with respect to what they were made of, which follows, is refused."""

    @staticmethod
    def forward(ctx, dq, dk, dv, *_):
        return dq.view_as(dq), dk.view_as(dk), dv.view_as(dv)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("attention has no second derivatives: take gradients of gradients with torch's own attention")


def _is_plain(*tensors: Tensor) -> bool:
    """Whether nobody is there to see the operator: no compiler, no dispatch mode, no tensor of another kind, or of meta."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not tensors[0].is_meta
        and set(map(type, tensors)) == {Tensor}
    )


def _in_mode(arguments: tuple) -> tuple:
    """The arguments as a mode of fake tensors, if there is one, lets them be mixed: masks hold real ones."""
    mode = detect_fake_mode()
    if mode is None:
        return arguments
    convert = partial(mode.fake_tensor_converter.from_real_tensor, mode, make_constant=True)  # FLOPs ask for documents
    return tuple(convert(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x for x in arguments)


def _fake_results(q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))


def _fake_gradients(q: Tensor, k: Tensor, v: Tensor, *_) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
