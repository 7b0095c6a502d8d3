"""Whole zoo models under torch.compile, on two ranks: every model x backend x dynamic, one line each.

    python -m tests.compile_matrix                                  all rows of aot_eager and inductor (an hour)
    python -m tests.compile_matrix --backend aot_eager --only vit   some of them
    python -m tests.compile_matrix --backend inductor --layouts uneven uneven

A row compiles a tiny model as one graph, in float64, and compares output, input gradients and weight gradients with
the same model on one process: twice on one layout (the second time nothing may be compiled) and once on another one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from dpzoo.models.registry import cut_dims
from dpzoo.shard import strict
from dpzoo.testing import RankPool, domain_mesh
from dpzoo.testing.cutting import cut_tensor, plan_cut
from tests.models.test_zoo import lively

MODELS = {
    "ViT": "vit_nano_patch4_dense",
    "ViT 3-D": "vit_nano_patch4_3d_dense",
    "DiT": "dit_nano_patch4_field",
    "DiT neighborhood": "dit_nano_patch4_neighborhood",
    "UNet": "unet_nano",
    "UNet residual": "unet_nano_residual",
    "UNet diffusion": "diffusion_unet_nano",
    "Transolver": "transolver_nano",
    "Transolver 2-D": "transolver_nano_2d",
    "NAT": "nat_nano_dense",
    "NAT 3-D": "nat_nano_3d",
    "DiNAT": "dinat_nano_dense",
    "StormScope": "stormscope_nano",
}
BACKENDS = ("aot_eager", "inductor")
LAYOUTS = ("uneven", "uneven", "even")


def differences(model: nn.Module, run: Any, inputs: list[Any], wanted: dict[str, Tensor] | None = None) -> Any:
    """Output and all gradients of `run(*inputs)` as plain tensors, or how far they are from the wanted ones."""
    model.zero_grad()
    inputs = [x.detach().requires_grad_(True) if _is_real(x) else x for x in inputs]
    with strict():
        y = run(*inputs)
        (y * torch.linspace(0.5, 1.5, y.shape[-1], dtype=y.dtype)).sum().backward()
    found = {"output": y.detach()}
    found |= {f"input {i}": x.grad for i, x in enumerate(inputs) if _is_real(x)}
    found |= {f"weight {name}": p.grad for name, p in model.named_parameters()}
    found = {k: t.full_tensor() if hasattr(t, "full_tensor") else t for k, t in found.items()}
    if wanted is None:
        return found
    return {k: (found[k] - want).abs().max().item() / max(1.0, want.abs().max().item()) for k, want in wanted.items()}


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def cut_inputs(name: str, inputs: Any, layout: str) -> list[Any]:
    """The model's example inputs, cut over the domain mesh in a named layout."""
    mesh = domain_mesh()
    cuts = [
        None if dim is None else plan_cut(tuple(x.shape), tuple(mesh.shape), dim, layout)
        for x, dim in zip(inputs, cut_dims(name, inputs), strict=True)
    ]
    return [x if cut is None else cut_tensor(x, mesh, cut) for x, cut in zip(inputs, cuts, strict=True)]


def row(name: str, backend: str, dynamic: bool, layouts: Sequence[str] = LAYOUTS) -> dict[str, Any]:
    """One line of the table: per layout the errors, how many graphs there are by now, and the seconds it took."""
    torch._dynamo.reset()
    model = lively(name).double()
    inputs = [x.double() if _is_real(x) else x for x in model.example_inputs(batch_size=2)]
    wanted = differences(model, model, inputs)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)
    errors, graphs, seconds = [], [], []
    for layout in layouts:
        start = time.monotonic()
        errors.append(differences(model, compiled, cut_inputs(name, inputs, layout), wanted))
        graphs.append(counter.frame_count)
        seconds.append(time.monotonic() - start)
    return {"errors": errors, "graphs": graphs, "seconds": seconds}


def faults(found: dict[str, Any]) -> list[str]:
    """What is wrong with a row."""
    wrong = [f"{k} is off by {e:.1e}" for errors in found["errors"] for k, e in errors.items() if not e < 1e-9]
    return wrong + (["a second batch compiled again"] if len(set(found["graphs"][:2])) > 1 else [])


def verdict(found: dict[str, Any]) -> str:
    """A row as text: worst relative errors, graphs per call, seconds per call, and what is wrong with it."""
    worst = {
        kind: max(e for errors in found["errors"] for k, e in errors.items() if k.startswith(kind))
        for kind in ("output", "input", "weight")
    }
    text = " ".join(f"{kind} {e:.0e}" for kind, e in worst.items())
    runs = "/".join(f"{s:.1f}" for s in found["seconds"])
    return f"{text}  graphs {found['graphs']}  s {runs}  {'; '.join(faults(found)) or 'ok'}"


def main(argv: list[str] | None = None) -> int:
    """Print the table; returns the number of rows that are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, nargs="*", default=list(BACKENDS))
    parser.add_argument("--dynamic", type=lambda s: s == "True", nargs="*", default=[False, True])
    parser.add_argument("--only", default=[""], nargs="*", help="titles or names of models, or a part of them")
    parser.add_argument("--layouts", choices=sorted(set(LAYOUTS)), nargs="*", default=list(LAYOUTS))
    told = parser.parse_args(argv)
    bad = 0
    with RankPool(group_timeout=600.0) as pool:
        for title, name in chosen(told.only).items():
            for backend in told.backend:
                for dynamic in told.dynamic:
                    bad += _print_row(pool, title, name, backend, dynamic, told.layouts)
    return bad


def chosen(only: Sequence[str]) -> dict[str, str]:
    """For each word the model of that title or name, else those whose title or name contains it."""
    found: dict[str, str] = {}
    for word in only:
        exact = {title: name for title, name in MODELS.items() if word in (title, name)}
        found |= exact or {title: name for title, name in MODELS.items() if word in title or word in name}
    return found


def _print_row(pool: RankPool, title: str, name: str, backend: str, dynamic: bool, layouts: Sequence[str]) -> int:
    try:
        texts = [verdict(found) for found in pool.run(row, name, backend, dynamic, layouts, ranks=2, timeout=1800)]
        text = next((t for t in texts if not t.endswith("ok")), texts[0])
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line and not line.startswith(" ")]
        text = " | ".join([type(error).__name__, *lines[:8]])
    print(f"{title:16s} {backend:9s} dynamic={dynamic!s:5s}  {text}", flush=True)
    return 0 if text.endswith("ok") else 1


if __name__ == "__main__":
    sys.exit(main())
