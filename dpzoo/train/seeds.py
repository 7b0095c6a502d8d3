"""Random numbers that depend on the seed, the step and the data-parallel replica, and on nothing else.

Torch's generators and that of ShardTensors start anew for every sample. So a run that is resumed draws what it would
have drawn, on any number of ranks, and the ranks of one domain group draw alike: there is no generator state to save.
"""

import hashlib

import torch

from dpzoo.shard import manual_seed

VALIDATION = -1
"""The number that stands for the step in a validation."""


def seed_sample(seed: int, step: int, number: int, replica: int) -> None:
    """Seed for sample `number` of step `step` on data-parallel replica `replica`."""
    digest = hashlib.sha256(f"{seed}/{step}/{number}/{replica}".encode()).digest()
    key = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(key)
    manual_seed(key)
