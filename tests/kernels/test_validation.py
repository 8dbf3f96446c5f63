"""Every rule about arguments: its error names the given value, and all necessary calls check it."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ringattn.kernels import dispatch, reference, validation
from ringattn.kernels.blocks import BlockMask
from ringattn.kernels.dropout import Dropout
from ringattn.kernels.interval_mask import Intervals
from tests.kernels.masks import full, intervals_of
from tests.kernels.problems import Problem, make_problem

Q, K = torch.zeros(1, 5, 4, 16), torch.zeros(1, 7, 2, 16)


def positions(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


BAD_TENSORS = {  # q, k, v and a part of the message
    "three dimensions": ((Q[0], K, K), "3, 4, 4 dimensions"),
    "batch": ((Q, K.expand(3, -1, -1, -1), K), "k (3, 7, 2, 16)"),
    "head dim": ((Q, K[..., :8], K), "k (1, 7, 2, 8)"),
    "keys and values": ((Q, K, K[:, 1:]), "v (1, 6, 2, 16)"),
    "heads of keys and values": ((Q, K, K[:, :, 1:]), "v (1, 7, 1, 16)"),
    "heads that do not divide": ((Q[:, :, :3], K, K), "3 query heads and 2 key heads"),
    "no key heads": ((Q, K[:, :, :0], K[:, :, :0]), "4 query heads and 0 key heads"),
    "dtypes": ((Q, K.half(), K), "torch.float32, torch.float16, torch.float32"),
    "devices": ((Q, K, K.to("meta")), "cpu, cpu, meta"),
    "integers": ((Q.int(), K.int(), K.int()), "q, k, v are torch.int32"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_must_fit_together(case):
    tensors, message = BAD_TENSORS[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        validation.check_tensors(*tensors)
    validation.check_tensors(Q, K, K)


def test_tensors_must_be_dense():
    for x in (None, [1.0], K.numpy(), K.to_sparse(), torch.nested.nested_tensor([K[0]])):
        with pytest.raises(ValueError, match=r"q, k, v are .*: give"):
            validation.check_tensors(Q, x, K)
    validation.check_dense(torch.nn.Parameter(Q), K, K)


@pytest.mark.parametrize("value", [np.int32(5), torch.tensor(5), 5])
def test_integers_of_numpy_and_torch_become_integers(value):
    assert type(validation.as_integer("n", value, 1, 5)) is int
    assert validation.as_integer("n", 2**70, high=None) == 2**70


BAD_INTEGERS = [True, np.bool_(True), torch.tensor(True), None, "3", 2.0, [3], torch.ones(2, dtype=torch.int64), 0, 6]


@pytest.mark.parametrize("value", BAD_INTEGERS, ids=str)
def test_other_values_are_no_integers(value):
    with pytest.raises(ValueError, match=r"n=.*: it must be an integer from 1 to 5, of my hand"):
        validation.as_integer("n", value, 1, 5, ", of my hand")


def test_numbers_flags_and_names():
    assert all(type(validation.as_number("x", x)) is float for x in (1, 0.5, np.float32(0.5), torch.tensor(0.5)))
    for value in ("0.5", b"1", True, None, [0.5], 1j, torch.ones(2)):
        with pytest.raises(ValueError, match=r"x=.*: it must be a number"):
            validation.as_number("x", value)
    for value in (0, 1, None, np.bool_(True), "yes"):
        with pytest.raises(ValueError, match=r"x=.*: it must be True or False"):
            validation.check_flag("x", value)
    for value in ("c", None, ["a"], np.array(["a"])):
        with pytest.raises(ValueError, match=r"unknown x .*: it must be one of a, b"):
            validation.check_name("x", value, ("a", "b"))


def test_an_error_message_has_one_line():
    assert validation.shown(torch.ones(3, 3)) == "<Tensor>"
    assert validation.shown([1] * 99) == "<list>"
    assert validation.shown(7) == "7"


def test_dtensors_must_be_converted_to_local_tensors():
    with pytest.raises(ValueError, match=r"DTensors.*to_local\(\)"):
        validation.check_tensors(SimpleNamespace(to_local=None), K, K)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("inf"), float("nan")])
def test_scale_must_be_positive_and_finite(scale):
    with pytest.raises(ValueError, match=f"scale={scale}"):
        validation.check_scale(scale)
    validation.check_scale(0.125)


@pytest.mark.parametrize("p", [1.0, -0.1, float("nan")])
def test_dropout_probability_must_be_less_than_one(p):
    with pytest.raises(ValueError, match=f"dropout_p={p}"):
        validation.check_dropout(p, 0)
    validation.check_dropout(0.0, 0)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, None])
def test_seed_must_be_an_integer_of_63_bits(seed):
    with pytest.raises(ValueError, match=f"seed={seed}"):
        validation.check_dropout(0.1, seed)
    validation.check_dropout(0.1, 2**63 - 1)


def test_precision_must_be_known():
    with pytest.raises(ValueError, match=r"unknown precision 'bf16x3'.*ieee, tf32"):
        validation.check_precision("bf16x3")


def intervals_per_entry(batch: int, intervals: Intervals) -> Intervals:
    return Intervals.of(*(x.repeat(batch, 1) for x in intervals.host), intervals.num_keys, intervals.device)


def with_blocks(*shape: int) -> dict:
    return {"blocks": BlockMask(torch.ones(shape, dtype=torch.bool), 64)}


def with_positions(queries: torch.Tensor, keys: torch.Tensor) -> dict:
    return {"dropout": Dropout(0.1, 0, queries, keys)}


BAD_INPUTS = {  # arguments to change, and a part of the message
    "q": (lambda p: dict(q=p.q[:, :, :3]), "3 query heads"),
    "queries of the intervals": (lambda p: dict(intervals=full(4, 7, p.q.device)), "4 queries, 7 keys"),
    "keys of the intervals": (lambda p: dict(intervals=full(5, 8, p.q.device)), "5 queries, 8 keys"),
    "batch of the intervals": (lambda p: dict(intervals=intervals_per_entry(3, p.intervals)), "3 batch entries"),
    "device of the intervals": (lambda p: dict(intervals=full(5, 7, "meta")), "the intervals are on meta"),
    "query positions": (lambda p: dict(options=with_positions(positions(4), positions(7))), "query_positions has shape (4,)"),
    "key positions": (lambda p: dict(options=with_positions(positions(5), positions(8))), "key_positions has shape (8,)"),
    "dtype of positions": (lambda p: dict(options=with_positions(torch.arange(5), positions(7))), "torch.int64"),
    "query blocks": (lambda p: dict(options=with_blocks(1, 1, 2, 1)), "the block mask has shape (1, 1, 2, 1)"),
    "key blocks": (lambda p: dict(options=with_blocks(1, 1, 1, 2)), "the block mask has shape (1, 1, 1, 2)"),
    "batch of the block mask": (lambda p: dict(options=with_blocks(3, 1, 1, 1)), "the block mask has shape (3, 1, 1, 1)"),
    "heads of the block mask": (lambda p: dict(options=with_blocks(1, 3, 1, 1)), "the block mask has shape (1, 3, 1, 1)"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_forward_and_backward_check_their_inputs(case):
    problem = make_problem(*intervals_of("full", 5, 7), 7, batch=2, heads=(4, 2))
    change, message = BAD_INPUTS[case]
    problem = Problem(**vars(problem) | change(problem))
    for call in (problem.forward, problem.gradients):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(dispatch)


def test_intervals_may_be_one_for_all_batch_entries_or_one_for_each():
    problem = make_problem(*intervals_of("full", 5, 7), 7, batch=2)
    for batch in (1, 2):
        intervals = intervals_per_entry(batch, problem.intervals)
        validation.check_inputs(problem.q, problem.k, problem.v, intervals)


def test_state_must_be_contiguous_and_in_the_dtype_of_states():
    problem = make_problem(*intervals_of("full", 5, 7), 7, heads=(2, 2))
    m, l, o = reference.empty_state(problem.q, 16)
    bad = {
        "o is torch.float16": (m, l, o.half()),
        "l has shape (1, 4, 2)": (m, l[:, 1:], o),
        "o.contiguous()": (m, l, o.mT.contiguous().mT),
        "m is on meta": (m.to("meta"), l, o),
    }
    for message, state in bad.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            problem.forward(dispatch, state=state)
    with pytest.raises(ValueError, match=re.escape("m is torch.float32")):
        problem.double().forward(dispatch, state=(m, l, o))


def test_arguments_of_the_backward_must_fit_the_inputs():
    problem = make_problem(*intervals_of("full", 5, 7), 7, heads=(2, 2))
    dq, dk, dv = (torch.zeros_like(x) for x in (problem.q, problem.k, problem.v))
    p = problem
    bad = {
        "dout is torch.float16": replace(p, dout=p.dout.half()),
        "dout has shape (1, 5, 2, 8)": replace(p, dout=p.dout[..., :8]),
        "lse is torch.float64": replace(p, lse=p.lse.double()),
        "delta has shape (1, 4, 2)": replace(p, delta=p.delta[:, 1:]),
        "out has shape (1, 4, 2, 16)": replace(p, delta=(p.dout[:, 1:], None)),
        "dlse has shape (1, 4, 2)": replace(p, delta=(p.dout, p.lse[:, 1:])),
    }
    for message, wrong in bad.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            wrong.gradients(dispatch)
    bad = {
        "dq is torch.float16": (dq.half(), dk, dv),
        "dk has shape (1, 6, 2, 16)": (dq, dk[:, 1:], dv),
        "dv.contiguous()": (dq, dk, dv.mT.contiguous().mT),
    }
    for message, accumulators in bad.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            p.gradients(dispatch, **dict(zip(("dq", "dk", "dv"), accumulators, strict=True)))
    with pytest.raises(ValueError, match=r"grad_dtype=torch\.float64"):
        p.gradients(dispatch, grad_dtype=torch.float64)


def test_incremental_backward_checks_every_block():
    problem = make_problem(*intervals_of("full", 5, 7), 7)
    incremental = dispatch.IncrementalBackward(problem.q, problem.v, problem.dout, problem.lse, problem.delta, problem.scale)
    with pytest.raises(ValueError, match="5 queries, 8 keys"):
        incremental.add(problem.k, problem.v, full(5, 8))
    with pytest.raises(ValueError, match="dv has shape"):
        incremental.add(problem.k, problem.v, problem.intervals, dv=torch.zeros_like(problem.v[:, 1:]))
