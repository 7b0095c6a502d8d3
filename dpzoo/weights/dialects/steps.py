"""The steps by which weights are made to fit, besides those of positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from dpzoo.weights.dialects.fitting import Job
from dpzoo.weights.dialects.lazy import Computed, Constant
from dpzoo.weights.dialects.template import matches
from dpzoo.weights.resampling import adapt_input_channels, resample_bias_table, resample_patch_kernel
from dpzoo.weights.source import WeightsMismatchError


@dataclass(frozen=True)
class Features:
    """Names that a file may hold and the model lacks, because it has not the feature or was built without it.

    Attributes:
        needed: ``{template: what a model with such a name has, and how to build it}``.
    """

    needed: Mapping[str, str] = field(default_factory=dict)

    def apply(self, job: Job) -> None:
        names = [n.removeprefix(job.root) for n in job.file_names("")]
        for template, feature in self.needed.items():
            found = next((n for n in names if matches(template, n)), None)
            if found is not None and not any(matches(job.root + template, n) for n in job.shapes):
                raise WeightsMismatchError(f"{found!r} needs {feature}; the model does not have it")


@dataclass(frozen=True)
class Agreement:
    """A number that no shape shows, and that the weights only fit with: heads, windows.

    Attributes:
        what: Its name in messages.
        theirs: Read it from the file's config; None where that does not say.
        ours: Read it from our network.
    """

    what: str
    theirs: Callable[[Mapping[str, Any]], Any]
    ours: Callable[[nn.Module], Any]

    def apply(self, job: Job) -> None:
        theirs = None if job.config is None else self.theirs(job.config)
        if theirs is None:
            return
        ours = self.ours(job.network)
        if theirs != ours:
            raise WeightsMismatchError(f"the file's config says {self.what} {theirs}, the model has {ours}")


@dataclass(frozen=True)
class Filled:
    """A constant for what the file's library does not keep, because it never changes there."""

    template: str
    value: float
    detail: str
    when: Callable[[Mapping[str, Any]], bool]

    def apply(self, job: Job) -> None:
        if job.config is None or not self.when(job.config):
            return
        dtype = next(iter(job.converted.tensors.values())).dtype
        for full, shape in job.shapes.items():
            name = full.removeprefix(job.root)
            if matches(self.template, name) and job.file(name) is None:
                job.replace(name, Constant(shape, dtype, self.value), self.detail, kind="merged")


@dataclass(frozen=True)
class Head:
    """The last layer: with other outputs than the model's it is left out, and the model keeps its own."""

    prefix: str = "head."

    def apply(self, job: Job) -> None:
        theirs, ours = job.file_names(self.prefix), [n for n in job.shapes if n.startswith(job.root + self.prefix)]
        found = {name: job.converted.tensors[name].shape for name in theirs}
        wanted = {name: job.shapes[name] for name in ours}
        both = found.keys() & wanted.keys()
        if found == wanted or any(found[n][1:] != wanted[n][1:] for n in both):  # other inputs: another net before it
            return
        job.drop(theirs, ours, f"head: the file has {_outputs(found)}, the model {_outputs(wanted)}")


def _outputs(shapes: Mapping[str, tuple[int, ...]]) -> str:
    sizes = [shape[0] for shape in shapes.values() if len(shape) > 1]
    return f"{sizes[-1]} outputs" if sizes else "none"


@dataclass(frozen=True)
class PatchKernel:
    """The first convolution: other input channels if it was made for pictures, and another patch size."""

    name: str
    resize: bool = True

    def apply(self, job: Job) -> None:
        tensor, here = job.file(self.name), job.here(self.name)
        if tensor is None or here is None or tensor.shape == here or len(tensor.shape) != len(here):
            return
        old, said = tensor.shape, []
        if old[0] != here[0] or (old[2:] != here[2:] and not self.resize):
            return
        if old[1] != here[1]:
            if old[1] != 3:
                raise WeightsMismatchError(
                    f"{job.root}{self.name} has {old[1]} input channels, the model {here[1]}; only weights for "
                    "pictures (3 channels) are adapted to other inputs"
                )
            how = "summed" if here[1] == 1 else f"repeated, scaled by 3/{here[1]}"
            said.append(f"input channels 3 -> {here[1]} ({how})")
        if old[2:] != here[2:]:
            said.append(f"patch {_sizes(old[2:])} -> {_sizes(here[2:])}")
        job.replace(self.name, Computed(here, (tensor,), partial(_adapted, shape=here)), "; ".join(said))


def _adapted(kernel: Tensor, shape: tuple[int, ...]) -> Tensor:
    return resample_patch_kernel(adapt_input_channels(kernel, shape[1]), shape[2:])


@dataclass(frozen=True)
class BiasTables:
    """Relative position biases, ``(heads, *sizes)``, of another window; zeros where the file has none at all."""

    template: str

    def apply(self, job: Job) -> None:
        ours = [n.removeprefix(job.root) for n in job.shapes if matches(job.root + self.template, n)]
        if not any(job.file(name) is not None for name in ours):
            for name in ours:
                shape = job.shapes[job.root + name]
                dtype = next(iter(job.converted.tensors.values())).dtype
                job.replace(name, Constant(shape, dtype), "zeros: the file has no bias tables", kind="merged")
            return
        for name in ours:
            tensor, here = job.file(name), job.shapes[job.root + name]
            if tensor is None or tensor.shape == here or tensor.shape[0] != here[0] or len(tensor.shape) != len(here):
                continue
            moved = Computed(here, (tensor,), partial(resample_bias_table, new_size=here[1:]))
            job.replace(name, moved, f"bias table {_sizes(tensor.shape[1:])} -> {_sizes(here[1:])}")


@dataclass(frozen=True)
class Unused:
    """Tensors of the file that a model built with other options does without."""

    names: tuple[str, ...]
    why: str

    def apply(self, job: Job) -> None:
        surplus = [job.root + n for n in self.names if job.file(n) is not None and job.here(n) is None]
        if surplus:
            job.drop(surplus, (), self.why)


@dataclass(frozen=True)
class KeptIfMissing:
    """A constant of the model (a whole name, not below the root) that the file need not have."""

    name: str
    why: str

    def apply(self, job: Job) -> None:
        if self.name in job.shapes and self.name not in job.converted.tensors:
            job.drop((), (self.name,), self.why)


def _sizes(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
