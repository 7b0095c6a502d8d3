"""The README's ten lines, with a check: an unmodified ViT on a sample that is cut over all ranks.

python examples/quickstart/scatter_vit.py
torchrun --nproc-per-node 3 examples/quickstart/scatter_vit.py

Every rank also runs the same model on the whole sample, as one process would, and compares the loss, the output and
every weight gradient. Exit status 1 if they differ by more than rounding.
"""

import sys

import torch
from torch import Tensor

import dpzoo
from dpzoo.shard import DistributedManager

RELATIVE_LIMIT = 1e-4


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """Largest difference, in units of the reference's largest magnitude."""
    return ((value - reference).abs().max() / reference.abs().max()).item()


def main() -> int:
    DistributedManager.initialize()
    manager = DistributedManager()
    mesh = manager.initialize_mesh(mesh_shape=(-1,), mesh_dim_names=("domain",))

    torch.manual_seed(0)  # every rank builds the same weights
    model = dpzoo.create_model("vit_tiny_patch16", img_size=(48, 96), in_chans=4, head="dense").to(manager.device)
    sample = torch.randn(1, 4, 48, 96, device=manager.device)

    x = dpzoo.scatter(sample, mesh, dim=2)  # cut the 48 rows; each rank now holds only its own
    y = model(x)  # nothing in the model knows
    loss = y.square().mean()
    loss.backward()  # weight gradients are plain tensors, complete on every rank

    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    output = y.full_tensor().detach()
    model.zero_grad()

    expected = model(sample)  # the same model on one process
    expected_loss = expected.square().mean()
    expected_loss.backward()

    # The bias of the keys has no gradient but rounding (softmax ignores it), so gradients share one scale per model.
    scale = max(weight.grad.abs().max() for weight in model.parameters())
    gradient = max(((gradients[name] - w.grad).abs().max() / scale).item() for name, w in model.named_parameters())
    differences = {
        "loss": abs(loss.item() - expected_loss.item()) / expected_loss.item(),
        "output": relative_difference(output, expected.detach()),
        "weight gradients": gradient,
    }
    rows = x.to_local().shape[2]
    report = ", ".join(f"{name} {value:.1e}" for name, value in differences.items())
    print(
        f"rank {manager.rank} of {manager.world_size}, {rows} of 48 rows: loss {loss.item():.6f}; differs by: {report}"
    )
    DistributedManager.cleanup()
    return 0 if max(differences.values()) <= RELATIVE_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
