"""One Transolver for each cloud, trained together: single-device code that runs on any cut of its input."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from aero.clouds import KINDS
from aero.settings import Settings
from dpzoo import create_model


class AeroModel(nn.Module):
    """Cloud -> (points `(1, n, space_dim)`, conditions `(1, c)` or None) to cloud -> fields `(1, n, out_dim)`."""

    def __init__(self, clouds: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.clouds = nn.ModuleDict(clouds)

    def forward(self, inputs: Mapping[str, tuple[Tensor, Tensor | None]]) -> dict[str, Tensor]:
        """Run the clouds that are given."""
        return {name: self.clouds[name](*given) for name, given in inputs.items()}

    @torch.no_grad()
    def in_chunks(self, inputs: Mapping[str, tuple[Tensor, Tensor | None]], chunk: int) -> dict[str, Tensor]:
        """The same numbers, `chunk` points at a time."""
        return {
            name: self.clouds[name].predict_in_chunks(*given, chunk_size=chunk, interleave=True)
            for name, given in inputs.items()
        }


def build_model(settings: Settings) -> AeroModel:
    """The model of a configuration, with weights that depend on the seed alone."""
    torch.manual_seed(settings.train.seed)
    made = {}
    for name, cloud in settings.clouds.items():
        arguments = dict(cloud.model)
        sizes = {"space_dim": KINDS[name].space_dim + 6 * cloud.frequencies, "out_dim": KINDS[name].out_dim}
        conditions = len(settings.data.conditions)
        made[name] = create_model(arguments.pop("name"), **{**arguments, **sizes, "fun_dim": conditions})
    return AeroModel(made)
