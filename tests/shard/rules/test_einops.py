"""einops patterns of vision models: patches, windows, heads, reductions; also with H and W cut on a 2-D mesh."""

from einops import pack, rearrange, reduce, repeat, unpack
from einops.layers.torch import Rearrange, Reduce

from dpzoo.testing import OpCase, op_test

IMAGE = (2, 3, 12, 8)
TOKENS = (2, 24, 12)


def case(name, fn, shape=IMAGE, shard=2, covers=("reshape",), **options):
    options = {
        "ranks": (1, 2, 3, 4),
        "subgroups": False,
        "layouts": ("even", "uneven", "empty"),
        "mesh2d": (2, 3),
    } | options
    return OpCase(name, fn=fn, shape=shape, shard=shard, covers=covers, **options)


def patchify(x):
    return rearrange(x, "b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2)


def unpatchify(t):
    return rearrange(t, "b (h w) (p q c) -> b c (h p) (w q)", h=6, w=4, p=2, q=2, c=3)


def windows(x):
    return rearrange(x, "b c (h p) (w q) -> (b h w) (p q) c", p=4, q=4)


def unwindows(t):
    return rearrange(t, "(b h w) (p q) c -> b c (h p) (w q)", h=3, w=2, p=4, q=4)


def packed(x):
    flat, shapes = pack([x, x[:, 0]], "b *")
    return flat, unpack(flat * 2, shapes, "b *")


CASES = [
    case("patchify", patchify, subgroups=True),
    case("patchify, width cut", patchify, shard=3, mesh2d=None),
    case("un-patchify", unpatchify, shape=TOKENS, shard=1, mesh2d=None),
    case("patchify and back", lambda x: unpatchify(patchify(x) ** 2)),
    case("window partition", windows),
    case("window partition, width cut", windows, shard=3, mesh2d=None),
    case("windows and back", lambda x: unwindows(windows(x) ** 2)),
    case("one window deep", lambda x: rearrange(x, "b c (h p) w -> b h (p w) c", p=12), gathers=True),
    case("large batch", patchify, shape=(5, 3, 12, 8)),
    case("channels last", lambda x: rearrange(x, "b c h w -> b h w c"), mesh2d=(3, 2)),
    case("batch with rows", lambda x: rearrange(x, "b c h w -> (b h) w c")),
    case("columns with batch", lambda x: rearrange(x, "b c h w -> (w b) h c")),
    case("flatten all but batch", lambda x: rearrange(x, "b ... -> b (...)"), mesh2d=None),
    case(
        "split heads",
        lambda x: rearrange(x, "b n (three heads d) -> three b heads n d", three=3, heads=2),
        shape=TOKENS,
        shard=1,
        mesh2d=(0, 1),
    ),
    case(
        "split heads, features cut",
        lambda x: rearrange(x, "b n (heads d) -> b heads n d", heads=4),
        shape=TOKENS,
        shard=2,
        mesh2d=(1, 2),
    ),
    case(
        "merge heads",
        lambda x: rearrange(x, "b heads n d -> b n (heads d)"),
        shape=(2, 4, 12, 3),
        shard=2,
        mesh2d=(1, 2),
    ),
    case(
        "reduce",
        lambda x: [reduce(x, "b c (h 2) (w 2) -> b c h w", op) for op in ("mean", "max", "sum", "min")],
        covers=("mean", "amax"),
    ),
    case(
        "reduce over a cut dim",
        lambda x: [reduce(x, "b c h w -> b c", op) for op in ("mean", "max", "sum", "prod")],
        covers=("mean", "amax"),
    ),
    case("reduce all", lambda x: reduce(x, "b c h w -> ", "mean"), covers=("mean",)),
    case(
        "repeat",
        lambda x: (
            repeat(x, "b c h w -> b c (h 2) (w 3)"),
            repeat(x, "b c h w -> b r c h w", r=2),
            repeat(x, "b c h w -> (r b) c h w", r=3),
        ),
        covers=("expand", "reshape"),
    ),
    case(
        "layers",
        lambda x: (Rearrange("b c (h p) w -> b h w (p c)", p=2)(x), Reduce("b c h (w q) -> b c h w", "mean", q=4)(x)),
        covers=("mean",),
    ),
    case("lists", lambda x: rearrange([x, x * 2], "n b c h w -> b (n c) h w"), covers=("stack",)),
    case("pack and unpack", packed, mesh2d=None),
]

test_einops = op_test(CASES)
