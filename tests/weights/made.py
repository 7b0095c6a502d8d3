"""Files of weights for the tests, as their libraries write them."""

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import torch

# Small files with random weights, written by nvidia-physicsnemo 2.2.2 (Apache-2.0).
EXAMPLES = Path(__file__).parent / "physicsnemo"


def state() -> dict[str, torch.Tensor]:
    """A small state dict, always the same."""
    generator = torch.Generator().manual_seed(0)
    return {
        "pos_embed": torch.randn(1, 9, 4, generator=generator),
        "proj.weight": torch.randn(6, 3, 2, 2, generator=generator),
        "proj.bias": torch.randn(6, generator=generator),
        "steps": torch.tensor(7),
    }


def write_mdlus(path: Path, values: dict[str, torch.Tensor], arguments: dict[str, Any], kind: str = "zip") -> None:
    """PhysicsNeMo's file: a zip file of stored members, formerly a tar file."""
    weights = io.BytesIO()
    torch.save(values, weights)
    members = {
        "model.pt": weights.getvalue(),
        "args.json": json.dumps(arguments).encode(),
        "metadata.json": b'{"mdlus_file_version": "0.1.0"}',
    }
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
