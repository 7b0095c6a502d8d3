"""group_norm, instance_norm, batch_norm and local_response_norm with statistics over the whole domain.

Running buffers get the global values and stay equal on all ranks. Plain weights and uncut channels take the one-node
path of `norm_node.py`; the rest, and second derivatives, are composed of rules that exist.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard import gradients
from dpzoo.shard.collectives import all_gather_v
from dpzoo.shard.fallback import gather_call
from dpzoo.shard.plan import Dims, Labels
from dpzoo.shard.registry import RULE_OF, handler, rule
from dpzoo.shard.rules.meta import as_torch, output_shape
from dpzoo.shard.rules.norm_node import NormNode, Rows
from dpzoo.shard.rules.parts import cut_axes, whole_values
from dpzoo.shard.tensor import ShardTensor


def _plain(*tensors: Tensor | None) -> bool:
    return not any(isinstance(t, ShardTensor) for t in tensors)


def _normalized(
    x: ShardTensor, groups: int, over_batch: bool, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised tensor, and mean and biased variance of its rows (see `Rows`), flat."""
    spec = x._spec
    fits = not spec.is_partial and spec.axis_of(1) is None and not x.dtype.is_complex and x.numel()
    if fits and _plain(weight, bias):
        composed = functools.partial(_composed, groups=groups, over_batch=over_batch, eps=eps)
        sharers = spec.layout.groups_over(cut_axes(spec, range(spec.ndim)))
        weight, bias = gradients.lent(weight, sharers), gradients.lent(bias, sharers)
        return NormNode.apply(
            x, weight, bias, Rows(whole_values(spec), groups, over_batch, eps), lambda *t: composed(*t)[0]
        )
    return _composed(x, weight, bias, groups, over_batch, eps)


def _composed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, over_batch: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_normalized`, of ops that have rules."""
    wide = x.float() if x.dtype.itemsize == 2 and x.dtype.is_floating_point else x
    n, c = x.shape[:2]
    if over_batch:
        var, mean = torch.var_mean(wide, (0, *range(2, x.ndim)), correction=0, keepdim=True)
        out = (wide - mean) * torch.rsqrt(var + eps)
    else:
        rows = wide.reshape(n, groups, c // groups, *x.shape[2:])
        var, mean = torch.var_mean(rows, tuple(range(2, rows.ndim)), correction=0, keepdim=True)
        out = ((rows - mean) * torch.rsqrt(var + eps)).reshape(x.shape)
    shape = (-1, *[1] * (x.ndim - 2))
    out = out if weight is None else out * weight.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    return out.to(x.dtype), mean.flatten(), var.flatten()


@handler(F.group_norm, torch.group_norm, name="group_norm")
def group_norm(
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Normalise each group of channels of each sample over all its positions."""
    output_shape(F.group_norm, input, num_groups, weight, bias, eps)
    if not isinstance(input, ShardTensor):
        return gather_call(F.group_norm, (), (input, num_groups, weight, bias, eps), {})
    return _normalized(input, num_groups, False, weight, bias, eps)[0]


@rule(name="batch_norm by running statistics")
def _by_running_statistics(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Dims:
    """Elementwise: the channels of the statistics and weights are those of the input."""
    labels: Labels = tuple(range(input.ndim))
    given = [weight is not None, bias is not None]

    def local(x: Tensor, mean: Tensor, var: Tensor, *affine: Tensor) -> Tensor:
        it = iter(affine)
        w, b = (next(it) if g else None for g in given)
        if not x.shape[1]:  # torch wants a channel; the weights stay in the graph, which other ranks wait for
            return sum((p.sum() * 0 for p in affine), x * 1)
        return F.batch_norm(x, mean, var, w, b, False, 0.0, eps)

    return Dims([labels, (1,), (1,), *[(1,) for g in given if g]], [labels], local)


@handler(F.batch_norm, torch.batch_norm, name="batch_norm")
def batch_norm(
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Normalise each channel over batch and positions, or by the running statistics."""
    options = (training, momentum, eps)
    checked = output_shape if (running_mean is None) == (running_var is None) else as_torch
    checked(F.batch_norm, input, running_mean, running_var, weight, bias, *options)
    if not isinstance(input, ShardTensor) or input.ndim < 2:
        return gather_call(F.batch_norm, (), (input, running_mean, running_var, weight, bias, *options), {})
    if not training:
        args = (input, running_mean, running_var, weight, bias, eps)
        return RULE_OF["batch_norm by running statistics"](F.batch_norm, (), args, {})
    out, mean, var = _normalized(input, input.shape[1], True, weight, bias, eps)
    count = input.numel() // max(1, input.shape[1])
    if count:
        _update(running_mean, mean, momentum)
        _update(running_var, var * (count / max(1, count - 1)), momentum)
    return out


def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Move a running statistic towards the global value, the same on every rank."""
    if running is None:
        return
    whole = value.full_tensor() if isinstance(value, ShardTensor) else value
    with torch.no_grad():
        running.mul_(1 - momentum).add_(whole.detach().to(running.dtype), alpha=momentum)


@handler(F.instance_norm, torch.instance_norm, name="instance_norm")
def instance_norm(
    func: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Normalise each channel of each sample over its positions."""
    options = (use_input_stats, momentum, eps)
    output_shape(F.instance_norm, input, running_mean, running_var, weight, bias, *options)
    if not isinstance(input, ShardTensor):
        return gather_call(F.instance_norm, (), (input, running_mean, running_var, weight, bias, *options), {})
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    n, c = input.shape[:2]
    out, mean, var = _normalized(input, c, False, weight, bias, eps)
    count = input.numel() // max(1, n * c)
    if running_mean is not None or running_var is not None:
        mean, var = (t.full_tensor() if isinstance(t, ShardTensor) else _every_sample(t, input) for t in (mean, var))
        _update(running_mean, mean.view(n, c).mean(0), momentum)
        _update(running_var, var.view(n, c).mean(0) * (count / max(1, count - 1)), momentum)
    return out


def _every_sample(rows: Tensor, x: ShardTensor) -> Tensor:
    """Statistics of this rank's samples, made those of all samples."""
    axis = x._spec.axis_of(0)
    if axis is None:
        return rows
    sizes = tuple(n * x.shape[1] for n in x._spec.sizes[axis])
    return all_gather_v(rows, 0, sizes, x._spec.layout.groups[axis])


@rule(F.local_response_norm)
def local_response_norm(
    input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Dims | None:
    """Divide by a sum over neighbouring channels, which each rank sees whole (Krizhevsky et al. 2012)."""
    output_shape(F.local_response_norm, input, size, alpha, beta, k)
    labels: Labels = tuple(range(input.ndim))

    def local(t: Tensor) -> Tensor:
        return F.local_response_norm(t, size, alpha, beta, k) if t.numel() else t * 1

    return Dims([labels], [labels], local, whole=frozenset([1]))
