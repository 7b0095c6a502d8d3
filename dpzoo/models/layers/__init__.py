"""Layers that the models share, one family a file. Plain single-device torch: shapes are taken from ``x.shape``."""

from dpzoo.models.layers.attention import Attention as Attention
from dpzoo.models.layers.block import Block as Block
from dpzoo.models.layers.drop_path import DropPath as DropPath
from dpzoo.models.layers.head import DenseHead as DenseHead
from dpzoo.models.layers.layer_scale import LayerScale as LayerScale
from dpzoo.models.layers.mlp import Mlp as Mlp
from dpzoo.models.layers.neighborhood_attention import NeighborhoodAttention as NeighborhoodAttention
from dpzoo.models.layers.patch_embed import PatchEmbed as PatchEmbed
from dpzoo.models.layers.patchify import patchify as patchify
from dpzoo.models.layers.patchify import unpatchify as unpatchify
