"""dpzoo: a model zoo whose models run domain-parallel, unchanged.

`scatter` cuts one huge sample over the devices of a mesh; an ordinary `nn.Module` then runs on it with the values and
gradients of a single device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dpzoo.models import create_model as create_model
    from dpzoo.models import list_models as list_models
    from dpzoo.pretrained import load_pretrained as load_pretrained
    from dpzoo.shard import ShardTensor as ShardTensor
    from dpzoo.shard import scatter as scatter

_LAZY = {
    "ShardTensor": "dpzoo.shard",
    "scatter": "dpzoo.shard",
    "create_model": "dpzoo.models",
    "list_models": "dpzoo.models",
    "load_pretrained": "dpzoo.pretrained",
}

__all__ = ["ShardTensor", "create_model", "list_models", "load_pretrained", "scatter"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'dpzoo' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
