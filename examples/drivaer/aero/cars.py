"""The cars of a run: split, loaders and statistics."""

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from aero.clouds import KINDS
from aero.settings import Settings
from dpzoo.datapipes import DataError
from dpzoo.datapipes.points import (
    PointDataset,
    PointLoader,
    Statistics,
    compute_statistics,
    find_cars,
    k_folds,
    read_names,
    select,
    split_by_fraction,
)
from dpzoo.train import Team

EXAMPLE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Split:
    """Name -> path of the cars to train on and of those held out."""

    training: dict[str, Path]
    validation: dict[str, Path]

    def cars(self, which: str) -> dict[str, Path]:
        """ "training", "validation" or "all"."""
        return {"training": self.training, "validation": self.validation}.get(which, self.training | self.validation)


def split_cars(settings: Settings) -> Split:
    """As `settings.data` says.

    Raises:
        DataError: the folder or a car is not there, or a fold that does not exist.
    """
    data = settings.data
    beside = EXAMPLE / data.folder
    cars = find_cars(beside if not data.folder.exists() and beside.exists() else data.folder)
    if data.fold is not None:
        fold, folds = data.fold
        if not 0 <= fold < folds:
            raise DataError(f"fold {fold} of {folds} does not exist, the first is 0")
        return Split(*next(islice(k_folds(cars, folds), fold, None)))
    if isinstance(data.validation, float):
        return Split(*split_by_fraction(cars, data.validation))
    names = read_names(Path(data.validation)) if isinstance(data.validation, str) else list(data.validation)
    held_out = select(cars, names, "data.validation")
    training = {name: path for name, path in cars.items() if name not in held_out}
    if not training:
        raise DataError(f"all {len(cars)} cars are held out by data.validation, none is left to train on")
    return Split(training, held_out)


def make_loader(settings: Settings, cars: dict[str, Path], mesh: DeviceMesh | None, *, training: bool) -> PointLoader:
    """A loader of the clouds in use: drawn points and another order in each epoch for training, else all in order."""
    clouds = {
        name: replace(KINDS[name].cloud, points=cloud.points if training else None)
        for name, cloud in settings.clouds.items()
    }
    whole = tuple(field for name in settings.clouds for field in KINDS[name].whole)
    dataset = PointDataset(cars, clouds, whole, seed=settings.train.seed)
    return PointLoader(dataset, mesh, shuffle=training, prefetch=settings.data.workers)


def statistics_of(settings: Settings, cars: dict[str, Path], mesh: DeviceMesh | None, team: Team) -> Statistics:
    """Of positions and fields of the training cars: read from the run's folder, or computed and written there."""
    file = settings.out / "statistics.json"
    if not team.from_first(file.exists()):
        fields = [name for key in settings.clouds for name in (KINDS[key].centers, KINDS[key].targets)]
        dataset = PointDataset(cars, {name: KINDS[name].cloud for name in settings.clouds})
        found = compute_statistics(dataset, mesh, fields)
        if team.is_first:
            settings.out.mkdir(parents=True, exist_ok=True)
            found.save(file)
    return team.from_first(Statistics.load(file) if team.is_first else None)  # type: ignore[return-value]
