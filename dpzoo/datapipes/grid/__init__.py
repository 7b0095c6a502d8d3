"""Gridded data over time (weather), one sample cut over many ranks: each rank reads only its block.

states = Stream((Path("2021.zarr"), Path("2022.zarr")), offsets=(-1, 0))
streams = {"past": states, "next": replace(states, offsets=(1,))}
dataset = GridDataset(streams, invariants=Invariants((Path("static.zarr"),), ("orog", "latitude", "longitude")))
dataset = replace(dataset, statistics=compute_grid_statistics(dataset, mesh))
with GridLoader(dataset, mesh, multiple=4) as loader:
    for sample in loader.epoch(0):
        x, y = sample.stacked("past"), sample.stacked("next")   # ShardTensors (1, frames * channels, y, x)
"""

from dpzoo.datapipes.grid.cut import aligned_sizes as aligned_sizes
from dpzoo.datapipes.grid.dataset import GridDataset as GridDataset
from dpzoo.datapipes.grid.dataset import GridIndex as GridIndex
from dpzoo.datapipes.grid.dataset import Invariants as Invariants
from dpzoo.datapipes.grid.dataset import sample_title as sample_title
from dpzoo.datapipes.grid.layout import GridLayout as GridLayout
from dpzoo.datapipes.grid.loader import GridLoader as GridLoader
from dpzoo.datapipes.grid.output import to_xarray as to_xarray
from dpzoo.datapipes.grid.output import write_fields as write_fields
from dpzoo.datapipes.grid.sample import GridSample as GridSample
from dpzoo.datapipes.grid.solar import cos_zenith as cos_zenith
from dpzoo.datapipes.grid.source import GridSource as GridSource
from dpzoo.datapipes.grid.source import Variable as Variable
from dpzoo.datapipes.grid.source import open_grid as open_grid
from dpzoo.datapipes.grid.statistics import compute_grid_statistics as compute_grid_statistics
from dpzoo.datapipes.grid.statistics_table import GridStatistics as GridStatistics
from dpzoo.datapipes.grid.store import StoreInfo as StoreInfo
from dpzoo.datapipes.grid.storms import Storms as Storms
from dpzoo.datapipes.grid.storms import write_storms as write_storms
from dpzoo.datapipes.grid.stream import Stream as Stream
from dpzoo.datapipes.grid.survey import describe as describe
