"""Files of U-Nets: nnU-Net's, and MONAI's two."""

from __future__ import annotations

from dpzoo.weights.dialects.rule import Rule, copies, dropped, refused, rename
from dpzoo.weights.dialects.steps import Features, Head
from dpzoo.weights.dialects.upstream import Context, Upstream

STEPS = (
    Features({"deep_heads.{i}.{p}": "deep supervision (build it with deep_supervision=True)"}),
    Head("head."),
    Head("deep_heads."),
)
UNIT = {"conv": "conv", "norm": "adn.N", "act": "adn.A"}  # ours -> MONAI's


# ---------------------------------------------------------------------- nnU-Net
def _nnunet(context: Context) -> tuple[Rule, ...]:
    """nnU-Net names each tensor of a stage twice, and the encoder once more inside the decoder."""
    last = context.count("decoder.{i}.up.weight") - 1
    units = (("conv", 0), ("norm", 1))  # and their places in all_modules, without dropout
    rules = [
        copies(
            [
                f"{root}encoder.stages.{{s}}.0.convs.{{c}}.{part}.{{rest}}"
                for root in ("", "decoder.")
                for part in (unit, f"all_modules.{at}")
            ],
            f"encoder.{{s}}.convs.{{c}}.{unit}.{{rest}}",
        )
        for unit, at in units
    ]
    rules += [
        copies(
            [f"decoder.stages.{{s}}.convs.{{c}}.{part}.{{rest}}" for part in (unit, f"all_modules.{at}")],
            f"decoder.{{s}}.convs.{{c}}.{unit}.{{rest}}",
        )
        for unit, at in units
    ]
    deep = "decoder.seg_layers.{i}.{p}"
    return (
        refused("encoder.stages.{s}.blocks.{rest}", "residual encoder blocks (ResEnc)"),
        refused("encoder.stem.{rest}", "residual encoder blocks (ResEnc)"),
        *rules,
        rename("decoder.transpconvs.{i}.{p}", "decoder.{i}.up.{p}"),
        rename(f"decoder.seg_layers.{last}.{{p}}", "head.{p}"),
        rename(deep, "deep_heads.{i}.{p}")
        if context.has("deep_heads.{i}.{p}")
        else dropped(deep, "deep supervision, which the model is built without"),
    )


# ---------------------------------------------------------------------- MONAI's BasicUNet
def _monai_basic(context: Context) -> tuple[Rule, ...]:
    decoders = context.count("decoder.{i}.up.weight")
    rules = [rename("final_conv.{rest}", "head.{rest}")]
    for ours, theirs in UNIT.items():
        unit = f"conv_{{c}}.{theirs}.{{rest}}"
        rules.append(rename(f"conv_0.{unit}", f"encoder.0.convs.{{c}}.{ours}.{{rest}}"))
        rules.append(rename(f"down_{{s}}.convs.{unit}", f"encoder.{{s}}.convs.{{c}}.{ours}.{{rest}}"))
        for i in range(decoders):
            rules.append(rename(f"upcat_{decoders - i}.convs.{unit}", f"decoder.{i}.convs.{{c}}.{ours}.{{rest}}"))
    rules += [rename(f"upcat_{decoders - i}.upsample.deconv.{{p}}", f"decoder.{i}.up.{{p}}") for i in range(decoders)]
    return tuple(rules)


# ---------------------------------------------------------------------- MONAI's UNet
def _monai_residual(context: Context) -> tuple[Rule, ...]:
    """MONAI nests the stages: stage i stands below i times "1.submodule."."""
    down = context.count("decoder.{i}.up.conv.weight")
    residual = context.has("decoder.{i}.residual_unit.convs.{c}.conv.weight")
    rules = []
    for i in range(down + 1):
        stage = "model." + "1.submodule." * i
        into = stage if i == down else stage + "0."
        rules.append(rename(into + "residual.{p}", f"encoder.{i}.residual.{{p}}"))
        for ours, theirs in UNIT.items():
            end = f"{theirs}.{{rest}}"
            rules.append(rename(f"{into}conv.unit{{c}}.{end}", f"encoder.{i}.convs.{{c}}.{ours}.{{rest}}"))
            if not residual:
                rules.append(rename(into + end, f"encoder.{i}.{ours}.{{rest}}"))
            if i < down:
                at = down - 1 - i
                up = stage + ("2.0." if residual else "2.")
                rules.append(rename(up + end, f"decoder.{at}.up.{ours}.{{rest}}"))
                block = f"decoder.{at}.residual_unit.convs.{{c}}.{ours}.{{rest}}"
                rules.append(rename(f"{stage}2.1.conv.unit{{c}}.{end}", block))
    return tuple(rules)


UPSTREAMS = (
    Upstream("nnU-Net PlainConvUNet", "UNet", present=("encoder.stages.{s}.0.convs.{c}.conv.weight",), rules=_nnunet),
    Upstream("nnU-Net ResidualEncoderUNet", "UNet", present=("encoder.stages.{s}.blocks.{rest}",), rules=_nnunet),
    Upstream("MONAI BasicUNet", "UNet", present=("conv_0.conv_0.conv.weight", "final_conv.weight"), rules=_monai_basic),
    Upstream("MONAI UNet", "ResidualUNet", present=("model.1.submodule.{rest}",), rules=_monai_residual),
)
