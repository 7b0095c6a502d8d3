"""Send functions and arguments to another process by *where they are defined*.

Plain pickle finds a function by importing its module. Test modules are often not importable (pytest's `importlib`
mode, a file outside the package), so a function or class of the user's own code travels as (module, qualified name,
file), and the receiver loads the file under the same module name when an import does not find it.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

RANK_BODY = "__rank_body__"
"""Attribute under which a decorated test keeps the function that the ranks execute."""

_BY_PLAIN_PICKLE = frozenset(sys.stdlib_module_names) | {"torch", "dpzoo", "numpy"}
_REFUSAL = "can not send"


def load_module(name: str, file: str | None) -> ModuleType:
    """The module called `name`; read from `file` when it is not importable or the name belongs to another file."""
    module = sys.modules.get(name)
    if module is None and name != "__main__":
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if file is None or error.name is None or not (name + ".").startswith(error.name + "."):
                raise
    if module is not None and (file is None or _same_file(getattr(module, "__file__", None), file)):
        return module
    assert file is not None
    # The caller's `__main__` must not replace this process's own.
    target = "__mp_main__" if name == "__main__" else name
    loaded = sys.modules.get(target)
    if loaded is not None and _same_file(getattr(loaded, "__file__", None), file):
        return loaded
    return _load_file(target, file)


def find_in_module(name: str, qualname: str, file: str | None) -> Any:
    """The object called `qualname` in module `name`; for a test made by `distributed`, the body of the test."""
    found: Any = load_module(name, file)
    for part in qualname.split("."):
        found = getattr(found, part)
    return getattr(found, RANK_BODY, found)


def pack(value: object) -> bytes:
    """Pickle `value`; functions and classes go by definition place. Raises `TypeError` naming what can not be sent."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, RuntimeError, TypeError) as error:
        if str(error).startswith(_REFUSAL):
            raise
        raise TypeError(f"{_REFUSAL} a {type(value).__name__} between processes: {error}") from error
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The inverse of `pack`, in any process that sees the same files."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (FunctionType, type)) or obj.__module__.partition(".")[0] in _BY_PLAIN_PICKLE:
            return NotImplemented
        return find_in_module, (obj.__module__, _checked_qualname(obj), _file_of(obj.__module__))


def _checked_qualname(obj: Callable[..., Any] | type) -> str:
    """The qualified name of `obj`, after checking that it leads back to `obj`."""
    name = obj.__qualname__
    advice = "define it with `def` (or `class`) at the top level of a module and pass values as arguments"
    if "<" in name:
        raise TypeError(f"{_REFUSAL} {name!r} of {obj.__module__} to another process: it has no global name; {advice}")
    try:
        found = find_in_module(obj.__module__, name, _file_of(obj.__module__))
    except (ImportError, AttributeError):
        found = None
    if found is not obj:
        raise TypeError(f"{_REFUSAL} {obj.__module__}.{name}: that name now means {found!r}; {advice}")
    return name


def _file_of(module_name: str) -> str | None:
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return os.path.abspath(file) if file else None


def _same_file(first: str | None, second: str) -> bool:
    return first is not None and os.path.realpath(first) == os.path.realpath(second)


def _load_file(name: str, file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"can not load module {name!r} from {file!r}", name=name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
