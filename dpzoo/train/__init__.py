"""One training loop, for models on one process or on many: step, accumulate, validate, save, resume, stop.

`fit` takes a model, an optimiser, a loader and an objective; `TrainConfig` holds its numbers. Read `step.py` first.
"""

from dpzoo.train.average import WeightAverage as WeightAverage
from dpzoo.train.checkpoint import RunState as RunState
from dpzoo.train.checkpoint import load_model as load_model
from dpzoo.train.checkpoint_files import find_checkpoints as find_checkpoints
from dpzoo.train.checkpoint_files import latest_checkpoint as latest_checkpoint
from dpzoo.train.checkpoint_writer import CheckpointError as CheckpointError
from dpzoo.train.checkpoint_writer import CheckpointWriter as CheckpointWriter
from dpzoo.train.config import TrainConfig as TrainConfig
from dpzoo.train.config import lift_loop_keys as lift_loop_keys
from dpzoo.train.diffusion import Denoising as Denoising
from dpzoo.train.diffusion import SampledScores as SampledScores
from dpzoo.train.diffusion import diffusion_objective as diffusion_objective
from dpzoo.train.diffusion import draw_ensemble as draw_ensemble
from dpzoo.train.export import export_run as export_run
from dpzoo.train.launch import launch as launch
from dpzoo.train.loop import Loader as Loader
from dpzoo.train.loop import Outcome as Outcome
from dpzoo.train.loop import fit as fit
from dpzoo.train.step import DivergedError as DivergedError
from dpzoo.train.step import train_step as train_step
from dpzoo.train.team import Team as Team
from dpzoo.train.validate import validate as validate
