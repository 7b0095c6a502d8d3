"""The configuration as dataclasses: a key that does not exist is an error at the start."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from dpzoo.train import TrainConfig, lift_loop_keys


@dataclass(frozen=True)
class DataSettings:
    """Which cars, and what is known of the flow around them.

    Args:
        folder: of cars, see `dpzoo.datapipes.points.find_cars`; a relative one is looked for beside this example too.
        validation: names of the cars that are not trained on, a file with a name a line, or a part of all in (0, 1).
        fold: (i, n): instead of `validation`, the i-th of n folds.
        conditions: numbers that the model sees beside the points, name -> value where a car does not tell its own.
        stream_velocity: m/s, where a car does not tell.
        reference_area: of force coefficients in m2, where a car does not tell.
        workers: cars read ahead.
    """

    folder: Path = Path("data")
    validation: list[str] | float | str = 0.1
    fold: tuple[int, int] | None = None
    conditions: Mapping[str, float] = field(default_factory=dict)
    stream_velocity: float = 38.889
    reference_area: float | None = None
    workers: int = 2


@dataclass(frozen=True)
class CloudSettings:
    """One cloud.

    Args:
        points: of each car in a training step; null for all of them.
        frequencies: sines and cosines of the coordinates that the model sees, at so many doublings of the frequency;
            they help small models to learn sharp fields (Tancik et al. 2020, arXiv:2006.10739).
        model: name and arguments for `dpzoo.create_model`.
    """

    points: int | None = None
    frequencies: int = 0
    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "transolver_nano"})


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW; `fused`: one kernel reads and writes each weight once."""

    lr: float = 1e-3
    weight_decay: float = 1e-4
    fused: bool = True


@dataclass(frozen=True)
class EvaluateSettings:
    """What `evaluate.py` does with a trained model.

    Args:
        cars: "validation", "training" or "all".
        chunk: points per piece of a car on each rank's device; null for one shot. The numbers are the same.
        figures: the car that is drawn; "first" for the first one, of those held out if there are any; "none".
        renderer: of the surface: "matplotlib", or "pyvista" off the screen.
        vtp: write a VTP file for each car with the fields that were predicted.
        compare: run the drawn car on one process too and plot the difference (only for clouds that fit one process).
    """

    cars: Literal["validation", "training", "all"] = "all"
    chunk: int | None = None
    figures: str = "first"
    renderer: Literal["matplotlib", "pyvista"] = "matplotlib"
    vtp: bool = False
    compare: bool = True


@dataclass(frozen=True)
class Settings:
    """All of it.

    Args:
        out: folder of the run.
        ranks: processes to start on this machine; torchrun, srun and mpirun have their own way to say it.
        domain: ranks that share one car, -1 for all; with fewer than there are, the rest are data-parallel replicas.
    """

    out: Path = Path("outputs/drivaer")
    ranks: int = 2
    domain: int = -1
    data: DataSettings = field(default_factory=DataSettings)
    clouds: Mapping[str, CloudSettings] = field(default_factory=lambda: {"surface": CloudSettings()})
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "Settings":
        """Of nested mappings, such as a YAML file holds; what is short for a key of `train` may stand at the top.

        Raises:
            ValueError: a key that is not known, or a cloud that is neither "surface" nor "volume".
        """
        given = lift_loop_keys(table)
        kinds = {
            "data": DataSettings,
            "optimizer": OptimizerSettings,
            "train": TrainConfig,
            "evaluate": EvaluateSettings,
        }
        for name, kind in kinds.items():
            given[name] = _made(kind, given.get(name) or {}, name)
        given["data"] = replace(given["data"], folder=Path(given["data"].folder))
        clouds = given.pop("clouds", None) or {"surface": {}}
        if unknown := clouds.keys() - {"surface", "volume"}:
            raise ValueError(f"clouds: {', '.join(sorted(unknown))} unknown; a car has a surface and a volume")
        made = {name: _made(CloudSettings, cloud or {}, f"clouds.{name}") for name, cloud in clouds.items()}
        given["out"] = Path(given.get("out", cls.out))
        return _made(cls, {**given, "clouds": made}, "the configuration")

    def to_dict(self) -> dict[str, Any]:
        """The inverse of `from_dict`, of plain values."""
        table = asdict(self)
        table["out"], table["data"]["folder"] = str(self.out), str(self.data.folder)
        table["data"]["fold"] = None if self.data.fold is None else list(self.data.fold)
        return table


def _made(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    known = [f.name for f in fields(kind)]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{where} has no {', '.join(unknown)}; it has {', '.join(known)}")
    return kind(**given)
