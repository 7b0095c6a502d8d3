"""The project's own rules: who may import whom, who may communicate, what the repository may not mention, its metadata.

import-linter checks the layers of ``dpzoo``; what it cannot see (``torch.distributed`` is a part of an external
package, and calls are not imports) is read from the syntax tree here.
"""

import ast
import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dpzoo"
ROOMS_ABOVE_THE_CORE = (
    "models",
    "metrics",
    "parallel",
    "datapipes",
    "pretrained",
    "train",
    "inspect",
    "testing",
    "demo",
    "cli",
)
# room -> module prefixes that it must never import; "dpzoo" alone is the facade that imports every room
FORBIDDEN = {
    "models": ("torch.distributed", "dpzoo", *(f"dpzoo.{r}" for r in ("shard", *ROOMS_ABOVE_THE_CORE[1:]))),
    "shard": ("dpzoo", *(f"dpzoo.{room}" for room in ("weights", *ROOMS_ABOVE_THE_CORE))),
    "metrics": (
        "torch.distributed",
        "dpzoo",
        *(f"dpzoo.{r}" for r in ("shard", *ROOMS_ABOVE_THE_CORE) if r != "metrics"),
    ),
    "ops": ("torch.distributed", "dpzoo", *(f"dpzoo.{room}" for room in ("shard", "weights", *ROOMS_ABOVE_THE_CORE))),
    "weights": ("torch.distributed", "dpzoo", *(f"dpzoo.{room}" for room in ("ops", "shard", *ROOMS_ABOVE_THE_CORE))),
}
COMMUNICATES = re.compile(
    r"^(all_|reduce|broadcast|gather|scatter|send|recv|isend|irecv|batch_isend_irecv|new_group_and_|permute_tensor)"
)
MAY_COMMUNICATE = ("collectives.py", "all_reduce.py", "one_shot.py", "kernels/")


def python_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def repository_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout, so which files belong to the repository is unknown")
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


def absolute(node: ast.ImportFrom, module: str) -> str:
    """The module that a ``from`` statement inside ``module`` (dotted, a package ends in ``.__init__``) names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")[: -node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


def imported(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that ``source`` imports, and of ``torch.distributed`` reached as an attribute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield node.lineno, "torch.distributed"


def wrong_imports(source: str, module: str) -> list[str]:
    prefixes = FORBIDDEN.get(module.split(".")[1], ())
    found = []
    for line, name in imported(source, module):
        own_facade = name == "dpzoo" or (name.startswith("dpzoo.") and not is_room_or_module(name))
        hit = any(name == p or name.startswith(p + ".") for p in prefixes if p != "dpzoo")
        if hit or (own_facade and "dpzoo" in prefixes):
            found.append(f"{module}:{line} imports {name}")
    return found


def is_room_or_module(name: str) -> bool:
    second = name.split(".")[1]
    return second in ("ops", "shard", "weights", *ROOMS_ABOVE_THE_CORE)


def communication_calls(source: str) -> list[str]:
    """Calls of collectives or point-to-point functions that belong to ``torch.distributed``."""
    tree = ast.parse(source)
    aliases, names = {"torch.distributed"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.asname and a.name.startswith("torch.distributed")}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            for alias in node.names:
                if node.module.startswith("torch.distributed") and COMMUNICATES.match(alias.name):
                    names.add(alias.asname or alias.name)
                elif f"{node.module}.{alias.name}".startswith("torch.distributed"):
                    aliases.add(alias.asname or alias.name)
    found = []
    for call in (node.func for node in ast.walk(tree) if isinstance(node, ast.Call)):
        text = ast.unparse(call)
        owner, _, name = text.rpartition(".")
        from_alias = bool(COMMUNICATES.match(name)) and any(owner == a or owner.startswith(a + ".") for a in aliases)
        if text in names or from_alias or text.startswith(("torch.ops.c10d.", "torch.ops._c10d_functional.")):
            found.append(f"line {call.lineno}: {text}")
    return found


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


class TestArrows:
    @pytest.mark.parametrize("room", FORBIDDEN)
    def test_imports_point_one_way(self, room):
        files = python_files(PACKAGE / room)
        assert files
        assert [fault for path in files for fault in wrong_imports(path.read_text(), dotted(path))] == []

    def test_only_collectives_and_kernels_communicate(self):
        core = PACKAGE / "shard"
        faults = {
            str(path.relative_to(core)): calls
            for path in python_files(core)
            if not str(path.relative_to(core)).startswith(MAY_COMMUNICATE)
            and (calls := communication_calls(path.read_text()))
        }
        assert faults == {}

    @pytest.mark.parametrize(
        ("source", "module"),
        [
            ("import torch.distributed as dist", "dpzoo.models.vit"),
            ("from torch import distributed", "dpzoo.models.vit"),
            ("import torch\ndef f():\n    return torch.distributed.get_rank()", "dpzoo.models.vit"),
            ("from dpzoo.shard import scatter_tensor", "dpzoo.models.vit"),
            ("from ..shard import spec", "dpzoo.models.vit"),
            ("from ...shard import spec", "dpzoo.models.layers.__init__"),
            ("from dpzoo import scatter", "dpzoo.models.vit"),
            ("from dpzoo import shard", "dpzoo.models.vit"),
            ("import dpzoo", "dpzoo.shard.tensor"),
            ("if False:\n    from dpzoo.models import ViT", "dpzoo.shard.rules.conv"),
        ],
    )
    def test_a_wrong_import_is_seen(self, source, module):
        assert len(wrong_imports(source, module)) == 1

    @pytest.mark.parametrize(
        ("source", "module"),
        [
            ("import torch\nfrom dpzoo.models.layers import mlp", "dpzoo.models.vit"),
            ("from .layers import mlp", "dpzoo.models.vit"),
            ("import torch.distributed as dist\nfrom dpzoo.shard.spec import S", "dpzoo.shard.tensor"),
            ("from dpzoo.shard import ShardTensor\nimport dpzoo", "dpzoo.testing.parity"),
        ],
    )
    def test_a_right_import_is_let_through(self, source, module):
        assert wrong_imports(source, module) == []

    @pytest.mark.parametrize(
        "source",
        [
            "import torch.distributed as dist\ndist.all_reduce(x)",
            "import torch\ntorch.distributed.send(x, 1)",
            "from torch import distributed\ndistributed.batch_isend_irecv(ops)",
            "from torch.distributed import broadcast as b\nb(x, 0)",
            "import torch.distributed._functional_collectives as fc\nfc.all_gather_tensor(x, 0, g)",
            "import torch.distributed as dist\ndist.distributed_c10d.scatter(x)",
            "import torch\ntorch.ops._c10d_functional.wait_tensor(x)",
        ],
    )
    def test_a_communication_call_is_seen(self, source):
        assert len(communication_calls(source)) == 1

    @pytest.mark.parametrize(
        "source",
        [
            "import torch.distributed as dist\ndist.get_rank()\ndist.init_process_group()",
            "from dpzoo.shard.collectives import all_reduce\nall_reduce(x)",
            "x.scatter(0, i, y)\nx.gather(0, i)\ntorch.broadcast_tensors(x, y)",
        ],
    )
    def test_other_calls_are_let_through(self, source):
        assert communication_calls(source) == []


class TestRepository:
    # Written in pieces so that this file does not hold what it forbids.
    PLACES = re.compile(r"/wo" + r"rk/|/ro" + r"ot/|(?<![\w-])sha" + r"red/")

    def test_no_file_names_a_place_outside_the_repository(self):
        faults = []
        for path in repository_files():
            try:
                lines = path.read_text(encoding="utf-8").splitlines()
            except UnicodeDecodeError:
                continue
            relative = path.relative_to(ROOT)
            faults += [f"{relative}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if self.PLACES.search(line)]
        assert faults == []

    @pytest.mark.parametrize(
        "text", ["/wo" + "rk/x", "see ../sha" + "red/a.md", "`sha" + "red/data`", "/ro" + "ot/.cache"]
    )
    def test_such_a_place_is_seen(self, text):
        assert self.PLACES.search(text)

    def test_no_module_is_named_after_having_no_subject(self):
        nameless = re.compile(r"^_?(utils?|helpers?|misc|common|stuff)$")
        modules = [path for path in repository_files() if path.suffix == ".py"]
        assert modules
        parts = {part for path in modules for part in path.relative_to(ROOT).with_suffix("").parts}
        assert [part for part in parts if nameless.match(part)] == []


class TestMetadata:
    PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

    def test_every_public_package_is_typed(self):
        packages = self.PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        assert packages
        assert [name for name in packages if not (ROOT / name / "py.typed").is_file()] == []

    def test_version_is_the_same_everywhere(self):
        version = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
        assert version is not None
        assert version.group(1) == self.PROJECT["project"]["version"]

    def test_licence_is_apache(self):
        assert self.PROJECT["project"]["license"] == "Apache-2.0"
        text = (ROOT / "LICENSE").read_text()
        assert "Apache License" in text
        assert "Version 2.0, January 2004" in text

    @pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
    def test_make_commands_in_the_documents_exist(self, document):
        targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / document).read_text(), re.MULTILINE))
        assert named
        assert named <= targets

    @pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/design.md"])
    def test_files_named_in_the_documents_exist(self, document):
        written_later = {"docs/op_table.md", "first.py"}
        text = (ROOT / document).read_text()
        named = set(re.findall(r"`((?:dpzoo|tests|docs|benchmarks)/[\w/.]*)`", text)) | set(
            re.findall(r"\]\(([\w/.]+)\)", text)
        )
        base = (ROOT / document).parent
        missing = [n for n in named - written_later if not (ROOT / n).exists() and not (base / n).exists()]
        assert missing == []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_example(script: Path, world_size: int) -> list[str]:
    """Run the script on ``world_size`` CPU processes, as torchrun would, and return the lines each printed."""
    meeting = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    # A launcher that runs these tests must not be found by the example.
    outer = ("TORCHELASTIC_", "OMPI_", "SLURM_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environ |= meeting | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [process.communicate(timeout=90) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world_size, "\n".join(err for _, err in outputs)
    return [out.strip() for out, _ in outputs]


def test_the_example_of_the_readme_runs_on_one_and_on_three_ranks(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    script = tmp_path / "first.py"
    script.write_text(code.group(1))
    losses = []
    for world_size in (1, 3):
        for rank, line in enumerate(run_example(script, world_size)):
            assert line.startswith(f"rank {rank} of {world_size}: loss ")
            losses.append(float(line.rpartition(" ")[2]))
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
