"""Parameters: how weights lie over the ranks, and what happens to their gradients."""

from dpzoo.parallel.clipping import clip_grad_norm_
from dpzoo.parallel.optimizers import on_shards, split_param_groups
from dpzoo.parallel.parallelize import no_sync, parallelize
from dpzoo.parallel.scaler import GradScaler

__all__ = ["GradScaler", "clip_grad_norm_", "no_sync", "on_shards", "parallelize", "split_param_groups"]
