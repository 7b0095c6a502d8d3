"""Which container is it? By content, never by the name alone."""

from pathlib import Path
from typing import Any

from dpzoo.weights.archives import tar_members, zip_members
from dpzoo.weights.mdlus import is_mdlus, open_mdlus
from dpzoo.weights.safetensors_file import open_safetensors
from dpzoo.weights.source import DamagedWeightsError, UnsafeWeightsError, WeightsError, WeightSource
from dpzoo.weights.torch_file import open_torch

GZIP, ZIP, PICKLE, HDF5 = b"\x1f\x8b", b"PK\x03\x04", b"\x80", b"\x89HDF"


def open_weights(path: str | Path, *, key: str | None = None, ema: bool = True) -> WeightSource:
    """Open a file or folder of weights; no values are read yet.

    Args:
        path: safetensors; a file of ``torch.save``; ``.mdlus``; a folder of Hugging Face, timm, diffusers or
            PhysicsNeMo, of ``torch.distributed.checkpoint``, or of a Hugging Face cache.
        key: For files that hold several state dicts: the dotted name of the one to take.
        ema: For such files without ``key``: prefer averaged weights.

    Raises:
        WeightsError: nothing there, or no container that is known.
        DamagedWeightsError: truncated, or parts that contradict each other.
        UnsafeWeightsError: reading it would run code, or it is an archive that reaches outside its folder.
    """
    path = Path(path)
    if path.is_dir():
        from dpzoo.weights.folder import open_folder

        return open_folder(path, key=key, ema=ema)
    if not path.is_file():
        raise WeightsError(f"{path}: no such file or folder")
    return open_file(path, None, key, ema)


def open_file(path: Path, config: Any, key: str | None, ema: bool) -> WeightSource:
    """:func:`open_weights` of a file, with the configuration that lies beside it."""
    with open(path, "rb") as file:
        head = file.read(512)
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return open_safetensors(path, config)
    if head[257:262] == b"ustar":  # before zip: the tail of a tar file can look like the end of a zip file
        return _open_tar(path)
    if head.startswith(ZIP):
        members = zip_members(path)
        return open_mdlus(path, members) if is_mdlus(members) else open_torch(path, config, key, ema)
    if head.startswith(PICKLE):
        return open_torch(path, config, key, ema)
    if head.startswith(GZIP):
        raise UnsafeWeightsError(f"{path} is compressed; unpack it, so that its parts can be read where they lie")
    if not head.strip(b"\0"):
        raise DamagedWeightsError(f"{path} is empty or begins with zeros; was it copied completely?")
    kind = "an HDF5 file (Keras?)" if head.startswith(HDF5) else f"a file that begins with {head[:8]!r}"
    raise WeightsError(f"{path} is {kind}; known are safetensors, files of torch.save, and .mdlus")


def _open_tar(path: Path) -> WeightSource:
    members = tar_members(path)
    if is_mdlus(members):
        return open_mdlus(path, members)
    raise UnsafeWeightsError(
        f"{path} is a tar file that is no .mdlus (it has {', '.join(list(members)[:5])}); torch files from before 2017 "
        "cannot be read safely: load and save it again with a newer torch"
    )
