"""The entries of torch's database, as one kind of thing: a name and a deterministic list of samples.

A sample is a callable with a tree of arguments.  An operator's call is the operator; a module's call builds the module
with fixed random weights and returns it, so that its parameters are compared as well.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.testing._internal import common_methods_invocations as database
from torch.testing._internal.common_modules import module_db

from tests.conformance.families import ORDER, family_of

SEED = 20240229
_PREFERRED = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool)
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

# The database seeds the generator inside a random operator's call, which would hide that its results are random.
database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
_POOL = 400  # samples of one operator that are looked at before the selection


@dataclass
class Sample:
    """One call: ``call(*args, **kwargs)``; ``module`` is set when the callable is a module with parameters."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    process: Callable[[Any], Any] | None = None
    module: torch.nn.Module | None = None


@dataclass(frozen=True)
class Entry:
    """One row of the table: an operator (``OpInfo``), its in-place form, its bad inputs, or a module (``ModuleInfo``).

    ``variant`` is "op" or torch's name of the variant, "inplace", "errors", or "train" and "eval" for a module.
    ``autocast`` is the type of ``torch.autocast`` that calls are made under, if any; float32 is then what is cast.
    With ``narrow`` the first tensor of a call has that type already, as what follows a linear layer gets it.
    """

    name: str
    variant: str
    family: str
    info: Any = field(repr=False, compare=False)
    autocast: torch.dtype | None = None
    narrow: bool = False

    @property
    def key(self) -> str:
        """``name|variant``."""
        return f"{self.name}|{self.variant}"

    @cached_property
    def dtype(self) -> torch.dtype:
        """The widest real type that the entry supports on CPU, else the first of a stated order."""
        dtypes = self.info.supported_dtypes("cpu") if self.variant not in ("train", "eval") else self.info.dtypes
        for dtype in _PREFERRED if self.autocast is None else (torch.float32, *_PREFERRED):
            if dtype in dtypes:
                return dtype
        return sorted(dtypes, key=str)[0]

    def casting(self) -> torch.autocast:
        """What a call is made under."""
        return torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None)

    @cached_property
    def differentiable(self) -> bool:
        """Whether gradients are compared: supported in backward for the type in use."""
        if self.variant in ("train", "eval"):
            return self.dtype.is_floating_point
        if self.variant == "errors" or (self.variant == "inplace" and not self.info.supports_inplace_autograd):
            return False
        return self.info.supports_autograd and self.dtype in self.info.supported_backward_dtypes("cpu")

    def samples(self) -> list[Sample]:
        """All samples (at most a few hundred), the same in every process."""
        seed_everything()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [self._narrowed(sample) for sample in islice(self._generate(), _POOL)]

    def _narrowed(self, sample: Sample) -> Sample:
        first = sample.args[0] if sample.args else None
        if not self.narrow or not isinstance(first, torch.Tensor) or first.dtype is not torch.float32:
            return sample
        low = first.detach().to(self.autocast).requires_grad_(first.requires_grad)
        return replace(sample, args=(low, *sample.args[1:]))

    def _generate(self) -> Iterator[Sample]:
        if self.variant in ("train", "eval"):
            yield from _module_samples(self.info, self.dtype, self.differentiable, self.variant == "train")
            return
        if self.variant == "errors":
            for error in self.info.error_inputs("cpu"):
                given = error.sample_input
                yield Sample(self.info.op, (given.input, *given.args), dict(given.kwargs))
            return
        call = self.info.inplace_variant if self.variant == "inplace" else self.info.op
        for given in self.info.sample_inputs("cpu", self.dtype, requires_grad=self.differentiable):
            if self.variant == "inplace" and given.broadcasts_input:
                continue
            yield Sample(call, (given.input, *given.args), dict(given.kwargs), given.output_process_fn_grad)


def seed_everything(seed: int = SEED) -> None:
    """Seed every generator that torch's sample functions draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _module_samples(info: Any, dtype: torch.dtype, grad: bool, training: bool) -> Iterator[Sample]:
    kwargs: dict[str, Any] = {"device": "cpu", "dtype": dtype, "requires_grad": grad, "training": training}
    for given in info.module_inputs_func(info, **kwargs):
        if given.forward_input is None:
            continue
        build = given.constructor_input
        seed_everything()
        module = info.module_cls(*build.args, **build.kwargs).to(dtype)
        module.train(training)
        yield Sample(module, tuple(given.forward_input.args), dict(given.forward_input.kwargs), module=module)


def _inplace_exists(info: Any) -> bool:
    return info.inplace_variant is not None and info.inplace_variant is not info.op


def entries(autocast: torch.dtype | None = None, narrow: bool = False) -> list[Entry]:
    """Every entry of the database, by family and then by name; under autocast without those of bad inputs."""
    found = []
    for info in database.op_db:
        if info.error_inputs_func is not None and not info.variant_test_name:
            found.append(Entry(info.name, "errors", family_of(info.name, type(info).__name__), info))
        family = family_of(info.name, type(info).__name__)
        found.append(Entry(info.name, info.variant_test_name or "op", family, info))
        if _inplace_exists(info) and not info.variant_test_name:
            found.append(Entry(info.name, "inplace", family, info))
    for info in module_db:
        modes = ("train", "eval") if info.train_and_eval_differ else ("train",)
        found += [Entry(info.name, mode, family_of(info.name), info) for mode in modes]
    if autocast is not None:
        found = [replace(entry, autocast=autocast, narrow=narrow) for entry in found if entry.variant != "errors"]
    return sorted(found, key=lambda entry: (ORDER.index(entry.family), entry.name, entry.variant))
