"""Benchmark cases: their work follows from their masks, and a kernel that skips keys exceeds the tolerance."""

import pytest
import torch

from scripts.accuracy import GROUP_TOLERANCE
from scripts.bench import peers
from scripts.bench.cases import BLOCK, Case, checked_error, expected_results

CPU = torch.device("cpu")


def test_flops_count_the_pairs_of_the_mask():
    case = Case("causal", 256, heads=2, head_dim=16)
    assert case.pairs == 256 * 257 // 2
    assert case.flops("forward") == 4 * 2 * 16 * case.pairs
    assert case.flops("backward") == 2.5 * case.flops("forward")
    assert case.flops("both") == 3.5 * case.flops("forward")


def test_each_matrix_product_counts_its_own_head_dim():
    """S, dq and dk have the head dim of the keys. out, dP and dv have the head dim of the values."""
    case = Case("full", 256, heads=2, head_dim=24, value_dim=16)
    assert case.flops("forward") == 2 * 2 * 256**2 * (24 + 16)
    assert case.flops("backward") == 2 * 2 * 256**2 * (3 * 24 + 2 * 16)
    assert case.bytes("forward") == 2 * 256 * 2 * 2 * (24 + 16)
    assert case.dims == "24/16"
    assert [x.shape[-1] for x in case.inputs(CPU)] == [24, 24, 16, 16]


def test_a_window_has_the_given_size():
    case = Case("window", 512, 2, 16, window_size=100)
    assert case.window == case.mask.window == 100
    assert case.label == "window 100"


def test_window_of_a_short_sequence_is_a_quarter_of_it():
    assert Case("window", 256, 2, 16).window == 64
    assert Case("window", 2**15, 2, 16).window == 4096


@pytest.mark.parametrize("kind", ["documents", "short documents"])
def test_documents_fill_the_sequence_and_are_the_same_in_every_run(kind):
    case = Case(kind, 4096, 2, 16)
    assert sum(case.documents) == 4096
    assert case.documents == Case(kind, 4096, 2, 16).documents
    if kind == "short documents":
        assert max(case.documents) <= 2048
        assert min(case.documents[:-1]) >= 16


def test_exact_fraction_of_blocks_is_kept():
    case = Case("blocks", 8 * BLOCK, 2, 16, kept=0.25)
    assert case.keep.sum() == 16
    assert case.pairs == 16 * BLOCK**2


def test_grouped_heads_have_fewer_bytes():
    assert Case("causal", 256, 8, 16).bytes("forward") == 2 * 256 * 32 * 16
    assert Case("causal", 256, 8, 16, key_heads=2).bytes("backward") == 2 * 2 * 256 * 20 * 16


def test_skipped_keys_exceed_the_tolerance():
    """Four of 1,024 keys are the same share as 64 of 16,384 keys, which are a tile."""
    case = Case("full", 1024, 2, 64)
    q, k, v, dout = case.inputs(CPU)
    expected = expected_results(case, q, k, v, dout)["out"]
    attend = peers.ringattn("auto")(case, CPU)
    correct = checked_error(attend(q, k, v), expected)
    skipped = checked_error(attend(q, k[:, :-4], v[:, :-4]), expected)
    assert 4 * correct < GROUP_TOLERANCE < skipped / 2


def test_first_and_last_groups_of_heads_are_checked():
    """With grouped heads, the checked query heads are those of the first and the last key head."""
    case = Case("causal", 128, heads=6, head_dim=16, key_heads=3)
    tensors = case.inputs(CPU)
    expected = expected_results(case, *tensors)
    out = peers.ringattn("auto")(case, CPU)(*tensors[:3])
    assert expected["out"].shape[2] == 4
    assert expected["dk"].shape[2] == 2
    assert checked_error(out, expected["out"]) < GROUP_TOLERANCE
    wrong = out.detach().clone()
    wrong[:, :, 5] *= 1.1
    assert checked_error(wrong, expected["out"]) > GROUP_TOLERANCE
