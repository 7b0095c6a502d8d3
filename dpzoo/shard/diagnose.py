"""Texts for errors and warnings: the name of an op, the layouts of its operands, the module that called it."""

import sys
from typing import Any

import torch
from torch import Tensor, nn


def op_name(func: Any) -> str:
    """A readable name of a function, method or aten op."""
    if hasattr(func, "_schema"):
        return str(func)
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        return getattr(getattr(func, "__self__", None), "__name__", name)
    return name


def operands_text(args: Any, kwargs: Any = None) -> str:
    """The tensors among the arguments: `float64(17, 6) cut [dim 0 over 'domain': 12+5], plain float64(6,)`."""
    leaves, _ = torch.utils._pytree.tree_flatten((args, kwargs or {}))
    parts = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            spec: Any = getattr(leaf, "_spec", None)
            plain = f"plain {str(leaf.dtype).removeprefix('torch.')}{tuple(leaf.shape)}"
            parts.append(spec.describe() if hasattr(spec, "describe") else plain)
    return ", ".join(parts) or "no tensors"


def module_path() -> str:
    """Where in the model the present call comes from, as attribute path of the outermost module; "" outside of one."""
    modules: list[nn.Module] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and isinstance(owner, nn.Module) and owner not in modules:
            modules.append(owner)
        frame = frame.f_back
    if not modules:
        return ""
    root, inner = modules[-1], modules[0]
    path = next((name for name, m in root.named_modules() if m is inner), "")
    return ".".join(p for p in (type(root).__name__, path) if p)


def where() -> str:
    """`" in ViT.blocks.3.attn"`, or nothing outside of a module."""
    path = module_path()
    return f" in {path}" if path else ""
