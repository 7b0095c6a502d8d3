"""A temporary folder that all ranks see."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def folder_of_all_ranks() -> Iterator[tuple[Path, bool]]:
    """A temporary folder that all ranks see, and whether this rank fills it; entered and left by all."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    try:
        yield Path(name[0]), dist.get_rank() == 0
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(name[0])
