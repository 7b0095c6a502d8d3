"""Weights on disk: containers, key dialects, and loading them into a model on a single device."""

from dpzoo.weights.containers import open_weights as open_weights
from dpzoo.weights.load import load_weights as load_weights
from dpzoo.weights.report import LoadReport as LoadReport
from dpzoo.weights.source import Change as Change
from dpzoo.weights.source import DamagedWeightsError as DamagedWeightsError
from dpzoo.weights.source import Slab as Slab
from dpzoo.weights.source import UnsafeWeightsError as UnsafeWeightsError
from dpzoo.weights.source import WeightsError as WeightsError
from dpzoo.weights.source import WeightsMismatchError as WeightsMismatchError
from dpzoo.weights.source import WeightSource as WeightSource
from dpzoo.weights.tensors import TensorSource as TensorSource
from dpzoo.weights.writing import model_config as model_config
from dpzoo.weights.writing import write_folder as write_folder
