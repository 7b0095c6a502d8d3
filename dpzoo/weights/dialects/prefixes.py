"""What wrappers put before names: removed anywhere in a name, or where all names share it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dpzoo.weights.source import WeightsMismatchError

# Parts of a dotted name that come from DDP, torch.compile, FSDP and activation checkpointing.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
# A model's place in the object that was saved, removed when all names lie in it.
SHARED = ("model.", "backbone.", "encoder.", "student.", "teacher.", "net.", "network.")
CONSTANT = "sigma_data"
# Names that may stand beside a shared prefix: a preconditioner's constant, the projection heads of self-supervision.
BESIDE = (CONSTANT, "head.mlp.", "head.last_layer.", "dino_head.", "ibot_head.")


def unwrapped(name: str) -> str:
    """The name without wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def clean_names(names: Sequence[str], new_name: Mapping[str, str]) -> dict[str, str]:
    """``{name: new name}`` for all names.

    Raises:
        WeightsMismatchError: two names become one.
    """
    seen: dict[str, str] = {}
    for name in names:
        new = new_name[name]
        if new in seen:
            raise WeightsMismatchError(
                f"{seen[new]!r} and {name!r} are both {new!r} once the prefixes of wrappers are removed; "
                "the file holds two sets of weights: choose one"
            )
        seen[new] = name
    return dict(new_name)


def spellings(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """``{name: shorter name}``: without wrappers, then without one more shared prefix at a time."""
    current = {name: unwrapped(name) for name in names}
    while True:
        yield current
        inside = [n for n in current.values() if not n.startswith(BESIDE)]
        prefix = next((p for p in SHARED if inside and all(n.startswith(p) for n in inside)), None)
        if prefix is None:
            return
        current = {name: new.removeprefix(prefix) for name, new in current.items()}
