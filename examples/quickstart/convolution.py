"""A convolution: each rank fetches the few rows at its borders that its windows reach, and nothing else.

python examples/quickstart/convolution.py
torchrun --nproc-per-node 3 examples/quickstart/convolution.py

The layer is torch's own. Output, input gradient and weight gradients are those of one process, also with a stride and
shards of odd sizes; the weight gradients are plain tensors, complete on every rank when backward() returns.
"""

import sys
from functools import partial
from typing import Any

import torch
from agreement import compare
from ranks import launch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dpzoo.shard import scatter


def with_gradients(layer: nn.Module, image: Tensor) -> dict[str, Tensor]:
    """Output and all gradients of the mean square of the output."""
    layer.zero_grad()
    image.grad = None
    output = layer(image)
    output.square().mean().backward()
    assert image.grad is not None
    weights = {f"gradient of {name}": p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"output": output, "gradient of image": image.grad, **weights}


def main(mesh: DeviceMesh, size: int) -> bool:
    like: dict[str, Any] = {"dtype": torch.float64, "device": mesh.device_type}
    image = torch.randn(1, 4, size, size, **like, requires_grad=True)
    image_cut = scatter(image.detach(), mesh, dim=2, requires_grad=True)  # its rows
    agrees = True
    for what, layer in {
        "3x3": nn.Conv2d(4, 8, 3, padding=1, **like),
        "7x7, stride 2": nn.Conv2d(4, 8, 7, stride=2, padding=3, **like),
    }.items():
        agrees &= compare(what, mesh, partial(with_gradients, layer, image), partial(with_gradients, layer, image_cut))
    if mesh.get_local_rank() == 0:
        print(f"    the whole image has {image.nbytes:,} bytes")
    return agrees


if __name__ == "__main__":
    sys.exit(launch(main, size=129, description=__doc__))
