"""torchvision's own models, unmodified, on a cut picture: one device's outputs, gradients and running buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchvision.models import ResNet, convnext_tiny
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.convnext import CNBlock, CNBlockConfig, ConvNeXt
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.models.segmentation import fcn_resnet50
from torchvision.models.segmentation.fcn import FCN, FCNHead

from dpzoo.shard import strict
from dpzoo.testing import assert_parity, distributed, domain_mesh, grid_mesh
from dpzoo.testing.cutting import cut_tensor, plan_cut


def _resnet18() -> nn.Module:
    return ResNet(BasicBlock, [2, 2, 2, 2], num_classes=5)


def _convnext() -> nn.Module:
    """ConvNeXt-Tiny with a block a stage and narrow channels; the layers are torchvision's."""
    widths = (12, 24, 36, 48)
    blocks = [CNBlockConfig(n, m, 1) for n, m in zip(widths, (*widths[1:], None), strict=True)]
    return ConvNeXt(blocks, stochastic_depth_prob=0.0, num_classes=5)


class _Main(nn.Module):
    """The segmentation itself, of the dict that torchvision's models return."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)["out"]


def _fcn() -> nn.Module:
    """torchvision's FCN on its dilated ResNet with a block a stage."""
    backbone = ResNet(Bottleneck, [1, 1, 1, 1], replace_stride_with_dilation=[False, True, True])
    return _Main(FCN(IntermediateLayerGetter(backbone, {"layer4": "out"}), FCNHead(2048, 4)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": _resnet18,
    "convnext": _convnext,
    "convnext_tiny": lambda: convnext_tiny(num_classes=5, stochastic_depth_prob=0.0),
    "fcn": _fcn,
}
SMALL = ("resnet18", "convnext")


def _build(name: str) -> nn.Module:
    """In training mode, without dropout: its masks do not follow the draws of one device."""
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, CNBlock):
            nn.init.constant_(module.layer_scale, 0.5)  # 1e-6, its start, would hide the gradients of the branch
    return model


def _picture(rows: int, columns: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, rows, columns, dtype=torch.float64)


def _same_training_step(name: str, x: Tensor, placements: Any, sizes: Any, mesh: DeviceMesh) -> None:
    """Output, loss, input gradient, weight gradients and buffers; no op may gather.

    Every rank compares what it holds itself: eleven million weight gradients need not be sent around.
    """
    model, again = _build(name), _build(name)
    reference = x.clone().requires_grad_()
    expected = model(reference)
    goal = torch.linspace(-1, 1, expected.numel(), dtype=x.dtype).view(expected.shape)
    (expected * goal).sum().backward()
    cut = plan_cut(x.shape, tuple(mesh.shape), placements, sizes)
    assert cut is not None
    sharded = cut_tensor(x, mesh, cut).requires_grad_()
    with strict():
        found = again(sharded)
        loss = (found * goal).sum()
        loss.backward()
    same: Any = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-9)
    same(found.full_tensor(), expected)
    assert sharded.grad is not None
    assert sharded.grad.placements == sharded.placements
    same(sharded.grad.full_tensor(), reference.grad)
    for (path, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        same(q.grad, p.grad, msg=lambda text, path=path: f"gradient of {path}: {text}")
    for (path, p), q in zip(model.named_buffers(), again.buffers(), strict=True):
        same(q, p, msg=lambda text, path=path: f"buffer {path}: {text}")


@distributed(ranks=2, timeout=90)
@pytest.mark.parametrize("sizes", [(37, 28), (65, 0)])
@pytest.mark.parametrize("name", SMALL)
def test_two_ranks(name: str, sizes: tuple[int, int]):
    _same_training_step(name, _picture(65, 48), 2, sizes, domain_mesh())


@distributed(ranks=2, timeout=120)
@pytest.mark.parametrize("name", ["convnext_tiny", "fcn"])
def test_large_models(name: str):
    _same_training_step(name, _picture(48, 32), 2, (37, 11), domain_mesh())


@distributed(ranks=4, timeout=120)
@pytest.mark.parametrize("name", SMALL)
def test_two_dims_on_a_grid_of_ranks(name: str):
    _same_training_step(name, _picture(65, 48), (2, 3), ((40, 25), (20, 28)), grid_mesh())


@distributed(ranks=2, timeout=120)
def test_fcn_resnet50_forward():
    torch.manual_seed(0)
    model = _Main(fcn_resnet50(weights=None, weights_backbone=None, num_classes=4)).eval()
    assert_parity(
        model, _picture(65, 48), 2, (37, 28), dtype=torch.float32, grads=False, strict=True, rtol=1e-4, atol=1e-4
    )
