"""Point clouds on disk, one sample (a car) cut over many ranks: each rank reads only its rows.

cars = find_cars(Path("data"))
training, validation = split_by_fraction(cars, 0.2)
clouds = {"surface": SURFACE, "volume": replace(VOLUME, points=100_000)}
with PointLoader(PointDataset(training, clouds, whole=GEOMETRY), mesh) as loader:
    for sample in loader.epoch(0):
        pressure = sample["surface_fields"][:, 0]     # a ShardTensor
        drag = sample.globals["Cd"]
"""

from dpzoo.datapipes.points.cars import find_cars as find_cars
from dpzoo.datapipes.points.cars import k_folds as k_folds
from dpzoo.datapipes.points.cars import read_names as read_names
from dpzoo.datapipes.points.cars import select as select
from dpzoo.datapipes.points.cars import split_by_fraction as split_by_fraction
from dpzoo.datapipes.points.cars import split_by_lists as split_by_lists
from dpzoo.datapipes.points.dataset import GEOMETRY as GEOMETRY
from dpzoo.datapipes.points.dataset import SURFACE as SURFACE
from dpzoo.datapipes.points.dataset import VOLUME as VOLUME
from dpzoo.datapipes.points.dataset import Cloud as Cloud
from dpzoo.datapipes.points.dataset import PointDataset as PointDataset
from dpzoo.datapipes.points.loader import PointLoader as PointLoader
from dpzoo.datapipes.points.sample import PointSample as PointSample
from dpzoo.datapipes.points.source import FieldInfo as FieldInfo
from dpzoo.datapipes.points.source import PointSource as PointSource
from dpzoo.datapipes.points.source import open_source as open_source
from dpzoo.datapipes.points.statistics import Moments as Moments
from dpzoo.datapipes.points.statistics import Statistics as Statistics
from dpzoo.datapipes.points.statistics import compute_statistics as compute_statistics
