"""What became of every name when weights were loaded."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from dpzoo.weights.source import Change


@dataclass(frozen=True)
class LoadReport:
    """The outcome of a load; ``print(report)`` shows it.

    Attributes:
        origin: Where the weights came from.
        dialect: Whose names the file used.
        loaded: The model's names that have a new value.
        missing: The model's names that the file should have had (``strict=False`` let them pass; values unchanged).
        unexpected: The file's names that the model has not (likewise).
        kept: The model's names that deliberately keep their value, with the reason.
        changes: What was done to the others on the way.
        cast: The model's names whose dtype is another one than in the file, as ``"float16 -> float32"``.
        model: The model.
    """

    origin: str
    dialect: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    kept: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    cast: Mapping[str, str] = field(default_factory=dict)
    model: nn.Module = field(default_factory=nn.Module, repr=False, compare=False)

    @property
    def renamed(self) -> tuple[Change, ...]:
        return self._of("renamed")

    @property
    def resampled(self) -> tuple[Change, ...]:
        return self._of("resampled")

    @property
    def dropped(self) -> tuple[Change, ...]:
        return self._of("dropped")

    @property
    def split(self) -> tuple[Change, ...]:
        return self._of("split")

    @property
    def merged(self) -> tuple[Change, ...]:
        return self._of("merged")

    def _of(self, kind: str) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.kind == kind)

    def __str__(self) -> str:
        counts = [f"{len(self.loaded)} loaded"]
        counts += [f"{len(found)} {kind}" for kind in ("renamed", "split", "merged") if (found := self._of(kind))]
        lines = [f"{self.origin} ({self.dialect}): {', '.join(counts)}"]
        for change in (*self.resampled, *self.dropped):
            lines.append(
                f"  {change.kind}: {', '.join(change.theirs)}" + (f" ({change.detail})" if change.detail else "")
            )
        lines += [f"  kept as it is: {name} ({reason})" for name, reason in self.kept.items()]
        for word, names in (("missing", self.missing), ("unexpected", self.unexpected)):
            if names:
                lines.append(f"  {word}: {listed(names)}")
        if self.cast:
            lines.append(f"  cast: {', '.join(sorted(set(self.cast.values())))} ({len(self.cast)} tensors)")
        return "\n".join(lines)


def listed(names: tuple[str, ...] | list[str], most: int = 8) -> str:
    """Names for a message, not all of a thousand."""
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
