"""Register attention calls as operators with autograd and a fake implementation. A compiler therefore sees each attention call
as one node.

In a public call, each of the following functions calls the next one:

    public call -> the function that `register` returned -> autograd -> the forward function -> `ringattn.ring` -> the kernels

`torch.library.custom_op` is not used, because it would cost about 0.1 ms of host time per call, as much as kernels for short
sequences.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NoReturn, get_type_hints

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from ringattn.checkpointing import reuse_or_compute
from ringattn.kernels.reference import state_dtype

_library = torch.library.Library("ringattn", "FRAGMENT")
_SCHEMA_TYPES = {Tensor | None: "Tensor?", int: "SymInt", list[int]: "SymInt[]"}
Results = tuple[Tensor, Tensor, list[Tensor]]


def _inputs_and_results(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, extra: list[Tensor], spec: Any
) -> list[Tensor]:
    return [q, k, v, out, lse]


def _fake_results(q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Results:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype)), []


def _fake_gradients(saved: list[Tensor], dout: Tensor, dlse: Tensor | None, spec: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in saved[:3])


def register(
    name: str,
    spec_type: type,
    forward: Callable[..., Results],
    backward: Callable[..., tuple[Tensor, ...]],
    pairs: Callable[..., float],
    to_save: Callable[..., list[Tensor]] = _inputs_and_results,
    fake_forward: Callable[..., Results] = _fake_results,
    fake_backward: Callable[..., tuple[Tensor, ...]] = _fake_gradients,
) -> Callable[..., Results]:
    """Register the operator `ringattn::name`, and return a function that calls it.

    The operator (q, k, v, settings) -> (out, lse, extra) is differentiable in q, k and v. All shapes are as in
    `flash_attention`. The list `extra` contains further tensors for the backward pass.

    Args:
        spec_type: a NamedTuple with the settings. The operator receives its flattened fields as arguments.
        forward: forward(q, k, v, spec) -> (out, lse, extra).
        backward: backward(saved, dout, dlse, spec) -> (dq, dk, dv) in the dtypes of q, k and v. dlse may be None.
        pairs: pairs(batch, num_queries, num_keys, spec) returns the number of (query, key) pairs per head, to count FLOPs.
        to_save: to_save(q, k, v, out, lse, extra, spec) returns the list `saved`. The first two tensors of `saved` contain
            queries and keys.
        fake_forward, fake_backward: like `forward` and `backward`, but without computing attention.
    """
    _define(name, spec_type)
    operator = getattr(torch.ops.ringattn, name).default
    backward_operator = getattr(torch.ops.ringattn, f"{name}_backward").default

    to_flat = flatten if any(map(_is_spec, _field_types(spec_type))) else tuple  # tuple() is faster

    def gradients(ctx: Any, saved: Sequence[Tensor], dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor, ...]:
        saved = list(saved[: ctx.count])
        dout = saved[0].new_zeros(ctx.shape) if dout is None else dout
        if _is_plain(*saved, dout):
            return backward(saved, dout, dlse, ctx.spec)
        return backward_operator(saved, dout, dlse, *to_flat(ctx.spec))

    def results(q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Results:
        # autograd has already recorded this call.
        with torch._C._AutoDispatchBelowAutograd():
            return forward(q, k, v, spec) if _is_plain(q, k, v) else operator(q, k, v, *to_flat(spec))

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: Any) -> tuple[Tensor, ...]:  # pyrefly: ignore[bad-override]  # torch declares none
            out, lse, extra = reuse_or_compute(partial(results, q, k, v, spec), q)
            saved = to_save(q, k, v, out, lse, extra, spec)
            # lse rarely has a gradient. Creating zeros would cost an allocation, a kernel and a read.
            ctx.set_materialize_grads(False)
            ctx.mark_non_differentiable(*extra)
            # autograd raises an error if a saved tensor of the spec is modified before the backward.
            ctx.save_for_backward(*saved, *[x for x in to_flat(spec) if isinstance(x, Tensor)])
            ctx.spec, ctx.count, ctx.shape = spec, len(saved), out.shape
            return out, lse, *extra

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:  # pyrefly: ignore[bad-override]  # torch declares none
            saved = ctx.saved_tensors  # activation checkpointing allows only one access
            if not torch.is_grad_enabled():
                return *gradients(ctx, saved, dout, dlse), None
            # `leaf` requires a gradient, so second derivatives raise an error instead of being zeros.
            with torch.no_grad():
                grads = gradients(ctx, saved, dout, dlse)
            leaf = torch.zeros(0, device="cpu", requires_grad=True)
            return *_OnceDifferentiable.apply(*grads, dout, dlse, leaf, *saved), None

    def differentiable(q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Results:
        if not _is_recorded(q, k, v):
            return reuse_or_compute(partial(results, q, k, v, spec), q)
        out, lse, *extra = Attention.apply(q, k, v, spec)  # autograd ignores the spec, which is not a tensor
        return out, lse, extra

    def call(q: Tensor, k: Tensor, v: Tensor, spec: Any) -> Results:
        # Only compilers need the operator. Eager calls skip the dispatcher, because dispatching takes time.
        if torch.compiler.is_compiling():
            return operator(q, k, v, *to_flat(spec))
        # FakeTensorMode rejects real tensors, so convert them to fake tensors.
        if torch._C._len_torch_dispatch_stack():
            q, k, v, *settings = _to_fake_mode((q, k, v, *to_flat(spec)))
            spec = unflatten(spec_type, settings)
        return differentiable(q, k, v, spec)

    def with_spec(function: Callable[..., Any]) -> Callable[..., Any]:
        def with_flat_arguments(*arguments: Any) -> Any:
            return function(*arguments[:3], unflatten(spec_type, arguments[3:]))

        return with_flat_arguments

    _library.impl(name, with_spec(forward), "CompositeExplicitAutograd")
    _library.impl(name, with_spec(differentiable), "Autograd")
    _library.impl(f"{name}_backward", with_spec(backward), "CompositeExplicitAutograd")
    for operator_name, function in ((name, fake_forward), (f"{name}_backward", fake_backward)):
        torch.library.register_fake(f"ringattn::{operator_name}", with_spec(function), lib=_library)
    _register_flops(name, spec_type, pairs)
    return call


@cache
def schema(spec_type: type) -> str:
    """Return the part of an operator schema that declares the fields of a spec."""
    hints = get_type_hints(spec_type).items()
    types = {kind: _SCHEMA_TYPES.get(kind) or kind.__name__ for _, kind in hints}
    return ", ".join(schema(kind) if _is_spec(kind) else f"{types[kind]} {name}" for name, kind in hints)


def flatten(spec: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the fields of a spec, and of the specs inside it, as a flat tuple."""
    return tuple(x for value in spec for x in (flatten(value) if _is_spec(type(value)) else (value,)))


def unflatten(spec_type: type, values: list[Any] | tuple[Any, ...]) -> Any:
    remaining = iter(values)

    def build(kind: type) -> Any:
        return kind(*(build(field) if _is_spec(field) else next(remaining) for field in _field_types(kind)))

    return build(spec_type)


@cache
def _field_types(spec_type: type) -> tuple[Any, ...]:
    return tuple(get_type_hints(spec_type).values())


def _is_spec(kind: Any) -> bool:
    return hasattr(kind, "_fields")


def _define(name: str, spec_type: type) -> None:
    tags, settings = (torch.Tag.pt2_compliant_tag,), schema(spec_type)
    _library.define(f"{name}(Tensor q, Tensor k, Tensor v, {settings}) -> (Tensor, Tensor, Tensor[])", tags=tags)
    gradients = "Tensor[] saved, Tensor dout, Tensor? dlse"
    _library.define(f"{name}_backward({gradients}, {settings}) -> (Tensor, Tensor, Tensor)", tags=tags)


def _register_flops(name: str, spec_type: type, pairs: Callable[..., float]) -> None:
    """Register FLOP formulas for `torch.utils.flop_counter`, with the conventions of torch's own attention.

    The forward pass has two matrix products. The backward pass has five matrix products, one of which recomputes the scores.
    """

    pairs = unset_fake_temporarily()(pairs)

    @register_flop_formula(getattr(torch.ops.ringattn, name), get_raw=True)
    def forward_flops(q: Tensor, k: Tensor, v: Tensor, *settings: Any, **_: Any) -> int:
        count = pairs(q.shape[0], q.shape[1], k.shape[1], unflatten(spec_type, settings))
        return round(2 * q.shape[2] * (q.shape[3] + v.shape[3]) * count)

    @register_flop_formula(getattr(torch.ops.ringattn, f"{name}_backward"), get_raw=True)
    def backward_flops(saved: list[Tensor], dout: Tensor, _dlse: Tensor | None, *settings: Any, **_: Any) -> int:
        q, k = saved[:2]
        count = pairs(dout.shape[0], dout.shape[1], k.shape[1], unflatten(spec_type, settings))
        return round(2 * dout.shape[2] * (3 * q.shape[3] + 2 * dout.shape[3]) * count)


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *_: Any) -> tuple[Tensor, ...]:  # pyrefly: ignore[bad-override]  # torch declares none
        return dq.view_as(dq), dk.view_as(dk), dv.view_as(dv)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise RuntimeError("attention has no second derivatives: use torch's own attention to differentiate gradients")


def _is_plain(*tensors: Tensor) -> bool:
    """Return whether a call can skip the operator. Compilers, dispatch modes, tensor subclasses and meta tensors need the
    operator.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not tensors[0].is_meta
        and set(map(type, tensors)) == {Tensor}
    )


def _is_recorded(*tensors: Tensor) -> bool:
    """Return whether autograd must record a call. For few queries, recording takes as long as the kernel. Under forward-mode
    differentiation, a recorded call raises an error.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return True
    return forward_ad._current_level >= 0


def _to_fake_mode(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    mode = detect_fake_mode()
    if mode is None:
        return arguments
    # With make_constant=True, the FLOP formulas can read the values of fake tensors.
    convert = partial(mode.fake_tensor_converter.from_real_tensor, mode, make_constant=True)
    return tuple(convert(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x for x in arguments)
