"""Losses: the elementwise loss on aligned shards, then a mean or sum weighted by the global count."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpzoo.shard.fallback import gather_call
from dpzoo.shard.function_door import broadcast_labels
from dpzoo.shard.plan import Dims, probe
from dpzoo.shard.registry import RULE_OF, handler, rule, spellings
from dpzoo.shard.rules.parts import check_index
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


_CHECKED: set[Any] = set()


def _check(func: Any, arguments: dict[str, Any]) -> None:
    """Let torch refuse what it refuses, before anything is sent; once per combination of shapes and options."""
    tensors = {k: v for k, v in arguments.items() if isinstance(v, Tensor)}
    rest = {k: v for k, v in arguments.items() if k not in tensors}
    key = (func, *((k, t.shape, t.dtype) for k, t in tensors.items()), *rest.items())
    if key not in _CHECKED:
        probe(func, **arguments)
        if len(_CHECKED) > 4096:
            _CHECKED.clear()
        _CHECKED.add(key)


def _elementwise(func: Any) -> None:
    """Register a loss whose 'none' form is elementwise in all its tensors."""
    signature = inspect.signature(func)
    per_element = f"{func.__name__} per element"

    @rule(name=per_element)
    def plan(*tensors: Tensor, names: tuple[str, ...], **options: Any) -> Dims:
        operands, out = broadcast_labels([tuple(t.shape) for t in tensors])

        def local(*ts: Tensor) -> Tensor:
            return func(**dict(zip(names, ts, strict=True)), **options, reduction="none")

        return Dims(operands, [out], local)

    @handler(func, name=func.__name__)
    def answer(called: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        if func is F.l1_loss:
            a["weight"] = _weight_of_l1_loss()
        _check(func, a)
        reduction = _legacy(a.pop("size_average", None), a.pop("reduce", None), a.pop("reduction"))
        weight = a.pop("weight", None) if func in _WEIGHTED_MEAN else None
        tensors = {k: v for k, v in a.items() if isinstance(v, Tensor)}
        options = {k: v for k, v in a.items() if v is not None and k not in tensors}
        if not any(isinstance(t, ShardTensor) for t in tensors.values()):  # only the weight is sharded
            loss = func(**tensors, **options, reduction="none")
        else:
            loss = RULE_OF[per_element](func, (), tuple(tensors.values()), {"names": tuple(tensors), **options})
        if reduction == "batchmean":  # kl_div
            return loss.sum() / a["input"].shape[0]
        if weight is None:
            return _reduced(loss, reduction)
        loss = loss * weight
        return loss.sum() / weight.sum() if reduction == "mean" else _reduced(loss, reduction)


def _weight_of_l1_loss() -> Tensor | None:
    """torch's `l1_loss` forgets its weight when it hands a call over (2.14): take it from the frame of that call."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals["weight"]


_WEIGHTED_MEAN = (F.mse_loss, F.l1_loss)  # torch divides their weighted sum by the sum of the weights
for _loss in (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits,
    F.kl_div, F.poisson_nll_loss, F.soft_margin_loss, F.hinge_embedding_loss, F.margin_ranking_loss,
):  # fmt: skip
    _elementwise(_loss)


# ---------------------------------------------------------------------- distances
@handler(*spellings("pairwise_distance"), name="pairwise_distance")
def pairwise_distance(
    func: Any, x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Any:
    """The p-norm of the difference over the last dim; torch adds `eps` to every difference."""
    return torch.linalg.vector_norm(x1 - x2 + eps, p, -1, keepdim)


@handler(F.triplet_margin_loss, torch.triplet_margin_loss, name="triplet_margin_loss")
def triplet_margin_loss(
    func: Any, anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2.0,
    eps: float = 1e-6, swap: bool = False, size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    """`relu(margin + d(anchor, positive) - d(anchor, negative))`."""
    reduction = _legacy(size_average, reduce, reduction)
    options = {"margin": margin, "p": p, "eps": eps, "swap": swap, "reduction": reduction}
    _check(F.triplet_margin_loss, {"anchor": anchor, "positive": positive, "negative": negative, **options})
    near, far = F.pairwise_distance(anchor, positive, p, eps), F.pairwise_distance(anchor, negative, p, eps)
    if swap:
        far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps))
    return _reduced((near - far + margin).clamp_min(0), reduction)


@handler(F.cosine_embedding_loss, torch.cosine_embedding_loss, name="cosine_embedding_loss")
def cosine_embedding_loss(
    func: Any, input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0.0, size_average: Any = None,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    """`1 - cos` for pairs that belong together (target 1), `relu(cos - margin)` for others (target -1)."""
    reduction = _legacy(size_average, reduce, reduction)
    options = {"margin": margin, "reduction": reduction}
    _check(F.cosine_embedding_loss, {"input1": input1, "input2": input2, "target": target, **options})
    dim, eps = (1 if target.ndim else 0), 1e-12
    norms = (input1.square().sum(dim) + eps) * (input2.square().sum(dim) + eps)
    cos = (input1 * input2).sum(dim) / norms.sqrt()
    zero = torch.zeros_like(cos)
    together, apart = torch.where(target == 1, 1 - cos, zero), (cos - margin).clamp_min(0)
    return _reduced(together + torch.where(target == -1, apart, zero), reduction)


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
        if op is F.cross_entropy:
            probe(op, input, target, weight, ignore_index=ignore_index, label_smoothing=label_smoothing)
        else:
            probe(op, input, target, weight, ignore_index=ignore_index)
        c = 1 if input.ndim > 1 else 0
        labels: tuple[int | str, ...] = (*(i for i in range(c)), "class", *range(c + 1, input.ndim))
        per_sample = tuple(x for x in labels if x != "class")
        by_class = target.is_floating_point()
        options = {"label_smoothing": label_smoothing} if op is F.cross_entropy else {}

        def local(x: Tensor, t: Tensor, w: Tensor | None = None) -> Tensor:
            return op(x, t, w, ignore_index=ignore_index, reduction="none", **options)

        operands = [labels, labels if by_class else per_sample, *([("class",)] if weight is not None else [])]
        classes = input.shape[c]

        def check(x: Tensor, t: Tensor, *rest: Tensor) -> None:
            if not by_class:
                check_index(t, 0, classes, lambda i: F.nll_loss(torch.zeros(1, classes), i), ignore_index)

        return Dims(operands, [per_sample], local, whole=frozenset(["class"]), check=check)


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
        return loss.mean()
    counted = target != ignore_index
    if weight is None:
        return loss.sum() / counted.sum()
    share = F.embedding(torch.where(counted, target, 0), weight.detach().unsqueeze(-1)).squeeze(-1)
    return loss.sum() / (share * counted).sum()


def _margin_loss(func: Callable[..., Any], name: str) -> None:
    """Losses of a sample over all its classes: one class index, or a list of them."""
    signature = inspect.signature(func)
    per_sample = f"{name} per sample"

    @rule(name=per_sample)
    def plan(input: Tensor, target: Tensor, weight: Tensor | None = None, **options: Any) -> Dims:
        operands: list[Any] = [("n", "class"), ("n", "class")[: target.ndim]]
        if weight is not None:
            operands.append(("class",))

        def local(x: Tensor, t: Tensor, w: Tensor | None = None) -> Tensor:
            if not x.shape[0]:
                return x.sum(1)
            return func(x, t, reduction="none", **options, **({} if w is None else {"weight": w}))

        classes, lowest_valid = input.shape[1], 0 if target.ndim == 1 else -1

        def one_sample(i: Tensor) -> Tensor:
            listed = F.pad(i, (0, classes - 1), value=-1).unsqueeze(0)  # one class, then no more
            return func(torch.zeros(1, classes), i if lowest_valid == 0 else listed)

        def check(x: Tensor, t: Tensor, *rest: Tensor) -> None:
            check_index(t, lowest_valid, classes, one_sample)

        return Dims(operands, [("n",)], local, whole=frozenset(["class"]), check=check)

    @handler(func, name=name)
    def answer(called: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        a = bound.arguments
        _check(func, a)
        reduction = _legacy(a.pop("size_average", None), a.pop("reduce", None), a.pop("reduction"))
        input, target, weight = a.pop("input"), a.pop("target"), a.pop("weight", None)
        if input.ndim != 2:
            options = a if weight is None else {**a, "weight": weight}
            return gather_call(func, (), (input, target), {**options, "reduction": reduction})
        return _reduced(RULE_OF[per_sample](func, (), (input, target, weight), a), reduction)


_margin_loss(F.multi_margin_loss, "multi_margin_loss")
_margin_loss(F.multilabel_margin_loss, "multilabel_margin_loss")


def _shapes_fit(x: Tensor, t: Tensor) -> bool:
    """Otherwise torch itself says what is wrong."""
    if t.is_floating_point():
        return x.shape == t.shape
    return (tuple(x.shape[:1]) + tuple(x.shape[2:]) if x.ndim > 1 else ()) == tuple(t.shape)


@handler(F.cross_entropy, name="cross_entropy")
def cross_entropy(
    func: Any, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Cross entropy with class indices or probabilities; the mean is weighted over all shards."""
    return _class_loss(
        F.cross_entropy, input, target, weight, ignore_index, _legacy(size_average, reduce, reduction), label_smoothing
    )


@handler(F.nll_loss, name="nll_loss")
def nll_loss(
    func: Any, input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    """Negative log likelihood; the mean is weighted over all shards."""
    return _class_loss(F.nll_loss, input, target, weight, ignore_index, _legacy(size_average, reduce, reduction), 0.0)
