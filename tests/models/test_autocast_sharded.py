"""Whole models under autocast, cut and on one process: the same dtypes, values within the rounding of autocast."""

import pytest
import torch

from dpzoo.models import DiT, NeighborhoodTransformer, Transolver, UNet, ViT
from dpzoo.shard import scatter, strict
from dpzoo.testing import distributed, domain_mesh
from tests.models.lively import liven

NAT = {"embed_dim": 8, "depths": (1, 1), "num_heads": (2, 2), "kernel_size": 3, "num_classes": 0, "head": "dense"}
# name -> (model, shapes of the inputs, dim that is cut of each, None: plain)
MODELS = {
    "vit": (
        lambda: ViT((24, 8), patch_size=4, embed_dim=24, depth=2, num_heads=3, head="dense", out_chans=2),
        [(1, 3, 24, 8)],
        [2],
    ),
    "unet": (lambda: UNet(in_chans=2, out_chans=3, channels=(4, 6, 8), norm="group"), [(1, 2, 24, 8)], [2]),
    "dit": (
        lambda: DiT((24, 16), patch_size=4, in_chans=2, embed_dim=24, depth=2, num_heads=2, time_freq_dim=8),
        [(1, 2, 24, 16), (1,)],
        [2, None],
    ),
    "nat": (lambda: NeighborhoodTransformer(**NAT, out_chans=2), [(1, 3, 32, 24)], [2]),
    "transolver": (
        lambda: Transolver(embed_dim=16, depth=2, num_heads=2, num_slices=5, space_dim=3, out_dim=2, fun_dim=2),
        [(1, 17, 3), (1, 17, 2)],
        [1, 1],
    ),
}


def trained(model, inputs, low):
    """Output and gradients of one backward pass."""
    model.zero_grad()
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        out = model(*inputs)
        loss = (out.float() - 0.5).square().mean()
    loss.backward()
    out = out.full_tensor() if hasattr(out, "full_tensor") else out
    return [out.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]]


@pytest.mark.parametrize("name", MODELS)
@distributed(ranks=2, timeout=60)
def test_models(name):
    make, shapes, dims = MODELS[name]
    torch.manual_seed(0)
    model = liven(make()).float()
    full = [torch.randn(shape) for shape in shapes]
    sizes = {24: (8, 16), 32: (20, 12), 17: (6, 11)}
    for low in (torch.bfloat16, torch.float16):
        expected, exact = trained(model, full, low), trained(model, full, None)
        cut = [
            t if d is None else scatter(t, domain_mesh(), dim=d, sizes=sizes[t.shape[d]])
            for t, d in zip(full, dims, strict=True)
        ]
        with strict():
            found = trained(model, cut, low)
        assert len(found) == len(expected)
        for mine, reference, truth in zip(found, expected, exact, strict=True):
            assert mine.dtype is reference.dtype
            # Both are off the truth by the rounding of autocast; neither may be much further off than the other.
            size = truth.abs().max().double()
            off, usual = ((t.double() - truth.double()).abs().max() for t in (mine, reference))
            assert off <= 3 * usual + 4 * torch.finfo(low).eps * size, (tuple(mine.shape), off, usual, size)
