"""Random numbers that depend on the seed, the step and the number of the sample in it, and on nothing else.

Torch's generators and that of ShardTensors start anew for every sample. So a run that is resumed draws what it would
have drawn, on any number of ranks and data-parallel replicas, and the ranks of one domain group draw alike: there is no
generator state to save.
"""

import hashlib

import torch

from dpzoo.shard import manual_seed

VALIDATION = -1
"""The number that stands for the step in a validation."""


def seed_sample(seed: int, step: int, number: int, replica: int = 0) -> None:
    """Seed for a sample of step `step`, `number` counted over all replicas."""
    digest = hashlib.sha256(f"{seed}/{step}/{number}/{replica}".encode()).digest()
    key = int.from_bytes(digest[:8], "little") >> 1
    torch.manual_seed(key)
    manual_seed(key)
