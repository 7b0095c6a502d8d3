"""What the tests of torch.compile share: compiling with a count of graphs, cutting, comparing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dpzoo.shard import Shard, ShardTensor, scatter_tensor
from dpzoo.testing import domain_mesh


def compiled(fn: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Any:
    """`fn` compiled from scratch as one graph; `.graphs()` is how many graphs were made since."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    made = torch.compile(fn, backend=counter, **{"fullgraph": True, "dynamic": False, **options})

    def call(*args: Any) -> Any:
        return made(*args)

    call.graphs = lambda: counter.frame_count
    return call


def cut(full: Tensor, dim: int = 1, sizes: Sequence[int] = (8, 4)) -> ShardTensor:
    """A leaf that needs a gradient if it can."""
    x = scatter_tensor(full, 0, domain_mesh(), [Shard(dim)], sizes={0: tuple(sizes)}).detach()
    return x.requires_grad_(full.is_floating_point())


def leaf(full: Tensor) -> Tensor:
    """The same for one process."""
    return full.clone().requires_grad_(full.is_floating_point())


def same(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    """Two tensors, each sharded or plain, hold the same values."""
    found, wanted = (
        t.full_tensor() if isinstance(t, ShardTensor) or hasattr(t, "full_tensor") else t for t in (found, wanted)
    )
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=tolerance, atol=tolerance)
