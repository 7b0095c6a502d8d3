"""backward and autograd.grad: the engine runs with the rules on.

torch calls these functions with subclass handling switched off, which would also switch it off inside the backward
pass, where a checkpoint runs the model again. So tensors are replaced by their graph edges, and the real function is
called without the switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpzoo.shard.bridges import relayout
from dpzoo.shard.fallback import replicate
from dpzoo.shard.registry import handler
from dpzoo.shard.tensor import ShardTensor


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, (Tensor, GradientEdge)) else list(value)


def _edge(t: Any) -> Any:
    """The graph edge of a tensor; the caller holds the tensor, so the edge needs no token to keep the graph alive."""
    if not isinstance(t, Tensor):
        return t
    with torch._C.DisableTorchFunctionSubclass():
        if t.grad_fn is not None:
            return GradientEdge(t.grad_fn, t.output_nr)
        return get_gradient_edge(t)


def _root_gradients(outputs: Sequence[Any], given: Any) -> list[Tensor | None]:
    """One gradient per root, in the layout of the root; ones for scalars."""
    grads = _listed(given) if given is not None else [None] * len(outputs)
    found: list[Tensor | None] = []
    for out, g in zip(outputs, grads, strict=True):
        if not isinstance(out, ShardTensor):
            found.append(torch.ones_like(out) if g is None and isinstance(out, Tensor) else g)
            continue
        if g is None:
            if out.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            g = torch.ones_like(out.detach())
        if tuple(g.shape) != tuple(out.shape):
            raise RuntimeError(
                f"Mismatch in shape: grad_output has a shape of {tuple(g.shape)} and output has a shape of "
                f"{tuple(out.shape)}."
            )
        if not isinstance(g, ShardTensor):
            g = replicate(g, out)
        found.append(g if out._spec.is_partial else relayout(g, out._spec))
    return found


@handler(torch.autograd.backward, name="autograd.backward", adopt=False)
def backward(
    func: Any,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward`."""
    roots = _listed(tensors)
    grads = _root_gradients(roots, grad_tensors)
    for t in _listed(inputs):
        if isinstance(t, Tensor) and t.grad_fn is not None:
            t.retain_grad()  # as torch does for tensors, though not for edges
    edges = None if inputs is None else [_edge(t) for t in _listed(inputs)]
    torch.autograd.backward([_edge(t) for t in roots], grads, retain_graph, create_graph, inputs=edges)


@handler(torch.Tensor.backward, name="Tensor.backward", adopt=False)
def tensor_backward(
    func: Any,
    self: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """`Tensor.backward`."""
    backward(func, self, gradient, retain_graph, create_graph, inputs=inputs)


@handler(torch.autograd.grad, name="autograd.grad", adopt=False)
def grad(
    func: Any,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad`; gradients come back in the layout of their inputs."""
    roots, leaves = _listed(outputs), _listed(inputs)
    allow = bool(allow_unused) or materialize_grads

    def once(grad_outputs: Any, retain_graph: bool | None) -> tuple[Tensor | None, ...]:
        grads = _root_gradients(roots, grad_outputs)
        edges = [_edge(t) for t in roots], [_edge(t) for t in leaves]
        found = torch.autograd.grad(*edges, grads, retain_graph, create_graph, allow_unused=allow)
        return tuple(_in_layout(g, x, materialize_grads) for g, x in zip(found, leaves, strict=True))

    if not is_grads_batched:
        return once(grad_outputs, retain_graph)
    batches = [_listed(g.unbind(0)) if isinstance(g, Tensor) else [] for g in _listed(grad_outputs)]
    if not batches or any(len(b) != len(batches[0]) for b in batches) or not batches[0]:
        raise RuntimeError("autograd.grad: is_grads_batched=True needs grad_outputs with a leading dim of one length")
    rows = list(zip(*batches, strict=True))
    keep = retain_graph if retain_graph is not None else create_graph
    found = [once(row, True if i + 1 < len(rows) else keep) for i, row in enumerate(rows)]
    return tuple(None if column[0] is None else torch.stack(column) for column in zip(*found, strict=True))


def _in_layout(g: Tensor | None, x: Any, materialize: bool) -> Tensor | None:
    if g is None:
        return torch.zeros_like(x) if materialize else None
    if isinstance(g, ShardTensor) and isinstance(x, ShardTensor) and not x._spec.is_partial:
        return relayout(g, x._spec)
    return g
