"""Where curves go besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow. Imported only when asked for.

A run that is resumed continues the run of the service: its id is kept in the run's folder. Weights & Biases and MLflow
are otherwise configured as they always are, by their own environment variables (`WANDB_MODE=offline`,
`MLFLOW_TRACKING_URI`, ...). Only the first rank has trackers.
"""

from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from dpzoo.train.config import TrainConfig


class Tracker(Protocol):
    """Takes the values of a report."""

    def report(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Values of step `step`; `kind` is "train" or "validation"."""

    def close(self) -> None:
        """The run has ended."""


class TensorBoard:
    """Event files in `folder/tensorboard`; what an earlier writer wrote after `start` is purged."""

    def __init__(self, folder: Path, start: int) -> None:
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = writer(str(folder / "tensorboard"), purge_step=start)

    def report(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """One scalar per value."""
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WeightsAndBiases:
    """A run of a project. Steps that are told twice (a run taken back to its checkpoint) stay as first told."""

    def __init__(self, folder: Path, project: str, config: TrainConfig) -> None:
        wandb: Any = import_module("wandb")
        known = _known_id(folder / "wandb_id")
        self._run = wandb.init(
            project=project, dir=str(folder), id=known, resume="allow" if known else None, config=asdict(config)
        )
        (folder / "wandb_id").write_text(self._run.id)

    def report(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """All values at once."""
        self._run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class MLflow:
    """A run of an experiment."""

    def __init__(self, folder: Path, experiment: str, config: TrainConfig) -> None:
        client = import_module("mlflow.tracking").MlflowClient()
        found = client.get_experiment_by_name(experiment)
        number = found.experiment_id if found is not None else client.create_experiment(experiment)
        known = _known_id(folder / "mlflow_id")
        self._run_id = known or client.create_run(number, run_name=folder.name).info.run_id
        self._client: Any = client
        (folder / "mlflow_id").write_text(self._run_id)
        if known is None:
            for name, value in asdict(config).items():
                client.log_param(self._run_id, name, value)

    def report(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """One metric per value."""
        for name, value in values.items():
            self._client.log_metric(self._run_id, f"{kind}/{name}", value, step=step)

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)


def require_trackers(config: TrainConfig) -> None:
    """Raise ImportError, on every rank alike, for a package that the configuration needs and that is not there."""
    needed = {
        "tensorboard": ("torch.utils.tensorboard", config.tensorboard, "track"),
        "wandb": ("wandb", config.wandb, "wandb"),
        "mlflow": ("mlflow.tracking", config.mlflow, "mlflow"),
    }
    for package, (module, asked, extra) in needed.items():
        if not asked:
            continue
        try:
            import_module(module)
        except ImportError as error:
            raise ImportError(
                f'{package}={asked} needs {package} ({error}): pip install {package}, or pip install "dpzoo[{extra}]"'
            ) from error


def open_trackers(config: TrainConfig, folder: Path, start: int) -> list[Tracker]:
    """Those that the configuration asks for; `start` is the step at which this run begins."""
    trackers: list[Tracker] = []
    if config.tensorboard:
        trackers.append(TensorBoard(folder, start))
    if config.wandb:
        trackers.append(WeightsAndBiases(folder, config.wandb, config))
    if config.mlflow:
        trackers.append(MLflow(folder, config.mlflow, config))
    return trackers


def _known_id(file: Path) -> str | None:
    return file.read_text().strip() if file.is_file() else None
