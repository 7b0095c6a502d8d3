"""Configurations of other libraries, as calls that build the same architecture here.

Each entry of :data:`READERS` looks at the parsed JSON beside some weights and answers with the name of a model and its
arguments, or with None if it is not its own. Only what the table names is understood; an argument of theirs that
changes the architecture and has no counterpart here makes the answer None, and the user builds the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Call = tuple[str, dict[str, Any]]

_TIMM_VIT = re.compile(r"(vit_(?:tiny|small|base|large)_patch(?:8|14|16|32))(?:_(reg4))?(?:_(dinov2)|_(\d+))?")
_TIMM_ARGUMENTS = ("num_classes", "global_pool")
_DIFFUSERS_DIT = ("DiTTransformer2DModel", "Transformer2DModel")
# Their argument -> ours.
_TRANSOLVER = {
    "functional_dim": "fun_dim",
    "embedding_dim": "space_dim",
    "out_dim": "out_dim",
    "n_layers": "depth",
    "n_hidden": "embed_dim",
    "dropout": "dropout",
    "n_head": "num_heads",
    "mlp_ratio": "mlp_ratio",
    "slice_num": "num_slices",
    "structured_shape": "grid",
    "plus": "plus",
    "time_input": "time",
}
# What a PhysicsNeMo DiT has to be for ours to be the same.
_DIT_AS_OURS = {"tokenizer": "patch_embed_2d", "detokenizer": "proj_reshape_2d", "conditioning_embedder": "dit"}


def foreign_call(config: Mapping[str, Any] | None) -> Call | None:
    """(name, arguments) of the model of dpzoo that another library's configuration describes; None if unknown."""
    if config is None:
        return None
    return next((call for reader in READERS if (call := reader(config)) is not None), None)


def _timm(config: Mapping[str, Any]) -> Call | None:
    """``config.json`` of timm: an architecture's name, and what differs from it."""
    match = _TIMM_VIT.fullmatch(str(config.get("architecture")))
    if match is None:
        return None
    stem, registers, dinov2, _ = match.groups()
    name = "_".join(part for part in (stem, registers, dinov2) if part)
    arguments: dict[str, Any] = dict(config.get("model_args") or {})
    arguments |= {key: config[key] for key in _TIMM_ARGUMENTS if key in config}
    size = (config.get("pretrained_cfg") or {}).get("input_size")
    if size is not None and "img_size" not in arguments:
        arguments |= {"in_chans": size[0], "img_size": list(size[1:])}
    return name, arguments


def _diffusers(config: Mapping[str, Any]) -> Call | None:
    """``transformer/config.json`` of diffusers."""
    if config.get("_class_name") not in _DIFFUSERS_DIT or config.get("norm_type", "ada_norm_zero") != "ada_norm_zero":
        return None
    heads, width = config.get("num_attention_heads", 16), config.get("attention_head_dim", 72)
    return "DiT", {
        "img_size": config.get("sample_size", 32),
        "patch_size": config.get("patch_size", 2),
        "in_chans": config.get("in_channels", 4),
        "out_chans": config.get("out_channels") or config.get("in_channels", 4),
        "embed_dim": heads * width,
        "num_heads": heads,
        "depth": config.get("num_layers", 28),
        "condition": "class",
        "condition_size": config.get("num_embeds_ada_norm", 1000),
        "condition_drop": 0.1,  # their table always has a row for no class
        "time_endpoint": True,
    }


def _physicsnemo(config: Mapping[str, Any]) -> Call | None:
    """``args.json`` of a ``.mdlus`` file: nested models stand beside one another under their paths."""
    outer = config.get("args")
    if not isinstance(outer, Mapping):
        return None
    path = [outer, outer.get("__physicsnemo.Module__.model"), outer.get("__physicsnemo.Module__.model.model")]
    made = [(part["__name__"], part["__args__"]) for part in path if isinstance(part, Mapping) and "__args__" in part]
    names, given = tuple(name for name, _ in made), [arguments for _, arguments in made]
    if names == ("Transolver",):
        return _transolver(given[0])
    if names == ("DiT",):
        size = {"in_chans": given[0].get("in_channels"), "out_chans": given[0].get("out_channels")}
        condition = {"condition": "vector", "condition_size": given[0].get("condition_dim")}
        return _dit("DiT", given[0], {**size, **(condition if given[0].get("condition_dim") else {})})
    if names == ("EDMPreconditioner", "ConcatConditionWrapper", "DiT") and not given[2].get("condition_dim"):
        state = given[2]["out_channels"]
        size = {"in_chans": state, "state_chans": given[2]["in_channels"] - state}
        return _dit("StormScope", given[2], {**size, "sigma_data": given[0].get("sigma_data", 0.5)})
    return None


def _transolver(given: Mapping[str, Any]) -> Call | None:
    if given.get("use_te") or given.get("act", "gelu") != "gelu" or given.get("unified_pos"):
        return None
    named = {ours: given[theirs] for theirs, ours in _TRANSOLVER.items() if given.get(theirs) is not None}
    return "Transolver", {**named, "slice_eps": 0.01}


def _dit(name: str, given: Mapping[str, Any], size: Mapping[str, Any]) -> Call | None:
    attention = dict(given.get("attn_kwargs") or {})
    plain = all(given.get(key, value) == value for key, value in _DIT_AS_OURS.items())
    if not plain or not set(attention) <= {"attn_kernel", "qk_norm"}:
        return None
    windowed = given.get("attention_backend") == "natten2d"
    return name, {
        **size,
        "img_size": given["input_size"],
        "patch_size": given["patch_size"],
        "embed_dim": given["hidden_size"],
        "depth": given["depth"],
        "num_heads": given["num_heads"],
        "mlp_ratio": given.get("mlp_ratio", 4.0),
        "kernel_size": attention.get("attn_kernel") if windowed else None,
        "qk_norm": attention.get("qk_norm", False),
        "mask_token": given.get("use_nan_mask_tokens", False),
        "pos_embed": "learned",
        "time_freq_dim": (given.get("conditioning_embedder_kwargs") or {}).get("freq_embed_dim", given["hidden_size"]),
        "time_hidden_dim": 2 * given["hidden_size"],
    }


READERS: tuple[Callable[[Mapping[str, Any]], Call | None], ...] = (_timm, _diffusers, _physicsnemo)
