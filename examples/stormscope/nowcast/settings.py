"""The configuration as dataclasses: a key that does not exist is an error at the start."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dpzoo.train import TrainConfig, lift_loop_keys


@dataclass(frozen=True)
class DataSettings:
    """Which fields, on which grid, and what of them is held out.

    Args:
        stores: of the state that is forecast, see `dpzoo.datapipes.grid.Stream`; "dpzoo:era5" is the embedded sample.
        channels: of the state, in order; null for all.
        log1p: channels that become log(1 + x) for the model; forecasts and scores are of x.
        masked: pixels without a value are allowed. They are 0 for the model, are not forecast and do not count in the
            loss and in scores. Points at which no past frame has any value are hidden from a model that was built with
            `mask_token: true`.
        invalid_values: numbers that mean "no value", as stored.
        past: frames that the model sees.
        sun: frames of the sun's height that it sees, as offsets from the newest of them (1 is the forecast time).
        static_stores, invariants: fields without a time, and where those lie that `stores` do not have.
        crop: rows [top, bottom) and columns [left, right) in use; null for all.
        held_out_from: states from this time on are not trained on: they are what a validation forecasts.
        area_weights: count a point by the cosine of its latitude (needs "latitude" among the invariants).
        spacing: distance of two points in `spacing_unit`, for the axis of spectra.
        units: channel -> unit, for figures.
        storms: make the (one) store, with these arguments of `dpzoo.datapipes.grid.Storms`, if it is not there.
        prefetch: samples read ahead.
    """

    stores: tuple[str, ...] = ("dpzoo:era5",)
    channels: tuple[str, ...] | None = None
    log1p: tuple[str, ...] = ()
    masked: bool = False
    invalid_values: tuple[float, ...] = ()
    past: int = 1
    sun: tuple[int, ...] = (1,)
    static_stores: tuple[str, ...] = ()
    invariants: tuple[str, ...] = ("latitude", "longitude")
    crop: tuple[int, int, int, int] | None = None
    held_out_from: str = "2017-01-02T12:00"
    area_weights: bool = False
    spacing: float = 1.0
    spacing_unit: str = "points"
    units: Mapping[str, str] = field(default_factory=dict)
    storms: Mapping[str, Any] | None = None
    prefetch: int = 2


@dataclass(frozen=True)
class DiffusionSettings:
    """Noise levels in training and in sampling; fields have unit variance.

    Args:
        level_mean, level_std: of the logarithm of the noise levels in training.
        steps, sigma_min, sigma_max, order, churn: of `dpzoo.models.diffusion.EDMSampler`.
        members: of the ensembles that a validation draws; 0 to only look at the loss.
        batch: members at a time.
    """

    level_mean: float = -0.5
    level_std: float = 1.4
    steps: int = 10
    sigma_min: float = 0.02
    sigma_max: float = 40.0
    order: int = 2
    churn: float = 0.0
    members: int = 4
    batch: int = 4


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW; `fused`: one kernel reads and writes each weight once."""

    lr: float = 1e-3
    weight_decay: float = 1e-4
    fused: bool = True


@dataclass(frozen=True)
class EvaluateSettings:
    """What `evaluate.py` and `sample.py` do with a trained model.

    Args:
        starts: times of the newest state that a forecast sees; null for all whose next state is held out.
        samples: forecasts per start: analysis members, where the data have them.
        leads: steps of a forecast; the data may end earlier.
        members: of the ensemble.
        batch: members at a time.
        seed: of the ensemble.
        thresholds: channel -> values whose reaching is an event, for CSI and FSS.
        window: points on a side of the windows of FSS, odd.
        figures: draw the first forecast.
        compare: run the first forecast on one process too and draw the difference (a grid that fits one process).
    """

    starts: tuple[str, ...] | None = None
    samples: int = 2
    leads: int = 3
    members: int = 8
    batch: int = 4
    seed: int = 0
    thresholds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    window: int = 5
    figures: bool = True
    compare: bool = True

    def __post_init__(self) -> None:
        if self.members < 2 or self.leads < 1 or self.samples < 1:
            raise ValueError(f"evaluate: members >= 2, leads >= 1 and samples >= 1 are needed, got {self}")


@dataclass(frozen=True)
class Settings:
    """All of it.

    Args:
        out: folder of the run.
        ranks: processes to start on this machine; torchrun, srun and mpirun have their own way to say it.
        domain: ranks that share one sample, -1 for all; with fewer than there are, the rest are data-parallel replicas.
        predict: "change" from the newest state, in units of its deviation, or the next "state" itself.
        model: name and arguments for `dpzoo.create_model`; channels and grid follow from the data.
    """

    out: Path = Path("outputs/stormscope")
    ranks: int = 2
    domain: int = -1
    predict: Literal["change", "state"] = "change"
    data: DataSettings = field(default_factory=DataSettings)
    model: Mapping[str, Any] = field(default_factory=lambda: {"name": "stormscope_nano"})
    diffusion: DiffusionSettings = field(default_factory=DiffusionSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)

    def __post_init__(self) -> None:
        if self.predict not in ("change", "state"):
            raise ValueError(f"predict is {self.predict!r}, choose change or state")

    @classmethod
    def from_dict(cls, table: Mapping[str, Any]) -> "Settings":
        """Of nested mappings, such as a YAML file holds; `parallel`, `compile`, `amp`, `resume` are those of "train".

        Raises:
            ValueError: a key that is not known.
        """
        given = lift_loop_keys(table)
        kinds = {
            "data": DataSettings,
            "diffusion": DiffusionSettings,
            "optimizer": OptimizerSettings,
            "train": TrainConfig,
            "evaluate": EvaluateSettings,
        }
        for name, kind in kinds.items():
            given[name] = _made(kind, given.get(name) or {}, name)
        given["out"] = Path(given.get("out", cls.out))
        return _made(cls, given, "the configuration")

    def to_dict(self) -> dict[str, Any]:
        """The inverse of `from_dict`, of plain values."""
        return asdict(self) | {"out": str(self.out)}


def evaluate_settings(table: Mapping[str, Any]) -> EvaluateSettings:
    """`EvaluateSettings` of a YAML file's mapping."""
    return _made(EvaluateSettings, table, "evaluate")


def _made(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    known = [f.name for f in fields(kind)]
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{where} has no {', '.join(unknown)}; it has {', '.join(known)}")
    return kind(**{name: _tuples(value) for name, value in given.items()})


def _tuples(value: Any) -> Any:
    """Lists of a YAML file as tuples, also inside mappings."""
    if isinstance(value, Mapping):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list) else value
