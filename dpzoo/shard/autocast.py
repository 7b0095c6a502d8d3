"""Autocast at the door: what a rule is made of must see the dtypes that torch's own op would see.

Most rules run torch's op on the shards, which autocast then treats as ever. A rule that composes an op of others (a pad
of slices, a mean of sums) would pass by what torch has registered for the op itself: "in float32", for some devices and
some ops. Which these are is not written down here: torch is asked by a call on a few zeros, once for each kind of call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from dpzoo.shard.spec import ShardTensorSpec

is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
HALF = (torch.float16, torch.bfloat16)
Ask = Callable[[Any, Callable[..., Tensor], Any, Any], Any]


def _pads(func: Any, zeros: Callable[..., Tensor], args: Any, kwargs: Any) -> Any:
    mode = kwargs.get("mode", args[2] if len(args) > 2 and isinstance(args[2], str) else "constant")
    n = len(kwargs["pad"] if "pad" in kwargs else args[1]) // 2
    dims = n if mode == "constant" else min(n, 3)
    return F.pad(zeros(*[2] * (dims + 2)), [1] * (2 * dims), mode)


def _pools(func: Any, zeros: Callable[..., Tensor], args: Any, kwargs: Any) -> Any:
    return func(zeros(*[1] * (int(func.__name__.split("d_")[0].rstrip("d")[-1]) + 2)), 1)


def _resizes(func: Any, zeros: Callable[..., Tensor], args: Any, kwargs: Any) -> Any:
    mode = kwargs.get("mode", args[3] if len(args) > 3 else "nearest")
    if mode != "area":
        return F.interpolate(zeros(1, 1, 1, 1), 1, mode="bilinear")
    shape = [1] * (args[0] if args else kwargs["input"]).ndim  # an adaptive pool, which autocast tells apart by dims
    return F.interpolate(zeros(*shape), 1, mode="area")


def _alone(func: Any, zeros: Callable[..., Tensor], args: Any, kwargs: Any) -> Any:
    return func(zeros(1, 1))


def _paired(func: Any, zeros: Callable[..., Tensor], args: Any, kwargs: Any) -> Any:
    return func(zeros(1, 1), zeros(1, 1))


# By the name of the handler: the call, on zeros of a shape, that shows what autocast makes of the op.
_ASK: dict[str, Ask] = {
    "pad": _pads,
    "avg_pool": _pools,
    **{f"adaptive_{kind}_pool{n}d": _pools for kind in ("avg", "max") for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d_with_indices": _pools for n in (1, 2, 3)},
    "trace": _alone,
    "vector_norm": _alone,
    "norm": lambda func, zeros, args, kwargs: torch.norm(zeros(1, 1)),
    "linalg.norm": _alone,
    "logsumexp": lambda func, zeros, args, kwargs: torch.logsumexp(zeros(1, 1), 0),
    "group_norm": lambda func, zeros, args, kwargs: F.group_norm(zeros(1, 1, 2), 1),
    "interpolate": _resizes,
    "cosine_similarity": _paired,
    "dist": _paired,
    "cosine_embedding_loss": lambda func, zeros, args, kwargs: F.cosine_embedding_loss(
        zeros(1, 1), zeros(1, 1), torch.ones(1, device=zeros().device)
    ),
    "triplet_margin_loss": lambda func, zeros, args, kwargs: F.triplet_margin_loss(
        zeros(1, 1), zeros(1, 1), zeros(1, 1)
    ),
}
_WIDENS: dict[Any, bool] = {}


def widening(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """The handler `answer(func, *args, **kwargs)` with its tensors in float32 where autocast would have the op so."""
    ask = _ASK.get(name)
    if ask is None:
        return answer

    def call(func: Any, *args: Any, **kwargs: Any) -> Any:
        if is_on():
            low = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.dtype in HALF), None)
            if low is not None and _widens(name, ask, func, low, args, kwargs):
                args = tuple(_wide(a) for a in args)
                kwargs = {k: v if k == "out" else _wide(v) for k, v in kwargs.items()}
        return answer(func, *args, **kwargs)

    return call


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def _widens(name: str, ask: Ask, func: Any, low: Tensor, args: Any, kwargs: Any) -> bool:
    device, dtype = low.device, low.dtype
    if not autocasts(device.type):
        return False
    given = (*args, *kwargs.values())  # the mode of a pad or a resize, and of how many dims a pad is
    static = tuple(a if isinstance(a, str) else len(a) for a in given if isinstance(a, (str, tuple, list)))
    key = (name, func, static, low.ndim, device.type, dtype, torch.get_autocast_dtype(device.type))
    if key not in _WIDENS:
        with _disable_current_modes(), torch.no_grad():
            out = ask(func, lambda *shape: torch.zeros(shape, dtype=dtype, device=device), args, kwargs)
        _WIDENS[key] = (out if isinstance(out, Tensor) else out[0]).dtype is torch.float32
    return _WIDENS[key]


def autocasts(device_type: str) -> bool:
    """Is autocast on for this type of device?"""
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def state() -> tuple[tuple[bool, torch.dtype], ...]:
    """What of autocast a plan may depend on."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def switched_off(device_type: str) -> torch.autocast:
    """A block without autocast: for ops that torch does not cast, made of ops that it does."""
    return torch.autocast(device_type, enabled=False)


def summands(
    local: Callable[..., Tensor], operands: Sequence[ShardTensorSpec]
) -> tuple[Callable[..., Tensor], torch.dtype | None]:
    """A product whose sum runs over ranks: each rank's summand in float32, as one device adds up before it rounds.

    Returns:
        The local op, and the dtype that the sum is rounded to; `local` itself and None if that is not half precision.
    """
    if not is_on() and not any(s.dtype in HALF for s in operands):
        return local, None
    kind = operands[0].layout.device_type
    with _disable_current_modes(), torch.no_grad():
        few = [torch.zeros([min(n, 2) for n in s.shape], dtype=s.dtype, device=kind) for s in operands]
        dtype = local(*few).dtype
    if dtype not in HALF:
        return local, None

    def run(*tensors: Tensor) -> Tensor:
        with switched_off(kind):
            return local(*[t.to(dtype).float() if t.dtype.is_floating_point else t for t in tensors])

    return run, dtype
