"""The calculus under the tables: names with blanks, tensors read late, rules both ways, prefixes, collisions."""

import itertools

import pytest
import torch

from dpzoo.models import DiT, ViT
from dpzoo.weights import TensorSource, WeightsMismatchError
from dpzoo.weights.dialects import find_dialect, get_dialect, list_dialects
from dpzoo.weights.dialects.convert import to_ours, to_theirs
from dpzoo.weights.dialects.lazy import Computed, Constant, Joined, Part, Permuted, Same, Stored, split, summed
from dpzoo.weights.dialects.prefixes import spellings
from dpzoo.weights.dialects.rule import constant_here, copies, dropped, merged, parted, permuted, refused, rename
from dpzoo.weights.dialects.template import fill, match, matches
from tests.weights.dialect_checks import converted

A, B = torch.arange(24.0).view(4, 3, 2), -torch.arange(12.0).view(2, 3, 2)


class Watched(TensorSource):
    """A source that remembers how many numbers were read."""

    count = 0

    def read(self, name, slab=None):
        found = super().read(name, slab)
        self.count += found.numel()
        return found


def stored(**tensors: torch.Tensor) -> dict[str, Stored]:
    source = Watched(tensors)
    return {name: Stored(source, name) for name in tensors}


# ---------------------------------------------------------------------- names
def test_templates():
    assert match("blocks.{i}.attn.{p}", "blocks.12.attn.bias") == {"i": "12", "p": "bias"}
    assert match("enc.{r}x{r}_{rest}", "enc.16x16_down.a.b") == {"r": "16", "rest": "down.a.b"}
    for template, name in (
        ("blocks.{i}.attn.{p}", "blocks.x.attn.bias"),
        ("blocks.{i}.attn.{p}", "blocks.1.attn.gamma"),
        ("enc.{r}x{r}_conv", "enc.16x8_conv"),
        ("a.b", "aXb"),
        ("a", "ab"),
    ):
        assert not matches(template, name), name
    assert matches("plain", "plain")
    assert fill("a{i}.{p}", {"i": "3", "p": "weight"}) == "a3.weight"


def test_prefixes_are_removed_anywhere_and_where_all_share_them():
    names = ("module.model._orig_mod.a._fsdp_wrapped_module.b", "model.a._checkpoint_wrapped_module.c", "sigma_data")
    assert [list(s.values()) for s in spellings(names)] == [
        ["model.a.b", "model.a.c", "sigma_data"],
        ["a.b", "a.c", "sigma_data"],
    ]
    mixed = ("backbone.a", "neck.b")
    assert [list(s.values()) for s in spellings(mixed)] == [list(mixed)]
    assert list(list(spellings(("teacher.backbone.x", "teacher.dino_head.y")))[-1].values()) == ["x", "dino_head.y"]


# ---------------------------------------------------------------------- tensors that are read late
def lazies():
    t = stored(a=A, b=B)
    a, b = t["a"], t["b"]
    return {
        "stored": (a, A),
        "permuted": (Permuted(a, (2, 0, 1)), A.permute(2, 0, 1)),
        "part": (Part(a, 1, 1, 2), A[:, 1:3]),
        "joined": (Joined((a, b, a)), torch.cat([A, B, A])),
        "joined later": (Joined((a, a), dim=1), torch.cat([A, A], 1)),
        "nested": (Permuted(Part(Joined((b, a)), 0, 1, 4), (1, 2, 0)), torch.cat([B, A])[1:5].permute(1, 2, 0)),
        "constant": (Constant((3, 2), torch.float64, 1.0), torch.ones(3, 2, dtype=torch.float64)),
        "copies": (Same((a, a)), A),
        "one copy": (Same((b,)), B),
        "computed": (Computed((4, 3, 2), (a,), lambda t: 2 * t), 2 * A),
        "summed": (summed(a, Constant((4, 3, 2), torch.float32), Part(b, 0, 0, 1)), A + B[:1]),
    }


@pytest.mark.parametrize("name", lazies())
def test_a_slab_is_the_slab_of_the_whole(name: str):
    lazy, expected = lazies()[name]
    assert (lazy.shape, lazy.dtype) == (tuple(expected.shape), expected.dtype)
    assert torch.equal(lazy.read(), expected)
    ranges = [[slice(0, n), slice(1, n), slice(0, max(0, n - 1)), slice(n, n), slice(None)] for n in expected.shape]
    for slab in itertools.product(*ranges):
        assert torch.equal(lazy.read(slab), expected[slab]), slab
    assert torch.equal(lazy.read((slice(0, 1),)), expected[:1])


def test_a_slab_reads_no_more_than_itself():
    source = Watched({"a": A, "b": B})
    a, b = Stored(source, "a"), Stored(source, "b")
    Permuted(Joined((a, b)), (1, 0, 2)).read((slice(0, 1), slice(3, 5)))
    assert source.count == 4
    assert Joined((a, b)).sliceable
    assert not Same((a, a)).sliceable
    assert not Joined((a, Same((b, b)))).sliceable


def test_halves_of_half_precision_join_in_the_wider_dtype():
    t = stored(a=A.half(), b=B)
    joined = Joined((t["a"], t["b"]))
    assert joined.dtype is torch.float32 is joined.read().dtype is joined.read((slice(0, 1),)).dtype


def test_copies_that_differ_and_parts_that_do_not_divide():
    t = stored(a=A, b=A + 1)
    with pytest.raises(WeightsMismatchError, match="a and b should hold the same values, but differ"):
        Same((t["a"], t["b"])).read()
    with pytest.raises(WeightsMismatchError, match="not 3 equal parts along dim 0"):
        split(t["a"], 3)


# ---------------------------------------------------------------------- rules
RULES = (
    rename("old.{i}.{p}", "new.{i}.{p}"),
    merged(("q.{i}", "k.{i}"), "qk.{i}", dim=1),
    parted("whole", ("left", "right")),
    permuted("t", "t", (1, 2, 0)),
    copies(("c.0", "c.1", "c.2"), "c"),
    dropped("gone.{rest}", "never used"),
)
THEIRS = {
    "old.0.weight": A, "old.1.weight": B, "q.5": A, "k.5": A + 1, "whole": A, "t": A, "c.0": B, "c.2": B,
    "gone.x": A, "as_it_is": B,
}  # fmt: skip


def test_rules_there():
    found = to_ours(stored(**THEIRS), RULES)
    expected = {
        "new.0.weight": A, "new.1.weight": B, "qk.5": torch.cat([A, A + 1], 1), "left": A[:2], "right": A[2:],
        "t": A.permute(1, 2, 0), "c": B, "as_it_is": B,
    }  # fmt: skip
    assert {n: t.read().tolist() for n, t in found.tensors.items()} == {n: t.tolist() for n, t in expected.items()}
    assert found.unknown == ["as_it_is"]
    changes = {(c.kind, c.theirs, c.ours) for c in found.changes}
    assert ("merged", ("q.5", "k.5"), ("qk.5",)) in changes
    assert ("split", ("whole",), ("left", "right")) in changes
    assert ("merged", ("c.0", "c.2"), ("c",)) in changes
    assert ("dropped", ("gone.x",), ()) in changes
    assert len(changes) == 6  # the permuted one keeps its name


def test_rules_and_back():
    ours = to_ours(stored(**THEIRS), RULES).tensors
    back = to_theirs(ours, RULES).tensors
    expected = {**THEIRS, "c.1": B}
    del expected["gone.x"]
    assert {n: t.read().tolist() for n, t in back.items()} == {n: t.tolist() for n, t in expected.items()}


def test_an_incomplete_group_is_left_alone():
    found = to_ours(stored(**{"q.5": A}), RULES)
    assert found.unknown == ["q.5"]


def test_two_tensors_with_one_name():
    both = stored(**{"old.1.weight": A, "new.1.weight": B})
    with pytest.raises(WeightsMismatchError, match=r"'old\.1\.weight' and 'new\.1\.weight' both are 'new\.1\.weight'"):
        to_ours(both, RULES)


def test_refusals_and_constants():
    with pytest.raises(WeightsMismatchError, match=r"'x\.3' needs wheels"):
        to_ours(stored(**{"x.3": A}), (refused("x.{i}", "wheels"),))
    rules = (constant_here("one", 1.0, "they have none"),)
    assert not to_theirs(stored(one=torch.ones(2)), rules).tensors
    with pytest.raises(WeightsMismatchError, match="one must be 1 everywhere"):
        to_theirs(stored(one=torch.tensor([1.0, 2.0])), rules)


# ---------------------------------------------------------------------- finding
SMALL = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "depth": 1, "num_heads": 2, "num_classes": 3}


def test_wrapped_files_load_and_colliding_ones_name_both():
    model = ViT(**SMALL)
    state = model.state_dict()
    wrapped = {
        f"module.backbone.{n.replace('blocks.0', 'blocks.0._checkpoint_wrapped_module')}": t for n, t in state.items()
    }
    view = converted(TensorSource(wrapped), model)
    assert set(view.names()) == set(state)
    change = next(c for c in view.changes if c.ours == ("blocks.0.norm1.bias",))
    assert (change.kind, change.theirs) == (
        "renamed",
        ("module.backbone.blocks.0._checkpoint_wrapped_module.norm1.bias",),
    )
    twice = TensorSource({**wrapped, **{f"backbone.{n}": t for n, t in state.items()}}, origin="two.pt")
    with pytest.raises(WeightsMismatchError, match=r"two\.pt: 'module\.backbone\.cls_token' and 'backbone\.cls_token'"):
        converted(twice, model)


def test_a_model_with_a_part_called_module_keeps_its_names():
    model = torch.nn.ModuleDict({"module": torch.nn.Linear(2, 2)})
    assert set(converted(TensorSource(model.state_dict()), model).names()) == {"module.weight", "module.bias"}


def test_other_architectures():
    model = ViT(**SMALL)
    names = ("blocks.0.adaLN_modulation.1.weight", "x_embedder.proj.weight")
    with pytest.raises(
        WeightsMismatchError, match=r"another architecture \(facebookresearch DiT\); the model is a ViT"
    ):
        find_dialect(names, dict.fromkeys(names, (1, 1)), None, model)
    small = DiT(8, 4, 3, embed_dim=8, depth=1, num_heads=2)
    for wrong, right, kind in ((small, model, "ViT"), (model, small, "DiT")):  # they share many names
        with pytest.raises(WeightsMismatchError, match=rf"another architecture \(.*\); the model is a {kind}"):
            converted(TensorSource(wrong.state_dict()), right)
    with pytest.raises(WeightsMismatchError, match="no name in the file is one of the ViT's"):
        find_dialect(("a", "b"), {"a": (1,), "b": (2,)}, None, model)


def test_dialects_by_name():
    model = ViT(**SMALL)
    state = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    assert find_dialect(state, state, None, model, dialect="timm").name == "timm ViT"
    assert get_dialect("timm ViT", model).name == "timm ViT"
    assert set(list_dialects()) >= {"dpzoo", "timm ViT", "diffusers DiT", "physicsnemo Transolver", "MONAI UNet"}
    with pytest.raises(ValueError, match="no dialect is named 'tim VIT'; did you mean 'timm ViT'"):
        get_dialect("tim VIT", model)
    with pytest.raises(WeightsMismatchError, match="diffusers has no names for a ViT"):
        get_dialect("diffusers", model)
