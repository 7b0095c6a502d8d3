"""The core: `ShardTensor`, one global tensor cut over a device mesh in shards of any size.

Ordinary torch code runs on it: each op finds a rule, the rule says what each rank needs, one executor fetches it.
"""

from torch.distributed.tensor import Partial, Replicate, Shard

import dpzoo.shard.operators  # noqa: F401 - gives ShardTensor its operators
from dpzoo.shard.errors import (
    GatherWarning,
    LayoutError,
    MissingShardPatch,
    PromotionWarning,
    ShardError,
    UndeterminedShardingError,
)
from dpzoo.shard.fallback import reset_warnings, strict
from dpzoo.shard.gradients import grad_sync
from dpzoo.shard.manager import DistributedManager
from dpzoo.shard.random import get_rng_state, manual_seed, set_rng_state
from dpzoo.shard.ring import RingPassingConfig, perform_ring_iteration
from dpzoo.shard.rules.attention import attention_mode
from dpzoo.shard.rules.halo_conv import halo_overlap
from dpzoo.shard.scattering import scatter, scatter_tensor
from dpzoo.shard.spec import ShardTensorSpec
from dpzoo.shard.synchronize import sync_module_over_mesh
from dpzoo.shard.tensor import ShardTensor, TensorPromotionMode

__all__ = [
    "DistributedManager",
    "GatherWarning",
    "LayoutError",
    "MissingShardPatch",
    "Partial",
    "PromotionWarning",
    "Replicate",
    "RingPassingConfig",
    "Shard",
    "ShardError",
    "ShardTensor",
    "ShardTensorSpec",
    "TensorPromotionMode",
    "UndeterminedShardingError",
    "attention_mode",
    "get_rng_state",
    "grad_sync",
    "halo_overlap",
    "manual_seed",
    "perform_ring_iteration",
    "reset_warnings",
    "scatter",
    "scatter_tensor",
    "set_rng_state",
    "strict",
    "sync_module_over_mesh",
]
