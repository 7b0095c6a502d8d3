"""The numbers of a training run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

CHOICES = {
    "parallel": ("ddp", "fsdp"),
    "amp": (None, "bf16", "fp16"),
    "schedule": ("constant", "cosine"),
    "resume": ("auto", "never", "must"),
}
LOOP_KEYS = ("parallel", "compile", "amp", "resume")
"""Fields of TrainConfig that a command line may name without `train.`."""


@dataclass(frozen=True)
class TrainConfig:
    """How to train; a step is an optimiser step.

    Args:
        epochs: passes over the training samples.
        max_steps: stop after this many steps, as a signal would: the schedule still counts all epochs.
        accumulate: samples per step and data-parallel rank, one forward and backward pass each; the rest of an epoch
            makes a smaller step.
        samples_per_step: instead of `accumulate`, the samples per step of all data-parallel ranks together, which
            divide them: a run that goes on on another number of them follows the same curve.
        batch_per_group: what dim 0 of a batch may be. One sample per domain group is what domain parallelism is for; a
            larger batch multiplies the memory that it saves, so it has to be asked for.
        parallel: what the data-parallel ranks do: "ddp", each holds all weights, or "fsdp", each holds a part of them.
        compile: `torch.compile` the model; a name is that of one of its backends.
        amp: "bf16" or "fp16" runs the objective under autocast; weights, gradients and the optimiser stay as they are.
            With "fp16" the loss is scaled, and steps whose gradients overflow are skipped.
        clip: largest 2-norm of the gradient of all weights; None leaves gradients alone.
        schedule: of the learning rate after the warm-up: "constant", or "cosine" down to `final_rate` of it.
        warmup_steps: steps over which the rate rises linearly from zero.
        ema: decay of an exponential moving average of the weights, which validations use and `load_model` can load;
            None for none. See `dpzoo.train.average`.
        seed: of every random number, together with the step; see `dpzoo.train.seeds`.
        validate_every: epochs between validations, also after the last; 0 for none.
        checkpoint_every: steps between checkpoints; one is also written at the end and when the run is stopped. 0 for
            these alone.
        keep: how many checkpoints stay, the newest.
        async_checkpoint: training goes on while a checkpoint is written: it waits only until the state is copied.
        resume: "auto" goes on from the newest good checkpoint in the folder, if there is one; "never" refuses a folder
            that holds checkpoints; "must" refuses one without.
        log_every: steps between lines of the journal, each with the mean over the steps since the last.
        progress_bar: show one on a terminal (tqdm).
        tensorboard: write event files too (the extra `dpzoo[track]`).
        wandb: name of the project, to report to Weights & Biases too (the extra `dpzoo[wandb]`).
        mlflow: name of the experiment, to report to MLflow too (the extra `dpzoo[mlflow]`).

    Raises:
        ValueError: a number that cannot be meant.
    """

    epochs: int = 1
    max_steps: int | None = None
    accumulate: int = 1
    samples_per_step: int | None = None
    batch_per_group: int = 1
    parallel: Literal["ddp", "fsdp"] = "ddp"
    compile: bool | str = False
    amp: Literal["bf16", "fp16", "off"] | None = None
    clip: float | None = 1.0
    schedule: Literal["constant", "cosine"] = "cosine"
    warmup_steps: int = 0
    final_rate: float = 0.01
    ema: float | None = None
    seed: int = 0
    validate_every: int = 1
    checkpoint_every: int = 200
    keep: int = 2
    async_checkpoint: bool = False
    resume: Literal["auto", "never", "must"] = "auto"
    log_every: int = 1
    progress_bar: bool = True
    tensorboard: bool = False
    wandb: str | None = None
    mlflow: str | None = None

    def __post_init__(self) -> None:
        at_least = {"epochs": 1, "accumulate": 1, "batch_per_group": 1, "keep": 1, "log_every": 1}
        at_least |= {"warmup_steps": 0, "validate_every": 0, "checkpoint_every": 0}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ValueError(f"TrainConfig: {name} is {getattr(self, name)}, it must be at least {least}")
        if self.amp == "off":
            object.__setattr__(self, "amp", None)
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                listed = ", ".join(str(choice) for choice in known)
                raise ValueError(f"TrainConfig: {name} is {getattr(self, name)!r}, choose one of {listed}")
        if self.samples_per_step is not None and (self.samples_per_step < 1 or self.accumulate != 1):
            raise ValueError(
                f"TrainConfig: samples_per_step is {self.samples_per_step} and accumulate {self.accumulate}; give one "
                "of them, at least 1"
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"TrainConfig: clip is {self.clip}; it must be positive, or None for no clipping")
        if not 0 <= self.final_rate <= 1:
            raise ValueError(f"TrainConfig: final_rate is {self.final_rate}, a part of the full rate lies in [0, 1]")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"TrainConfig: ema is {self.ema}; a decay lies in (0, 1), None is for no average")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"TrainConfig: max_steps is {self.max_steps}; it must be positive, or None for all steps")

    def accumulated(self, replicas: int) -> int:
        """Samples per step of each of so many data-parallel ranks.

        Raises:
            ValueError: `samples_per_step` cannot be divided among them.
        """
        if self.samples_per_step is None:
            return self.accumulate
        if self.samples_per_step % replicas:
            raise ValueError(
                f"samples_per_step={self.samples_per_step} cannot be divided among {replicas} data-parallel ranks: "
                "choose a multiple, or ranks that divide it"
            )
        return self.samples_per_step // replicas


def lift_loop_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration whose top-level `LOOP_KEYS` that are not None have replaced those in its part "train"."""
    rest = {name: value for name, value in table.items() if name not in LOOP_KEYS}
    asked = {name: table[name] for name in LOOP_KEYS if table.get(name) is not None}
    return rest | {"train": {**(rest.get("train") or {}), **asked}}
