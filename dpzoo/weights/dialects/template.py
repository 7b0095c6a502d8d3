"""Names with blanks: ``blocks.{i}.attn.qkv.{p}``, read and filled in.

A blank of one letter stands for a number, ``{p}`` for ``weight`` or ``bias``, ``{rest}`` for anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

_BLANK = re.compile(r"\{(\w+)\}")
_KINDS = {"p": "weight|bias", "rest": ".+"}


@lru_cache(maxsize=4096)
def _compiled(template: str) -> re.Pattern[str]:
    pattern, at, seen = "", 0, set()
    for blank in _BLANK.finditer(template):
        name = blank[1]
        pattern += re.escape(template[at : blank.start()])
        pattern += f"(?P={name})" if name in seen else f"(?P<{name}>{_KINDS.get(name, '[0-9]+')})"
        seen.add(name)
        at = blank.end()
    return re.compile(pattern + re.escape(template[at:]))


def match(template: str, name: str) -> dict[str, str] | None:
    """What stands in the blanks, or None where the name is another."""
    found = _compiled(template).fullmatch(name)
    return None if found is None else found.groupdict()


def fill(template: str, blanks: Mapping[str, str]) -> str:
    """The name with its blanks filled in."""
    return _BLANK.sub(lambda blank: blanks[blank[1]], template)


def matches(template: str, name: str) -> bool:
    """Is the name one of the template's?"""
    return _compiled(template).fullmatch(name) is not None
