"""`with_derivatives`: a function that also returns its gradients, so that a parity test covers second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_derivatives(fn: Callable[..., Tensor]) -> Callable[..., Any]:
    """`fn` and the gradients of its sum of squares by every input: a backward through them is a second one."""

    def call(*tensors: Tensor) -> Any:
        out = fn(*tensors)
        return (out, *torch.autograd.grad(out.square().sum(), tensors, create_graph=True))

    return call
