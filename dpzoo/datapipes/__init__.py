"""Readers: each rank opens only its part of a sample; what comes out are ShardTensors.

`dpzoo.datapipes.grid` reads fields over time (weather), `dpzoo.datapipes.points` point clouds (cars);
`dpzoo.datapipes.drivaerml` knows the files of a DrivAerML folder and converts them, `dpzoo.datapipes.forces` integrates
drag and lift. Which rows a rank reads is integer arithmetic on sizes that all ranks know; workers return plain arrays,
the loader makes tensors of them.
"""

from dpzoo.datapipes.errors import DataError as DataError
from dpzoo.datapipes.errors import DataWarning as DataWarning
