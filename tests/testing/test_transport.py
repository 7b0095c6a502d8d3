import importlib.util
import sys

import pytest

from dpzoo.testing.transport import load_module, pack, unpack

SOURCE = """
class Parcel:
    def __init__(self, value):
        self.value = value

def double(parcel):
    return Parcel(parcel.value * 2)

shadowed = double

def double_again(x):
    return x
"""


@pytest.fixture
def stray(tmp_path):
    """A module that no import finds: read from a file outside of the search path."""
    file = tmp_path / "stray_module.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("nowhere.stray_module", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["nowhere.stray_module"] = module
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("nowhere.stray_module", None)


def test_functions_and_classes_arrive_where_no_import_finds_them(stray):
    data = pack((stray.double, stray.Parcel(4)))
    del sys.modules["nowhere.stray_module"]
    double, parcel = unpack(data)
    assert double is not stray.double
    assert double(parcel).value == 8


def test_a_name_that_means_something_else_is_refused(stray):
    function = stray.double_again
    stray.double_again = stray.double
    with pytest.raises(TypeError, match="that name now means"):
        pack(function)


def test_a_missing_import_inside_a_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "needs_absent.py").write_text("import a_module_that_is_absent\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_absent"):
        load_module("needs_absent", str(tmp_path / "needs_absent.py"))


def test_lambdas_are_refused():
    with pytest.raises(TypeError, match="no global name"):
        pack([lambda: None])
