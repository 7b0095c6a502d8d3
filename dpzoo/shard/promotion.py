"""Plain tensors among ShardTensors: said or refused before anything runs, when the user asked for that.

The check stands at the function door, so that it holds for every op whatever answers it; constants that the library
itself uses inside an op are not the user's and are not checked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dpzoo.shard.diagnose import op_name, where
from dpzoo.shard.errors import PromotionWarning, ShardError
from dpzoo.shard.tensor import ShardTensor, TensorPromotionMode

# Their plain tensors are gradients and values to store, not operands.
_NO_OPERANDS = frozenset(["__get__", "__set__", "backward", "grad"])


def checked_call(answer: Callable[..., Any], func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Apply the promotion mode to the operands of a call, then run it.

    Raises:
        ShardError: on every rank, in mode DISABLED, for a plain operand that is neither a Parameter nor a scalar.
    """
    if getattr(func, "__name__", "") not in _NO_OPERANDS:
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor) and t.ndim and not isinstance(t, (ShardTensor, DTensor, nn.Parameter)):
                _apply_mode(t, func)
    with ShardTensor.promotion_mode(TensorPromotionMode.SILENT):
        return answer(func, types, args, kwargs)


def _apply_mode(t: Tensor, func: Any) -> None:
    text = f"{op_name(func)}{where()}: a plain {t.dtype} tensor of shape {tuple(t.shape)} meets a ShardTensor"
    if ShardTensor.get_promotion_mode() is TensorPromotionMode.DISABLED:
        raise ShardError(f"{text}, and promotion is disabled: make it a ShardTensor (Replicate or Shard) first")
    warnings.warn(f"{text} and is taken as the same on every rank", PromotionWarning, stacklevel=4)
