"""Small files with random weights that nvidia-physicsnemo 2.2.2 (Apache-2.0) wrote, and what its models answered.

``outputs.safetensors`` holds inputs and outputs of each by name; those of ``song_unet*`` were recorded in training mode
without dropout, as that library's group norm divides by n - 1 in evaluation mode.
"""

import io
import json
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from dpzoo.weights import TensorSource

PHYSICSNEMO = Path(__file__).parent / "physicsnemo"


def read_mdlus(name: str) -> TensorSource:
    """One of the files; its tensors and what it notes."""
    with zipfile.ZipFile(PHYSICSNEMO / f"{name}.mdlus") as archive:
        weights = torch.load(io.BytesIO(archive.read("model.pt")), weights_only=True)
        noted = {part: json.loads(archive.read(f"{part}.json")) for part in ("args", "metadata")}
    return TensorSource(weights, origin=f"{name}.mdlus", config=noted)


def recorded(name: str) -> dict[str, Tensor]:
    """Inputs and the output ``out`` of the model in that file."""
    found = load_file(PHYSICSNEMO / "outputs.safetensors")
    return {key.removeprefix(name + "."): t for key, t in found.items() if key.startswith(name + ".")}
