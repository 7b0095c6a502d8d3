"""Files of EDM's "song-unet" (DDPM++, NCSN++) and PhysicsNeMo's ``SongUNet``, whose names tell the resolution."""

from __future__ import annotations

from dpzoo.weights.dialects.frequencies import with_frequencies
from dpzoo.weights.dialects.rule import Rule, dropped, refused, rename, same
from dpzoo.weights.dialects.steps import Features
from dpzoo.weights.dialects.template import match
from dpzoo.weights.dialects.upstream import Context, Upstream
from dpzoo.weights.source import WeightsMismatchError

STEPS = (Features({"map_label.{p}": "a condition vector (build it with label_dim=...)"}),)
OLD_ATTENTION = {"norm2": "norm", "qkv": "qkv", "proj": "proj"}  # EDM's names in a block -> below "attn." here


def _resolutions(context: Context) -> list[int]:
    """Of the levels, the finest first."""
    names = [match("enc.{r}x{r}_{rest}", name) for name in context.theirs]
    found = sorted({int(blanks["r"]) for blanks in names if blanks is not None}, reverse=True)
    levels = context.count("encoder.{i}.blocks.{b}.conv0.weight")
    if found and len(found) != levels:
        raise WeightsMismatchError(f"the file has levels of {found} points, the model {levels} levels")
    if not found and (context.resolution is None or context.resolution % 2 ** (levels - 1)):
        raise WeightsMismatchError(
            f"names of EDM tell the resolution of each of the {levels} levels: pass resolution=, a multiple of "
            f"{2 ** (levels - 1)}"
        )
    return found or [(context.resolution or 0) >> level for level in range(levels)]


def _rules(context: Context) -> tuple[Rule, ...]:
    sizes = _resolutions(context)
    finest, coarsest = (f"{r}x{r}_" for r in (sizes[0], sizes[-1]))
    pairs = {
        f"enc.{finest}conv": "encoder.0.conv",
        f"dec.{finest}aux_norm": "out_norm",
        f"dec.{finest}aux_conv": "out_conv",
        f"dec.{coarsest}in{{i}}": "middle.{i}",
    }
    for level, r in enumerate(sizes):
        pairs[f"enc.{r}x{r}_down"] = f"encoder.{level}.down"
        pairs[f"enc.{r}x{r}_aux_residual"] = f"encoder.{level}.residual"
        pairs[f"enc.{r}x{r}_block{{i}}"] = f"encoder.{level}.blocks.{{i}}"
        pairs[f"dec.{r}x{r}_up"] = f"decoder.{level}.up"
        pairs[f"dec.{r}x{r}_block{{i}}"] = f"decoder.{level}.blocks.{{i}}"
    old = [
        rename(f"{theirs}.{part}.{{p}}", f"{ours}.attn.{new}.{{p}}", both_ways=False)
        for theirs, ours in pairs.items()
        for part, new in OLD_ATTENTION.items()
    ]
    layer = "map_layer0.weight"
    noise = [] if context.has("map_noise.freqs") else [with_frequencies(layer, layer, "map_noise.freqs", endpoint=True)]
    return (
        *old,
        *(rename(f"{theirs}.{{rest}}", f"{ours}.{{rest}}") for theirs, ours in pairs.items()),
        *noise,
        *same("map_noise.freqs", "map_layer{i}.{p}", "map_label.{p}"),
        dropped("map_augment.{rest}", "augmentation labels, only used in training"),
        refused("pos_embd", "a learned position embedding (SongUNetPosEmbd)"),
    )


UPSTREAMS = (
    Upstream(
        "EDM SongUNet",
        "DiffusionUNet",
        present=("enc.{r}x{r}_conv.weight", "map_layer0.weight"),
        rules=_rules,
        nest="model.",
    ),
)
