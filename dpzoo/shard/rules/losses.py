"""Losses: the elementwise loss on aligned shards, then a mean or sum weighted by the global count."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.fallback import gather_call
from dpzoo.shard.function_door import pointwise
from dpzoo.shard.plan import Dims
from dpzoo.shard.registry import RULE_OF, handler, rule
from dpzoo.shard.tensor import ShardTensor


def _reduced(loss: Tensor, reduction: str) -> Any:
    if reduction == "mean":
        return loss.mean()
    if reduction == "sum":
        return loss.sum()
    if reduction == "none":
        return loss
    raise ValueError(f"{reduction} is not a valid value for reduction")


def _legacy(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """The deprecated flags of torch's losses."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _elementwise(func: Any) -> None:
    """Register a loss whose 'none' form is elementwise in all its tensors."""
    signature = inspect.signature(func)

    @handler(func, name=func.__name__)
    def answer(called: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        reduction = _legacy(a.pop("size_average", None), a.pop("reduce", None), a.pop("reduction"))
        if reduction == "batchmean":  # kl_div
            return pointwise(func, (), (), {**a, "reduction": "none"}).sum() / a["input"].shape[0]
        weight = a.pop("weight", None) if func in _PLAIN_WEIGHT else None
        loss = pointwise(func, (), (), {**{k: v for k, v in a.items() if v is not None}, "reduction": "none"})
        if weight is not None:
            loss = loss * weight
        return _reduced(loss, reduction)


_PLAIN_WEIGHT = (F.mse_loss, F.l1_loss)
for _loss in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.poisson_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
):  # fmt: skip
    _elementwise(_loss)


# ---------------------------------------------------------------------- classes
def _class_rule(op: Callable[..., Any], name: str) -> None:
    @rule(name=name)
    def plan(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Dims | None:
        """The loss of every sample; the class dim is needed whole."""
        c = 1 if input.ndim > 1 else 0
        labels: tuple[int | str, ...] = (*(i for i in range(c)), "class", *range(c + 1, input.ndim))
        per_sample = tuple(x for x in labels if x != "class")
        by_class = target.is_floating_point()
        options = {"label_smoothing": label_smoothing} if op is F.cross_entropy else {}

        def local(x: Tensor, t: Tensor, w: Tensor | None = None) -> Tensor:
            return op(x, t, w, ignore_index=ignore_index, reduction="none", **options)

        operands = [labels, labels if by_class else per_sample, *([("class",)] if weight is not None else [])]
        return Dims(operands, [per_sample], local, whole=frozenset(["class"]))


_class_rule(F.cross_entropy, "cross_entropy per sample")
_class_rule(F.nll_loss, "nll_loss per sample")


def _class_loss(
    func: Any, input: Any, target: Any, weight: Any, ignore_index: int, reduction: str, smoothing: float
) -> Any:
    options: dict[str, Any] = {"label_smoothing": smoothing} if func is F.cross_entropy else {}
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if not isinstance(input, Tensor) or not isinstance(target, Tensor) or not _shapes_fit(input, target):
        return gather_call(
            func, (), (input, target, weight), {"ignore_index": ignore_index, "reduction": reduction, **options}
        )
    loss = RULE_OF[f"{func.__name__} per sample"](
        func, (ShardTensor,), (input, target, weight), {"ignore_index": ignore_index, **options}
    )
    if reduction != "mean":
        return _reduced(loss, reduction)
    if target.is_floating_point():
        return loss.sum() / max(1, loss.numel()) if loss.numel() else loss.mean()
    counted = target != ignore_index
    if weight is None:
        return loss.sum() / counted.sum()
    share = F.embedding(torch.where(counted, target, 0), weight.detach().unsqueeze(-1)).squeeze(-1)
    return loss.sum() / (share * counted).sum()


def _shapes_fit(x: Tensor, t: Tensor) -> bool:
    """Otherwise torch itself says what is wrong."""
    if t.is_floating_point():
        return x.shape == t.shape
    return (tuple(x.shape[:1]) + tuple(x.shape[2:]) if x.ndim > 1 else ()) == tuple(t.shape)


@handler(F.cross_entropy, name="cross_entropy")
def cross_entropy(
    func: Any, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Cross entropy with class indices or probabilities; the mean is weighted over all shards."""
    return _class_loss(
        F.cross_entropy, input, target, weight, ignore_index, _legacy(size_average, reduce, reduction), label_smoothing
    )


@handler(F.nll_loss, name="nll_loss")
def nll_loss(
    func: Any, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100, reduce: Any = None,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    """Negative log likelihood; the mean is weighted over all shards."""
    return _class_loss(F.nll_loss, input, target, weight, ignore_index, _legacy(size_average, reduce, reduction), 0.0)
