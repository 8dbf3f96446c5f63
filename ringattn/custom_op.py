"""Turn an attention call into one operator: a single node for a compiler, with autograd and a fake implementation.

Each public call registers its forward and its backward function here, together with the record that holds its settings (see
`ringattn.spec`). A call then runs through the following functions:

    public call -> `register`'s call -> autograd -> the forward function -> `ringattn.ring` -> the kernels

This file uses the low-level functions of `torch.library`. `torch.library.custom_op` would cost about 0.1 ms per call on the
host, which is as much time as the kernels need for a short sequence.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils.flop_counter import register_flop_formula

from ringattn.checkpointing import reuse_or_compute
from ringattn.kernels.reference import state_dtype

_library = torch.library.Library("ringattn", "FRAGMENT")
_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    bool: "bool",
    int: "SymInt",
    list[int]: "SymInt[]",
    str: "str",
    float: "float",
}
Results = tuple[Tensor, ...]


class SavedTensors(NamedTuple):
    """The functions of an operator that saves its own tensors for the backward pass, instead of q, k, v, out and lse."""

    fake_results: Callable[..., tuple[Tensor, Tensor, list[Tensor]]]  # like the forward function, but computes only shapes
    fake_gradients: Callable[..., tuple[Tensor, Tensor, Tensor]]  # like the backward function
    save_inputs: Callable[[Any], bool]  # whether q, k and v are saved before them, given the settings


def register(
    name: str,
    spec_type: type,
    forward: Callable[..., Results],
    backward: Callable[..., Results],
    pairs: Callable[..., float],
    saved: SavedTensors | None = None,
) -> Callable[..., Results]:
    """Register `ringattn::name`(q, k, v, settings) -> (out, lse), differentiable in q, k and v, and return a function that
    calls it.

    q is (B, Nq, Hq, D), k is (B, Nk, Hkv, D) and v is (B, Nk, Hkv, Dv). out is (B, Nq, Hq, Dv) in q's dtype. lse is (B, Nq, Hq)
    in fp32, or fp64 for fp64 inputs.

    Args:
        name: the name of the operator.
        spec_type: a NamedTuple with the settings. Its fields, flattened, become arguments of the operator.
        forward: forward(q, k, v, spec) -> (out, lse).
        backward: backward(q, k, v, out, lse, dout, dlse, spec) -> (dq, dk, dv) in the dtypes of q, k and v. dlse is None if lse
            has no gradient.
        pairs: pairs(batch, num_queries, num_keys, spec) returns how many (query, key) pairs of one head the call computes, for
            `torch.utils.flop_counter`.
        saved: if given, `forward` returns (out, lse, saved tensors), and `backward` is called as backward(saved tensors, dout,
            dlse, spec).
    """
    _define(name, spec_type, own_tensors=saved is not None)
    operator = getattr(torch.ops.ringattn, name).default
    backward_operator = getattr(torch.ops.ringattn, f"{name}_backward").default
    # Operators take flat arguments, because a schema can contain only tensors, numbers, strings and lists. The functions take a
    # spec.
    flat_forward = partial(_with_spec, forward, spec_type, 3)
    flat_backward = partial(_with_spec, backward, spec_type, 3 if saved else 7)

    def gradients(ctx, dout, dlse, *_):
        tensors = ctx.saved_tensors[: ctx.count]
        # If only lse has a gradient, autograd passes None for dout, because the gradients are not materialised. The
        # kernels need a dout.
        dout = tensors[0].new_zeros(ctx.shape) if dout is None else dout
        arguments = (*([list(tensors)] if saved else tensors), dout, dlse)
        # Without a compiler or a dispatch mode, the function is called directly. This saves the time of the
        # dispatcher on the host.
        if _is_plain(*tensors, dout):
            return *backward(*arguments, ctx.spec), None
        return *backward_operator(*arguments, *flatten(ctx.spec)), None

    def results(q, k, v, spec):
        # autograd has already recorded this call. Without the guard, the operator would enter its Autograd kernel
        # again and recurse without end.
        with torch._C._AutoDispatchBelowAutograd():
            return forward(q, k, v, spec) if _is_plain(q, k, v) else operator(q, k, v, *flatten(spec))

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, spec):
            # During the recomputation of a checkpoint, `reuse_or_compute` returns the saved results instead of
            # computing attention a second time.
            out, lse, *own = reuse_or_compute(partial(results, q, k, v, spec), q)
            own = own[0] if saved else []
            inputs = [q, k, v] if not saved or saved.save_inputs(spec) else []
            tensors = [*inputs, *(own if saved else (out, lse))]
            # lse rarely has a gradient. If autograd materialised a gradient of zeros for lse, each backward pass would pay for
            # an allocation, a kernel and a read.
            ctx.set_materialize_grads(False)
            # The tensors that the operator saves are outputs only because a compiler must see them. These outputs never have
            # gradients.
            ctx.mark_non_differentiable(*own)
            # Tensors of the spec are saved as well, so that autograd raises an error if they are modified before the backward
            # pass.
            ctx.save_for_backward(*tensors, *[x for x in flatten(spec) if isinstance(x, Tensor)])
            ctx.spec, ctx.count, ctx.shape = spec, len(tensors), out.shape
            return out, lse, *own

        @staticmethod
        def backward(ctx, dout, dlse, *_):
            if not torch.is_grad_enabled():
                return gradients(ctx, dout, dlse)
            # With create_graph=True, a caller may request second derivatives, which must raise an error instead of being
            # silently zero. If q, k and v are not saved, only the leaf below connects the gradients to the graph.
            with torch.no_grad():
                *grads, none = gradients(ctx, dout, dlse)
            leaf = torch.zeros(0, device="cpu", requires_grad=True)
            return *_OnceDifferentiable.apply(*grads, dout, dlse, leaf, *ctx.saved_tensors), none

    def differentiable(q, k, v, spec):
        out, lse, *own = Attention.apply(q, k, v, spec)  # autograd ignores the spec, which is not a tensor
        return (out, lse, own) if saved else (out, lse)

    def call(q, k, v, spec):
        # A compiler needs to see the operator. In eager mode, the dispatcher would only lead to autograd, so it is skipped.
        if torch.compiler.is_compiling():
            return operator(q, k, v, *flatten(spec))
        # A dispatch mode, such as FakeTensorMode or FlopCounterMode, is active. The spec of the call may still
        # contain real tensors.
        if torch._C._len_torch_dispatch_stack():
            q, k, v, *settings = _to_fake_mode((q, k, v, *flatten(spec)))
            spec = unflatten(spec_type, settings)
        return differentiable(q, k, v, spec)

    # Composite kernels run on every device. The functions choose the kernel of the device themselves.
    _library.impl(name, flat_forward, "CompositeExplicitAutograd")
    _library.impl(name, partial(_with_spec, differentiable, spec_type, 3), "Autograd")
    _library.impl(f"{name}_backward", flat_backward, "CompositeExplicitAutograd")
    fake_results, fake_gradients = (saved.fake_results, saved.fake_gradients) if saved else (_fake_results, _fake_gradients)
    _register_fake(name, partial(_with_spec, fake_results, spec_type, 3))
    _register_fake(f"{name}_backward", partial(_with_spec, fake_gradients, spec_type, 3 if saved else 7))
    _register_flops(name, spec_type, pairs, own_tensors=saved is not None)
    return call


@cache
def schema(spec_type: type) -> str:
    """Return the arguments of an operator, in the notation of operator schemas, that carry the fields of a spec."""
    return ", ".join(
        schema(kind) if _is_spec(kind) else f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(spec_type).items()
    )


def flatten(spec: tuple) -> tuple:
    """Return the fields of a spec as a flat tuple. A field that is itself a spec is flattened as well."""
    flat: list = []
    for value in spec:
        flat.extend(flatten(value) if _is_spec(type(value)) else (value,))
    return tuple(flat)


def unflatten(spec_type: type, values: list | tuple) -> Any:
    """Return the spec whose flattened fields are `values`."""
    # The fields are consumed in the order in which `flatten` produced them, so one iterator serves the nested specs
    # as well.
    remaining = iter(values)

    def build(kind: type) -> Any:
        return kind(*(build(field) if _is_spec(field) else next(remaining) for field in _field_types(kind)))

    return build(spec_type)


@cache
def _field_types(spec_type: type) -> tuple:
    return tuple(get_type_hints(spec_type).values())


def _is_spec(kind: Any) -> bool:
    return hasattr(kind, "_fields")


def _with_spec(function: Callable[..., Results], spec_type: type, count: int, *arguments: Any) -> Results:
    """Call function(*tensors, spec), given the flat arguments of an operator. The first `count` arguments are tensors."""
    return function(*arguments[:count], unflatten(spec_type, arguments[count:]))


def _define(name: str, spec_type: type, own_tensors: bool) -> None:
    """Define the schemas of an operator and of its backward operator."""
    tags, inputs = (torch.Tag.pt2_compliant_tag,), "Tensor q, Tensor k, Tensor v"
    returned, saved = "Tensor, Tensor", f"{inputs}, Tensor out, Tensor lse"
    if own_tensors:
        returned, saved = "Tensor, Tensor, Tensor[]", "Tensor[] saved"
    settings = schema(spec_type)
    _library.define(f"{name}({inputs}, {settings}) -> ({returned})", tags=tags)
    gradients = "Tensor dout, Tensor? dlse"
    _library.define(f"{name}_backward({saved}, {gradients}, {settings}) -> (Tensor, Tensor, Tensor)", tags=tags)


def _register_fake(name: str, function: Callable[..., Results]) -> None:
    torch.library.register_fake(f"ringattn::{name}", function, lib=_library)


def _register_flops(name: str, spec_type: type, pairs: Callable[..., float], own_tensors: bool) -> None:
    """Count FLOPs in the same way as torch's own attention.

    The forward pass has two matrix products per pair, and the backward pass with its recomputation has five.
    """

    # Masks are real tensors even if q, k and v are fake ones, so the pairs can always be counted.
    pairs = unset_fake_temporarily()(pairs)

    @register_flop_formula(getattr(torch.ops.ringattn, name), get_raw=True)
    def forward_flops(q, k, v, *settings, out_val=None):
        count = pairs(q.shape[0], q.shape[1], k.shape[1], unflatten(spec_type, settings))
        return round(2 * q.shape[2] * (q.shape[3] + v.shape[3]) * count)

    @register_flop_formula(getattr(torch.ops.ringattn, f"{name}_backward"), get_raw=True)
    def backward_flops(*arguments, out_val=None):
        if own_tensors:
            (q, k, *_), dout, _, *settings = arguments
        else:
            q, k, _, _, _, dout, _, *settings = arguments
        count = pairs(dout.shape[0], dout.shape[1], k.shape[1], unflatten(spec_type, settings))
        return round(2 * dout.shape[2] * (3 * q.shape[3] + 2 * dout.shape[3]) * count)


class _OnceDifferentiable(torch.autograd.Function):
    """Return (dq, dk, dv) unchanged. A derivative of them with respect to the arguments that follow raises an error."""

    @staticmethod
    def forward(ctx, dq, dk, dv, *_):
        return dq.view_as(dq), dk.view_as(dk), dv.view_as(dv)

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("attention has no second derivatives: use torch's own attention to differentiate gradients")


def _is_plain(*tensors: Tensor) -> bool:
    """Whether the operator can be skipped, because no compiler, dispatch mode, tensor subclass or meta tensor needs it."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not tensors[0].is_meta
        and set(map(type, tensors)) == {Tensor}
    )


def _to_fake_mode(arguments: tuple) -> tuple:
    """Convert real tensors, such as the documents of a mask, to fake tensors if a fake-tensor mode is active.

    A fake-tensor mode rejects real tensors.
    """
    mode = detect_fake_mode()
    if mode is None:
        return arguments
    # Fake tensors that are made as constants keep their values, which the FLOP formulas read.
    convert = partial(mode.fake_tensor_converter.from_real_tensor, mode, make_constant=True)
    return tuple(convert(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x for x in arguments)


def _fake_results(q: Tensor, k: Tensor, v: Tensor, spec: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=state_dtype(q.dtype))


def _fake_gradients(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, spec: Any):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_kept_for_graphs: dict[int, object] = {}  # by id


def keep_for_graph(thing: object, device: torch.device) -> None:
    """Never release `thing`, which holds tensors on `device`, if a CUDA graph is being captured.

    A graph is replayed with the addresses that a call used when it was captured, so the memory at these addresses must stay
    allocated.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _kept_for_graphs[id(thing)] = thing
