"""Models that know how they were built: save a folder, load one, publish it on the Hugging Face hub.

A folder holds ``config.json`` (the registered name or class, and its arguments) and plain safetensors. Nothing that
``config.json`` says is imported: only models that are already known can be built from it.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from dpzoo.models.build_record import BuildRecord, recall, remember
from dpzoo.models.foreign_configs import foreign_call
from dpzoo.models.registry import create_model, is_registered
from dpzoo.weights import WeightsError, load_weights, model_config, open_weights, write_folder
from dpzoo.weights.dialects.noted import grid_to_note
from dpzoo.weights.places import check_sha256, locate

_CLASSES: dict[str, type[HubMixin]] = {}
_DTYPES = ("float64", "float32", "float16", "bfloat16")


class HubMixin:
    """Base of the zoo's models, before ``nn.Module``: ``save_pretrained``, ``from_pretrained``, ``push_to_hub``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _CLASSES[cls.__name__] = cls

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        instance = super().__new__(cls)
        assert isinstance(instance, nn.Module)
        remember(instance, BuildRecord(cls.__name__, args, kwargs))
        return instance

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        extra: Mapping[str, Any] | None = None,
        max_shard_bytes: int = 5_000_000_000,
    ) -> Path:
        """Write ``config.json``, ``model.safetensors`` and a model card; one process, whole tensors.

        Args:
            state_dict: Weights to write in place of the model's own, such as their average.
            extra: Anything to put into ``config.json`` besides.
            max_shard_bytes: Weights of more bytes go into several files.

        Raises:
            WeightsError: sharded weights, or arguments that ``config.json`` cannot hold.
        """
        assert isinstance(self, nn.Module)
        config = config_of(self, extra=extra)
        folder = write_folder(folder, state_dict or _tensors(self), config, max_shard_bytes=max_shard_bytes)
        card = folder / "README.md"
        if not card.exists():
            card.write_text(_card(config), encoding="utf-8")
        return folder

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        key: str | None = None,
        ema: bool = True,
        dialect: str = "auto",
        strict: bool = True,
        old_grid: Sequence[int] | None = None,
        sha256: str | Mapping[str, str] | None = None,
        revision: str | None = None,
        download: bool = False,
        **arguments: Any,
    ) -> Self:
        """Build the model that a folder describes and load its weights; on a single device, in eval mode.

        Args:
            source: A file or folder of weights, or a hub id. Without a ``config.json`` that dpzoo can read, the model
                is built from ``arguments`` alone.
            arguments: Of the model, before those in ``config.json``.

        The others are those of :func:`dpzoo.weights.load_weights`; use it, or :func:`dpzoo.load_pretrained` on several
        ranks, to have its report.

        Raises:
            WeightsError: weights that cannot be used, or a configuration of another class.
        """
        path = locate(source, revision=revision, download=download)
        if sha256 is not None:
            check_sha256(path, sha256)
        opened = open_weights(path, key=key, ema=ema)
        known = known_config(opened.config)
        model = cls(**arguments) if known is None else build_from_config(known, **arguments)
        if not isinstance(model, cls):
            raise WeightsError(
                f"{source} is a {type(model).__name__}, not a {cls.__name__}: use {type(model).__name__}"
            )
        assert isinstance(model, nn.Module)
        load_weights(model, opened, dialect=dialect, strict=strict, old_grid=old_grid)
        model.eval()
        return model

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str = "Add weights",
        create_pr: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Publish what :meth:`save_pretrained` writes as a repository of the Hugging Face hub.

        Returns:
            The address of the commit.

        Raises:
            WeightsError: as :meth:`save_pretrained`. Errors of the hub come as they are.
        """
        from huggingface_hub import HfApi

        with tempfile.TemporaryDirectory() as scratch:
            folder = self.save_pretrained(Path(scratch) / "model", extra=extra)
            api = HfApi(token=token)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
            )
        return str(commit)


def config_of(model: nn.Module, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What ``config.json`` says of a model that :func:`~dpzoo.models.create_model` or a class of the zoo built.

    Raises:
        WeightsError: built otherwise, or with arguments that JSON cannot hold.
    """
    record = recall(model)
    if record is None:
        raise WeightsError(
            f"how this {type(model).__name__} was built is not known; build it with create_model or a class of the "
            "zoo, or write the configuration with dpzoo.weights.model_config"
        )
    arguments = {name: _described(value) for name, value in _named(record).items()}
    dtypes = {t.dtype for t in _tensors(model).values() if t.is_floating_point()}
    config = model_config(record.builder, arguments, dtypes.pop() if len(dtypes) == 1 else None, extra)
    grid = grid_to_note(model)
    return config if grid is None else {**config, "position_grid": grid}


def known_config(config: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The part of a configuration that says how to build one of dpzoo's models, also of another library's.

    Returns:
        ``{"model": ..., "arguments": ..., "dtype": ...}``, or None if it describes no model that is known how to build.
    """
    if config is not None and isinstance(config.get("model"), str) and isinstance(config.get("arguments"), Mapping):
        return config
    call = foreign_call(config)
    return None if call is None else {"model": call[0], "arguments": call[1]}


def build_from_config(config: Mapping[str, Any], **arguments: Any) -> nn.Module:
    """The model that a configuration describes, with weights still to be loaded.

    Args:
        config: Of dpzoo; or of timm (ViT), diffusers (DiT) or PhysicsNeMo (Transolver).
        arguments: Go before those of the configuration.

    Raises:
        WeightsError: no such model here, or arguments that it does not take.
    """
    known = known_config(config)
    if known is None:
        raise WeightsError(
            "the configuration beside the weights does not describe a model that is known here; build the model and "
            "pass it"
        )
    name = known["model"]
    given = {key: _built(value) for key, value in {**known["arguments"], **arguments}.items()}
    if not (is_registered(name) or name in _CLASSES):
        raise WeightsError(
            f"config.json describes the model {name!r}, which is not known here; import its package first"
        )
    try:
        model = create_model(name, **given) if is_registered(name) else _CLASSES[name](**given)
    except (TypeError, ValueError) as error:
        raise WeightsError(f"{name} cannot be built from config.json: {error}") from None
    assert isinstance(model, nn.Module)
    dtype = known.get("dtype")
    return model.to(getattr(torch, dtype)) if dtype in _DTYPES and dtype != "float32" else model


def _named(record: BuildRecord) -> dict[str, Any]:
    """All arguments by keyword, those that were left out left out."""
    if not record.positional:
        return dict(record.named)
    bound = inspect.signature(_CLASSES[record.builder]).bind(*record.positional, **record.named)
    keywords = [p.name for p in bound.signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    rest = bound.arguments.pop(keywords[0], {}) if keywords else {}
    return {**bound.arguments, **rest}


def _described(value: Any) -> Any:
    """A model that is an argument of another is described in its place."""
    if isinstance(value, nn.Module):
        config = config_of(value)
        return {"model": config["model"], "arguments": config["arguments"]}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    return value


def _built(value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"model", "arguments"}:
        return build_from_config(value)
    return [_built(item) for item in value] if isinstance(value, list) else value


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}


def _card(config: Mapping[str, Any]) -> str:
    return f"""---
library_name: dpzoo
tags:
- dpzoo
- {config["model"].lower()}
---

`{config["model"]}` of dpzoo. The weights are plain safetensors; `config.json` says how the model is built.

```python
import dpzoo

model = dpzoo.load_pretrained("path/to/this/folder").model
```
"""
