"""Functions on plain tensors that torch does not have, used by models and by the core alike. They need torch only."""

from dpzoo.ops.neighborhood import na1d as na1d
from dpzoo.ops.neighborhood import na2d as na2d
from dpzoo.ops.neighborhood import na3d as na3d
from dpzoo.ops.neighborhood import neighborhood_attention as neighborhood_attention
from dpzoo.ops.points_cells import cell_areas as cell_areas
from dpzoo.ops.points_cells import cell_normals as cell_normals
from dpzoo.ops.points_interpolate import interpolate_idw as interpolate_idw
from dpzoo.ops.points_sample import farthest_point_sample as farthest_point_sample
from dpzoo.ops.points_sample import random_sample as random_sample
from dpzoo.ops.points_search import Neighbors as Neighbors
from dpzoo.ops.points_search import knn as knn
from dpzoo.ops.points_search import radius_search as radius_search
from dpzoo.ops.points_surface import SurfaceDistance as SurfaceDistance
from dpzoo.ops.points_surface import signed_distance as signed_distance
