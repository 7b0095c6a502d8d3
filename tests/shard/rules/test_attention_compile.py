"""Every way of attention inside one graph: torch.compile(fullgraph=True) against eager on one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from dpzoo.shard import Shard, attention_mode, scatter_tensor
from dpzoo.testing import distributed, domain_mesh


@pytest.mark.parametrize("mode", ["ring", "ulysses", "split keys"])
@distributed(ranks=2, timeout=110)
def test_one_graph(mode):
    torch.manual_seed(0)
    full = [torch.randn(1, 3, 12, 4, dtype=torch.float64) for _ in range(3)]

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=mode == "ring").sin()

    plain = [t.clone().requires_grad_() for t in full]
    attend(*plain).square().sum().backward()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend="aot_eager")
    cut = [scatter_tensor(t, 0, domain_mesh(), [Shard(2)], sizes={0: (8, 4)}).requires_grad_() for t in full]
    if mode == "split keys":
        cut[0] = full[0].clone().requires_grad_()
    with attention_mode(mode if mode != "split keys" else "auto"):
        compiled(*cut).square().sum().backward()
    for found, want in zip(cut, plain, strict=True):
        grad = found.grad.full_tensor() if hasattr(found.grad, "full_tensor") else found.grad
        torch.testing.assert_close(grad, want.grad, rtol=1e-10, atol=1e-11)
