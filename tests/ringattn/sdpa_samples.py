"""Compare `sdpa` with torch on all samples of torch's OpInfo for scaled_dot_product_attention.

python -m tests.ringattn.sdpa_samples
"""

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db

from ringattn import sdpa
from tests.ringattn.test_torch_attention import check

(OPINFO,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")


def main() -> None:
    """Without dropout, results equal torch's. With dropout, their mean equals the result without, within six deviations."""
    compared, rejected = 0, 0
    for sample in OPINFO.sample_inputs("cpu", torch.float64):
        tensors, options = (sample.input, *sample.args), sample.kwargs
        if options["dropout_p"]:
            exact = F.scaled_dot_product_attention(*tensors, is_causal=options["is_causal"])
            torch.manual_seed(0)
            draws = torch.stack([sdpa(*tensors, **options) for _ in range(100)])
            assert ((draws.mean(0) - exact).abs() <= 6 * draws.std(0) / 10 + 1e-9).all()
        elif "attn_mask" in options:
            rejected += 1
            with pytest.raises(ValueError, match="attn_mask is a bias"):
                sdpa(*tensors, **options)
        else:
            check(*tensors, **options)
        compared += 1
    assert (compared, rejected) == (25, 1)


if __name__ == "__main__":
    main()
