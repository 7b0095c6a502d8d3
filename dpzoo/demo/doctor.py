"""`dpzoo doctor`: is this machine ready? One line per finding, each problem with the command that mends it."""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "dpzoo"
EXTRAS = ("data", "track", "viz", "natten")


@dataclass(frozen=True)
class Finding:
    """A line of the report. `level` is "ok", "optional" (missing, and only some features need it) or "problem"."""

    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:<9} {self.text}"


def examine(try_gloo: bool = True) -> Iterator[Finding]:
    """All findings, in order; `try_gloo` starts two processes that add two numbers (some seconds)."""
    yield Finding("ok", f"python {sys.version.split()[0]}")
    yield from examine_packages()
    yield from examine_devices()
    if try_gloo:
        yield examine_gloo()


def examine_packages() -> Iterator[Finding]:
    """The packages that dpzoo's own metadata asks for: core ones are problems when missing, those of extras are not."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Finding("problem", "dpzoo runs from a folder and is not installed: pip install -e .")
        return
    seen: set[str] = set()
    for requirement in map(Requirement, lines):
        extra = next((e for e in EXTRAS if requirement.marker and requirement.marker.evaluate({"extra": e})), None)
        if requirement.name in seen or (requirement.marker and extra is None):
            continue
        seen.add(requirement.name)
        yield _examine_package(requirement.name, str(requirement.specifier), extra)


def _examine_package(name: str, specifier: str, extra: str | None) -> Finding:
    from packaging.specifiers import SpecifierSet

    level = "problem" if extra is None else "optional"
    fix = f'pip install "{name}{specifier}"' if extra is None else f'pip install "{DISTRIBUTION}[{extra}]"'
    if name == "natten":
        fix = f"(attention kernels for CUDA) after torch: pip install --no-build-isolation '{name}{specifier}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(level, f"{name} is not installed: {fix}")
    if not SpecifierSet(specifier).contains(version, prereleases=True):
        return Finding(level, f"{name} {version} is not {specifier}: {fix}")
    return Finding("ok", f"{name} {version}")


def examine_devices() -> Iterator[Finding]:
    """Devices that torch sees and the communication backends built into it."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        yield Finding("problem", f"torch cannot be imported ({error}): pip install torch")
        return
    yield Finding("ok", f"cpu, {os.cpu_count()} cores, {torch.get_num_threads()} threads a process (OMP_NUM_THREADS)")
    for index in range(torch.cuda.device_count()):
        yield Finding("ok", f"cuda:{index} {torch.cuda.get_device_name(index)}")
    if not torch.cuda.is_available():
        yield Finding(
            "optional", "no CUDA device; everything runs on CPU. If there is one: check its driver, nvidia-smi"
        )
    if not dist.is_available():
        yield Finding("problem", "this torch has no torch.distributed: install a build from pytorch.org")
        return
    if not dist.is_gloo_available():
        yield Finding("problem", "this torch has no gloo backend: install a build from pytorch.org")
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield Finding("problem", "CUDA devices but no nccl backend: install a CUDA build of torch for Linux")
    elif dist.is_nccl_available():
        yield Finding("ok", "nccl backend is built in")


def examine_gloo() -> Finding:
    """Two processes add two numbers over gloo, as the demo and the tests need."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(_add_over_gloo, (2, Path(folder) / "rendezvous"), nprocs=2, join=True)
        except Exception as error:
            last = str(error).strip().splitlines()[-1]
            fix = "let the host's name resolve to a local address, or set GLOO_SOCKET_IFNAME to an interface, e.g. lo"
            return Finding("problem", f"gloo between two processes fails ({last}): {fix}")
    return Finding("ok", "gloo works between two processes")


def _add_over_gloo(rank: int, ranks: int, rendezvous: Path) -> None:
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks, timeout=timeout)
    number = torch.tensor(rank + 1.0)
    dist.all_reduce(number)
    dist.destroy_process_group()
    if number.item() != ranks * (ranks + 1) / 2:
        raise RuntimeError(f"the sum over {ranks} ranks is {number.item()}")
