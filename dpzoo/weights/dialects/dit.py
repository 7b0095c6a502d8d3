"""Files of diffusion transformers: the authors' release (our names), diffusers, PhysicsNeMo.

Queries, keys and values, and shift, scale and gate, stand in the same order everywhere; no row is permuted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from dpzoo.weights.dialects.frequencies import with_frequencies
from dpzoo.weights.dialects.lazy import Constant, summed
from dpzoo.weights.dialects.noted import module_arguments
from dpzoo.weights.dialects.positions import Positions
from dpzoo.weights.dialects.rule import Rule, computed_there, constant_here, copies, dropped, merged, refused, rename
from dpzoo.weights.dialects.steps import Agreement, Features, Filled, KeptIfMissing
from dpzoo.weights.dialects.upstream import Context, Upstream

FEATURES = {
    "blocks.{i}.attn.q_norm.weight": "a norm of queries and keys (build it with qk_norm=True)",
    "blocks.{i}.attn.qkv.bias": "a bias of queries, keys and values (build it with qkv_bias=True)",
    "blocks.{i}.attn.mask_token": "mask tokens (build it with mask_token=True)",
    "t_embedder.mlp.{i}.{p}": "a time (build it with time=True)",
    "y_embedder.embedding_table.weight": "a class (build it with condition='class')",
    "pos_embed": "an added position embedding (build it with pos_embed='learned' or 'sincos')",
}

STEPS = (
    Features(FEATURES),
    Positions("x_embedder"),
    KeptIfMissing("sigma_data", "the file holds a bare network"),
)


def _preconditioner(context: Context) -> tuple[Rule, ...]:
    if context.inner:
        return ()  # one name on both sides
    return (dropped("sigma_data", "of a preconditioner; the model is a bare network"),)


# ---------------------------------------------------------------------- diffusers
_BLOCK = "transformer_blocks.{i}."


def _has_fixed_positions(context: Context) -> bool:
    return context.network is not None and "pos_embed" in dict(context.network.named_buffers(recurse=False))


def _endpoint(network: nn.Module | None) -> bool:
    """Is the lowest frequency of the time 1 / 10000 itself?"""
    return bool(getattr(getattr(network, "t_embedder", None), "endpoint", False))


def _diffusers(context: Context) -> tuple[Rule, ...]:
    blocks = range(context.count("blocks.{i}.adaLN_modulation.1.weight"))

    told = "" if _endpoint(context.network) else "built with time_endpoint=True the model would give diffusers' numbers"

    def in_every_block(name: str) -> list[str]:
        return [f"transformer_blocks.{i}.norm1.emb.{name}" for i in blocks]

    return (
        rename("pos_embed.proj.{p}", "x_embedder.proj.{p}"),
        rename("pos_embed.pos_embed", "pos_embed", both_ways=False),  # computed, and not saved any more
        *([computed_there("pos_embed", "computed")] if _has_fixed_positions(context) else []),
        copies(in_every_block("timestep_embedder.linear_1.{p}"), "t_embedder.mlp.0.{p}", told),
        copies(in_every_block("timestep_embedder.linear_2.{p}"), "t_embedder.mlp.2.{p}"),
        copies(in_every_block("class_embedder.embedding_table.weight"), "y_embedder.embedding_table.weight"),
        rename(_BLOCK + "norm1.linear.{p}", "blocks.{i}.adaLN_modulation.1.{p}"),
        merged([f"{_BLOCK}attn1.to_{part}.{{p}}" for part in "qkv"], "blocks.{i}.attn.qkv.{p}"),
        rename(_BLOCK + "attn1.to_out.0.{p}", "blocks.{i}.attn.proj.{p}"),
        rename(_BLOCK + "ff.net.0.proj.{p}", "blocks.{i}.mlp.fc1.{p}"),
        rename(_BLOCK + "ff.net.2.{p}", "blocks.{i}.mlp.fc2.{p}"),
        rename("proj_out_1.{p}", "final_layer.adaLN_modulation.1.{p}"),
        rename("proj_out_2.{p}", "final_layer.linear.{p}"),
        refused(_BLOCK + "attn2.{rest}", "cross attention"),
        refused("adaln_single.{rest}", "one modulation for all blocks (PixArt)"),
        *_preconditioner(context),
    )


# ---------------------------------------------------------------------- PhysicsNeMo
GLOBAL = "none (all tokens attend to all)"
FIRST = "mlp.0.weight"
_TIME = "conditioning_embedder.t_embedder."
_CONDITION = "conditioning_embedder.cond_embedder.weight"


def _condition(context: Context) -> tuple[Rule, ...]:
    """Their linear layer of the condition has no bias; ours is added to the time's last one, which is the same."""
    if not context.has("y_embedder.bias"):
        return (refused(_CONDITION, "a condition vector (build it with condition='vector', condition_size=...)"),)
    last = "mlp.2.bias"
    return tuple(
        Rule(
            (_CONDITION, time + last),
            ("y_embedder.weight", "y_embedder.bias", "t_embedder." + last),
            lambda weight, bias: (weight, Constant(bias.shape, bias.dtype), bias),
            lambda weight, own, bias: (weight, summed(bias, own)),
            both_ways=time == _TIME,
        )
        for time in (_TIME, "t_embedder.")
    )


def _physicsnemo(context: Context) -> tuple[Rule, ...]:
    ours, endpoint = "t_embedder." + FIRST, _endpoint(context.network)
    return (
        rename("tokenizer.pos_embed", "pos_embed"),
        rename("tokenizer.x_embedder.proj.{p}", "x_embedder.proj.{p}"),
        *_condition(context),
        with_frequencies(_TIME + FIRST, ours, _TIME + "freqs", endpoint),
        with_frequencies(ours, ours, "t_embedder.freqs", endpoint, both_ways=False),  # file version 0.1.0
        rename("t_embedder.mlp.{j}.{p}", "t_embedder.mlp.{j}.{p}", both_ways=False),
        rename(_TIME + "mlp.{j}.{p}", "t_embedder.mlp.{j}.{p}"),
        *_physicsnemo_attention(context),
        rename("blocks.{i}.linear.layers.0.{p}", "blocks.{i}.mlp.fc1.{p}"),
        rename("blocks.{i}.linear.layers.2.{p}", "blocks.{i}.mlp.fc2.{p}"),
        rename("blocks.{i}.linear.layers.3.{p}", "blocks.{i}.mlp.fc2.{p}", both_ways=False),  # with dropout between
        rename("blocks.{i}.adaptive_modulation.1.{p}", "blocks.{i}.adaLN_modulation.1.{p}"),
        rename("detokenizer.proj_layer.output_projection.{p}", "final_layer.linear.{p}"),
        rename("detokenizer.proj_layer.adaptive_modulation.1.{p}", "final_layer.adaLN_modulation.1.{p}"),
        refused(
            "detokenizer.conv_head.{rest}", "a convolution behind the patches (detokenizer 'proj_reshape_2d_conv')"
        ),
        refused(
            "conditioning_embedder.map_{rest}", "time and condition embedded together (conditioning_embedder 'edm')"
        ),
        *_preconditioner(context),
    )


def _physicsnemo_attention(context: Context) -> tuple[Rule, ...]:
    """Neighborhood attention, or timm's one level deeper; the former's norms of queries and keys have no weights."""
    windowed = context.network is not None and _window(context.network) != GLOBAL
    rules = [
        rename(
            f"blocks.{{i}}.attention.{where}{part}", f"blocks.{{i}}.attn.{part}", both_ways=windowed == (where == "")
        )
        for where in ("", "attn_op.")
        for part in ("qkv.{p}", "proj.{p}", "mask_token")
    ]
    for which in ("q_norm", "k_norm"):
        ours = f"blocks.{{i}}.attn.{which}."
        rules.append(
            rename(f"blocks.{{i}}.attention.attn_op.{which}.{{p}}", ours + "{p}", both_ways=not windowed),
        )
        if windowed:
            why = "PhysicsNeMo's norm of queries and keys has no weights"
            rules += [constant_here(ours + "weight", 1.0, why), constant_here(ours + "bias", 0.0, why)]
    return tuple(rules)


def _attention(network: nn.Module) -> Any:
    return network.get_submodule("blocks.0.attn")


def _as_numbers(value: Any) -> Any:
    """One int for all dims where they are equal."""
    return value[0] if isinstance(value, list | tuple) and len(set(value)) == 1 else value


def _window(network: nn.Module) -> Any:
    size = _attention(network).kernel_size
    return GLOBAL if size is None else _as_numbers(size)


def _noted(name: str) -> Callable[[Mapping[str, Any]], Any]:
    """An argument of PhysicsNeMo's DiT."""
    return lambda config: (module_arguments(config, "DiT") or {}).get(name)


def _noted_backend(config: Mapping[str, Any]) -> str | None:
    backend = _noted("attention_backend")(config)
    return None if backend is None else str(backend)


def _noted_attention(name: str, default: Any) -> Callable[[Mapping[str, Any]], Any]:
    """An argument of its attention."""

    def read(config: Mapping[str, Any]) -> Any:
        if _noted_backend(config) is None:
            return None
        given = _noted("attn_kwargs")(config) or {}
        return _as_numbers({**given, **(given.get("na2d_kwargs") or {})}.get(name, default))

    return read


def _noted_window(config: Mapping[str, Any]) -> Any:
    on_grid = (_noted_backend(config) or "natten2d").startswith("natten2d")
    return _noted_attention("attn_kernel", 3)(config) if on_grid else GLOBAL


def _noted_rotary(config: Mapping[str, Any]) -> bool | None:
    backend = _noted_backend(config)
    return None if backend is None else backend.endswith("_rope")


def _has_query_norm(config: Mapping[str, Any]) -> bool:
    return bool(_noted_attention("qk_norm", False)(config))


UPSTREAMS = (
    Upstream(
        "facebookresearch DiT",
        "DiT",
        present=("blocks.{i}.adaLN_modulation.1.weight", "x_embedder.proj.weight"),
        rules=_preconditioner,
        own_names=True,
    ),
    Upstream(
        "diffusers DiT",
        "DiT",
        present=("transformer_blocks.{i}.attn1.to_q.weight", "pos_embed.proj.weight"),
        rules=_diffusers,
        steps=(
            Agreement("num_attention_heads", lambda c: c.get("num_attention_heads"), lambda n: _attention(n).num_heads),
        ),
    ),
    Upstream(
        "physicsnemo DiT",
        "DiT",
        present=("tokenizer.x_embedder.proj.weight",),
        rules=_physicsnemo,
        steps=(
            Agreement("num_heads", _noted("num_heads"), lambda n: _attention(n).num_heads),
            Agreement("attn_kernel", _noted_window, _window),
            Agreement("dilation", _noted_attention("dilation", 1), lambda n: _as_numbers(_attention(n).dilation)),
            Agreement("rotary positions", _noted_rotary, lambda n: getattr(n, "rotary", None) is not None),
            Agreement("qk_norm", _noted_attention("qk_norm", False), lambda n: hasattr(_attention(n).q_norm, "weight")),
            *(
                Filled(f"blocks.{{i}}.attn.{which}_norm.{part}", value, "a norm without weights", _has_query_norm)
                for which in "qk"
                for part, value in (("weight", 1.0), ("bias", 0.0))
            ),
        ),
        nest="model.model.",
    ),
)
