"""State dicts of Transolvers from elsewhere, as those of :class:`~dpzoo.models.transolver.Transolver`.

The authors' keys (https://github.com/thuml/Transolver) are our own: ``load_state_dict`` takes them as they are.
PhysicsNeMo's model has other names, one matrix for queries, keys and values, and no placeholder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_RENAMED = (
    (r"^preprocess\.layers\.0\.", "preprocess.linear_pre.0."),
    (r"^preprocess\.layers\.2\.", "preprocess.linear_post."),
    (r"\.Attn\.out_linear\.", ".Attn.to_out.0."),
    (r"\.ln_mlp1\.0\.", ".ln_2."),
    (r"\.ln_mlp1\.1\.layers\.0\.", ".mlp.linear_pre.0."),
    (r"\.ln_mlp1\.1\.layers\.2\.", ".mlp.linear_post."),
    (r"\.ln_mlp2\.0\.", ".ln_3."),
    (r"\.ln_mlp2\.1\.", ".mlp2."),
)
_FUSED = ".Attn.qkv_project.weight"


def is_physicsnemo(state: Mapping[str, Tensor]) -> bool:
    """Do these keys look like those of PhysicsNeMo's Transolver?"""
    return "preprocess.layers.0.weight" in state and any(key.endswith(_FUSED) for key in state)


def from_physicsnemo(state: Mapping[str, Tensor], placeholder: bool = True) -> dict[str, Tensor]:
    """PhysicsNeMo's state dict with our keys.

    Args:
        state: of a Transolver built without ``use_te``.
        placeholder: Add a placeholder of zeros, which a model for points without order has and PhysicsNeMo's has not.

    Raises:
        ValueError: keys that are not those of PhysicsNeMo's Transolver.
    """
    if not is_physicsnemo(state):
        raise ValueError(
            "from_physicsnemo: found neither preprocess.layers.0.weight nor blocks.*.Attn.qkv_project.weight among "
            f"{list(state)[:4]}...; is this the state dict of another model, or does it need a prefix removed?"
        )
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        if key == "embedding":  # distances on the grid, a buffer that our model computes
            continue
        if key.endswith(_FUSED):
            stem = key.removesuffix("qkv_project.weight")
            for name, part in zip(("to_q", "to_k", "to_v"), value.chunk(3), strict=True):
                out[f"{stem}{name}.weight"] = part.clone()
            continue
        for pattern, new in _RENAMED:
            key = re.sub(pattern, new, key)
        out[key] = value
    if placeholder:
        bias = out["preprocess.linear_post.bias"]
        out["placeholder"] = torch.zeros_like(bias)
    return out
