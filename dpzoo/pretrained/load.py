"""`load_pretrained`: fill a model with weights from elsewhere, on one rank or on many.

A plain parameter is read once, by the first rank, and sent to the others. Of a parameter that is sharded (ShardTensor,
or DTensor as FSDP2 makes them) every rank reads only its own slab. What the file does not fill is sent as well, so that
plain parameters are the same everywhere afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dpzoo.models import create_model
from dpzoo.models.hub import build_from_config
from dpzoo.models.registry import is_registered
from dpzoo.pretrained.agree import Team
from dpzoo.pretrained.parts import mesh_of, part_of
from dpzoo.pretrained.spread import fill_shards, fill_whole
from dpzoo.shard import ShardTensor
from dpzoo.weights import LoadReport, WeightsError, WeightSource
from dpzoo.weights.load import Origin, bare, open_origin
from dpzoo.weights.places import locate
from dpzoo.weights.plan import LoadPlan, model_tensors, plan_load


def load_pretrained(
    model: nn.Module | str | Path,
    source: Origin | None = None,
    *,
    mesh: DeviceMesh | None = None,
    arguments: Mapping[str, Any] | None = None,
    key: str | None = None,
    ema: bool = True,
    dialect: str = "auto",
    strict: bool = True,
    old_grid: Sequence[int] | None = None,
    sha256: str | Mapping[str, str] | None = None,
    revision: str | None = None,
    download: bool = False,
) -> LoadReport:
    """Fill a model with the weights of a file, a folder or a hub repository, whoever's names they use.

    All ranks of ``mesh`` call it together with the same arguments, and see the same file. Everything is checked before
    anything is written: after an error, which is the same on all ranks, the model is what it was.

    Args:
        model: A module; or the name of a registered model, which is built with ``arguments``; or, without ``source``, a
            folder or hub id whose ``config.json`` says which model to build.
        source: A path, a hub id (``"org/name"``), a state dict, or an open source.
        mesh: The ranks that hold the model. Without it the mesh of the model's sharded parameters; and if it has none,
            this process loads by itself.
        arguments: For building the model, before those of ``config.json``.
        key, ema: Which state dict of a training file; see :func:`dpzoo.weights.open_weights`.
        dialect: Whose names the file uses (see docs/dialects.md); found out by ``"auto"``.
        strict: Refuse names that are missing or unexpected. Shapes always have to fit, or be resampled.
        old_grid: Patches per dim of the file's position embedding, where neither a square nor the file tells.
        sha256: The hash that the file must have; for a folder ``{file name: hash}``.
        revision: Branch, tag or commit of a hub repository.
        download: Fetch a hub repository that is not in the local cache (the first rank does). Nothing goes over the
            network otherwise.

    Returns:
        What became of each name; ``.model`` is the model.

    Raises:
        WeightsError: on every rank. ``DamagedWeightsError``: truncated, or of another hash. ``UnsafeWeightsError``: it
            would run code, or leave its folder. ``WeightsMismatchError``: the weights of another architecture.

    Example::

        report = load_pretrained(model, "vit_base.safetensors", mesh=mesh)
        model = load_pretrained("vit_small_patch16", "timm/vit_small_patch16_224", arguments={"img_size": 224}).model
    """
    if source is None and (isinstance(model, nn.Module) or is_registered(str(model))):
        raise WeightsError("load_pretrained(model, source): say where the weights come from")
    team = Team(mesh if mesh is not None or not isinstance(model, nn.Module) else _mesh_of_model(model))
    place: Any = model if source is None else source
    if isinstance(place, (str, Path)):
        # The first rank fetches what is not there yet; then it is there for all.
        team.together(lambda: locate(place, revision=revision, download=download), who="first")

    def opened() -> WeightSource:
        read_by_all = team.is_first or not isinstance(model, nn.Module) or _is_sharded(model)
        return open_origin(place, key=key, ema=ema, sha256=sha256 if read_by_all else None, revision=revision)

    weights = team.together(opened)
    built = model if isinstance(model, nn.Module) else team.together(lambda: _build(model, weights, arguments, source))

    def planned() -> LoadPlan:
        return plan_load(
            bare(built), weights, dialect=dialect, strict=strict, old_grid=old_grid, check_values=team.is_first
        )

    plan = team.together(planned)
    _check_same(plan, weights, team)
    _fill(plan, team)
    return plan.report


def _build(
    model: str | Path, weights: WeightSource, arguments: Mapping[str, Any] | None, source: Origin | None
) -> nn.Module:
    if source is not None:
        return create_model(str(model), **(arguments or {}))
    if weights.config is None:
        raise WeightsError(f"{weights.origin} has no config.json; say which model: load_pretrained(model, {model!r})")
    return build_from_config(weights.config, **(arguments or {}))


def _fill(plan: LoadPlan, team: Team) -> None:
    """Write, after what can only be had whole was computed where it is needed."""
    sharded = {name: t for name, t in plan.targets.items() if isinstance(t, (ShardTensor, DTensor))}
    plain = {name: t for name, t in plan.targets.items() if name not in sharded}

    def compute() -> None:
        for name, target in sharded.items():
            part_of(name, target)
        plan.compute([*sharded, *(plain if team.is_first else ())])

    team.together(compute)
    fill_whole(plan.read, plain, team, plan.report.origin)
    if team.is_many:
        others = {name: t for name, t in plan.others.items() if mesh_of(t) is None}
        fill_whole(lambda name, slab: others[name].detach()[slab], others, team, "the model")
    team.together(lambda: fill_shards(plan, sharded))


def _mesh_of_model(model: nn.Module) -> DeviceMesh | None:
    meshes = {mesh for t in model_tensors(bare(model)).values() if (mesh := mesh_of(t)) is not None}
    if len(meshes) > 1:
        raise WeightsError("the model's parameters lie on several meshes; pass the mesh of all its ranks as mesh=")
    return meshes.pop() if meshes else None


def _is_sharded(model: nn.Module) -> bool:
    return any(mesh_of(t) is not None for t in model_tensors(bare(model)).values())


def _check_same(plan: LoadPlan, weights: WeightSource, team: Team) -> None:
    """The ranks must hold the same model, and have opened the same file."""
    tensors = (*plan.targets.items(), *plan.others.items())
    model = [(name, tuple(t.shape), str(t.dtype), mesh_of(t) is None) for name, t in tensors]
    file = [(name, weights.shape(name), str(weights.dtype(name))) for name in weights.names()]
    notes = team.gather((model, file) if team.is_many else None)
    for what, at in (("another model", 0), ("another file", 1)) if team.is_many else ():
        unlike = [i for i, note in enumerate(notes) if note[at] != notes[0][at]]
        if unlike:
            assert team.layout is not None
            ranks = team.layout.ranks
            raise WeightsError(f"rank {ranks[unlike[0]]} loads {what} than rank {ranks[0]}: {weights.origin}")
