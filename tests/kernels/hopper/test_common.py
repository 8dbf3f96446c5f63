"""Supported cases of the Hopper kernels, and the rules of TMA descriptors. No GPU is needed."""

from types import SimpleNamespace

import pytest
import torch

from ringattn.kernels.hopper import common as hopper_common

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the compute capability of the GPU, and clear the results that were cached for it."""
    hopper_common.unsupported_reason.cache_clear()
    yield lambda *version: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: version)
    hopper_common.unsupported_reason.cache_clear()


@pytest.mark.parametrize(("dims", "padded"), [((8, 8), 64), ((64, 64), 64), ((64, 72), 128), ((128, 8), 128)])
def test_head_dims_are_padded_to_64_or_128(dims, padded):
    assert hopper_common.padded_dim(*dims) == padded


@pytest.mark.parametrize(
    ("dims", "padded"), [((136, 8), (192, 128)), ((192, 128), (192, 128)), ((192, 136), (256, 256)), ((200, 8), (256, 256))]
)
def test_head_dims_above_128_are_padded_to_192_and_128_or_to_256(dims, padded):
    assert hopper_common.padded_wide_dims(*dims) == padded


def test_kernels_get_delta_or_the_tensors_from_which_they_compute_it():
    out, dout, dlse = torch.zeros(1, 2, 3, 4), torch.ones(1, 3, 2, 4).transpose(1, 2), torch.zeros(1, 2, 3)
    assert hopper_common.delta_operands(dlse, dout) == (dlse, None, None, None)
    delta, *tensors = hopper_common.delta_operands((out, dlse), dout)
    assert delta is None
    assert tensors[0] is out
    assert tensors[2] is dlse
    assert tensors[1].is_contiguous()
    assert tensors[1].equal(dout)
    assert hopper_common.delta_operands((out, None), dout)[3] is None


@pytest.mark.parametrize("dtype", hopper_common.DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(8, 8), (64, 128), (128, 128), (120, 72), (192, 128), (256, 256)], ids=str)
def test_16_bit_dtypes_and_multiples_of_8_are_supported_on_sm_90(dims, dtype, capability):
    capability(9, 0)
    assert hopper_common.unsupported_reason(GPU, dtype, dims) is None


@pytest.mark.parametrize(
    ("version", "dtype", "dims", "reason"),
    [
        ((8, 0), torch.bfloat16, (64, 64), "this GPU is sm_80"),
        ((9, 0), torch.float32, (64, 64), "torch.float32 is not fp16 or bf16"),
        ((9, 0), torch.bfloat16, (264, 64), "query head dim 264"),
        ((9, 0), torch.bfloat16, (64, 12), "value head dim 12"),
    ],
    ids=["ampere", "fp32", "wide", "no-multiple-of-8"],
)
def test_the_reason_names_what_is_unsupported(version, dtype, dims, reason, capability):
    capability(*version)
    assert reason in hopper_common.unsupported_reason(GPU, dtype, dims)


def test_there_is_one_program_per_sm_unless_other_kernels_share_the_sms(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    hopper_common.num_programs.cache_clear()
    assert hopper_common.num_programs(GPU, False) == 132
    assert hopper_common.num_programs(GPU, True) > 2**30
    hopper_common.num_programs.cache_clear()


ROWS = torch.zeros(2, 10, 4, 64, dtype=torch.float16)


@pytest.mark.parametrize(
    "x",
    [
        ROWS,
        ROWS.transpose(1, 2),
        ROWS[:, ::2],
        ROWS[:, :, 1:3],
        ROWS[..., :24],
        # PyTorch may report any stride for a dimension of size 1.
        ROWS.as_strided((1, 10, 1, 64), (3, 256, 5, 1)),
    ],
    ids=["contiguous", "heads-first", "every-other-token", "some-heads", "some-columns", "sizes-of-one"],
)
def test_inputs_that_tma_can_address_are_not_copied(x):
    assert hopper_common.as_addressable(x) is x


@pytest.mark.parametrize(
    "x",
    [
        ROWS[..., 4:],
        ROWS[..., ::2],
        ROWS[:, :1].expand(-1, 10, -1, -1),
        torch.zeros(2, 10, 4 * 68, dtype=torch.float16).unflatten(2, (4, 68))[..., :64],
    ],
    ids=["unaligned", "strided-columns", "stride-of-0", "stride-of-68"],
)
def test_other_inputs_are_copied(x):
    copy = hopper_common.as_addressable(x)
    assert copy.is_contiguous()
    assert torch.equal(copy, x)
    assert hopper_common.as_addressable(copy) is copy


def test_a_descriptor_describes_tiles_of_one_head():
    descriptor = hopper_common.tma_descriptor(ROWS, 64, 128)
    assert descriptor.base is ROWS
    assert list(descriptor.shape) == [2, 10, 4, 64]
    assert list(descriptor.strides) == [2560, 256, 64, 1]
    assert list(descriptor.block_shape) == [1, 64, 1, 128]


def test_a_descriptor_is_copied_for_another_tensor_of_the_same_shape():
    other = torch.ones_like(ROWS)
    first, second = (hopper_common.tma_descriptor(x, 64, 64) for x in (ROWS, other))
    assert first.base is ROWS
    assert second.base is other
    assert first.layout is second.layout


def test_strides_of_dimensions_of_size_one_are_multiples_of_8():
    x = ROWS.as_strided((1, 10, 1, 64), (3, 256, 5, 1))
    assert list(hopper_common.tma_descriptor(x, 64, 64).strides) == [8, 256, 8, 1]
