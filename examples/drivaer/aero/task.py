"""What is learned and how well: from a car to the model's inputs, loss, errors and forces."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aero.clouds import KINDS, with_frequencies
from aero.settings import Settings
from dpzoo.datapipes.forces import Forces, integrated_forces
from dpzoo.datapipes.points import PointSample, Statistics

AREA_NAMES = ("reference_area", "aRef")


@dataclass(frozen=True)
class Task:
    """The clouds of `settings`; fields and positions in units of their standard deviation over the training cars."""

    settings: Settings
    statistics: Statistics

    def inputs(self, sample: PointSample) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Cloud -> (points `(1, n, space_dim)`, conditions `(1, c)`)."""
        conditions = None
        if known := self.settings.data.conditions:
            # In units of the usual value, so that they are near one.
            values = [sample.globals.get(name, usual) / (usual or 1.0) for name, usual in known.items()]
            conditions = torch.tensor([values], device=next(iter(sample.tensors.values())).device)
        inputs: dict[str, tuple[Tensor, Tensor | None]] = {}
        for name, cloud in self.settings.clouds.items():
            points = with_frequencies(KINDS[name].describe(sample, self.statistics), cloud.frequencies)
            inputs[name] = (points.unsqueeze(0), conditions)
        return inputs

    def predict(self, model: nn.Module, sample: PointSample, chunk: int | None = None) -> dict[str, Tensor]:
        """Cloud -> predicted fields `(n, columns)` in physical units."""
        inputs = self.inputs(sample)
        found = model(inputs) if chunk is None else model.in_chunks(inputs, chunk)  # type: ignore[operator]
        return {
            name: self.statistics.denormalise(KINDS[name].targets, value.squeeze(0).float())
            for name, value in found.items()
        }

    def objective(self, model: nn.Module, sample: PointSample) -> dict[str, Tensor]:
        """Mean squared error of the normalised fields, averaged over the clouds."""
        found = model(self.inputs(sample))
        losses = {}
        for name, value in found.items():
            target = self.statistics.normalise(KINDS[name].targets, sample[KINDS[name].targets])
            losses[f"{name}/loss"] = (value.squeeze(0).float() - target).square().mean()
        return {"loss": sum(losses.values()) / len(losses), **losses}  # type: ignore[dict-item]

    @torch.no_grad()
    def measure(self, model: nn.Module, sample: PointSample) -> dict[str, Tensor]:
        """Relative L2 error of each field, and how far drag and lift are from the force table."""
        predicted = self.predict(model, sample)
        found = self.relative_errors(predicted, sample)
        if "surface" in predicted:
            forces = self.forces(predicted["surface"], sample)
            for name, value in (("Cd", forces.drag), ("Cl", forces.lift)):
                found[f"{name}_error"] = (value - sample.globals.get(name, float("nan"))).abs()
        return found

    def relative_errors(self, predicted: Mapping[str, Tensor], sample: PointSample) -> dict[str, Tensor]:
        """`cloud/field` -> |prediction - truth| / |truth|, 2-norms over all points."""
        found = {}
        for name, value in predicted.items():
            truth = sample[KINDS[name].targets]
            for field, columns in KINDS[name].fields.items():
                wrong, whole = (t[:, columns].double().square().sum() for t in (value - truth, truth))
                found[f"{name}/{field}"] = (wrong / whole).sqrt()
        return found

    def forces(self, fields: Tensor, sample: PointSample) -> Forces:
        """Of surface fields `(n, 4)` on the points of `sample`; a sub-sample stands for all faces."""
        data = self.settings.data
        area = next((sample.globals[name] for name in AREA_NAMES if name in sample.globals), data.reference_area)
        if area is None:
            raise ValueError(
                f"{sample.name} does not tell its reference area ({' or '.join(AREA_NAMES)}): set data.reference_area"
            )
        areas = sample["surface_areas"]
        return integrated_forces(
            fields[:, 0],
            fields[:, 1:4],
            sample["surface_normals"],
            areas * (sample.totals["surface"] / areas.shape[0]),
            speed=sample.globals.get("stream_velocity", data.stream_velocity),
            reference_area=area,
        )
