"""Names and shapes of other libraries' weights: one ``name sizes...`` a line, ``name = other`` for a shared tensor."""

from pathlib import Path

import torch
from torch import Tensor

KEYS = Path(__file__).parent / "keys"


def golden(name: str) -> dict[str, Tensor]:
    """Random weights with the recorded names and shapes; tensors that the library shares are the same one."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for line in (KEYS / f"{name}.txt").read_text().splitlines():
        key, *rest = line.split()
        if key == "#":
            continue
        if rest[:1] == ["="]:
            found[key] = found[rest[1]]
        else:
            found[key] = torch.randn([int(n) for n in rest], generator=generator)
    return found
