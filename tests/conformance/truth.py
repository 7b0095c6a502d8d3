"""One call on plain tensors, and the same call on a target's tensors: the two sides of the comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.conformance.catalog import SEED, Entry, Sample, seed_everything
from tests.conformance.targets import readable

UNINITIALISED = frozenset(
    (
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    )
)


@dataclass
class Run:
    """A call that was made: its inputs, its flat outputs, and what a gradient can be asked of."""

    leaves: list[Any]
    outputs: list[Any]
    spec: TreeSpec
    roots: list[Any]
    module: torch.nn.Module | None

    def backward(self, cotangents: Sequence[Any], which: Sequence[int]) -> None:
        """Backward from the roots ``which`` with the given cotangents."""
        torch.autograd.backward([self.roots[i] for i in which], list(cotangents))

    def gradients(self) -> list[torch.Tensor | None]:
        """Gradients of all inputs that need one, then of the module's parameters."""
        wanted = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        wanted += [p for p in self.module.parameters() if p.requires_grad] if self.module is not None else []
        return [leaf.grad for leaf in wanted]

    def state(self) -> list[torch.Tensor]:
        """The module's buffers, which a forward in train mode changes."""
        return list(self.module.buffers()) if self.module is not None else []


def make_run(entry: Entry, sample: Sample, leaves: list[Any], module: torch.nn.Module | None, seed: int) -> Run:
    """Call the sample on ``leaves`` (its own, converted), with the generators seeded."""
    _, spec = tree_flatten((sample.args, sample.kwargs))
    args, kwargs = tree_unflatten(leaves, spec)
    seed_everything(seed)
    call: Callable[..., Any] = module if module is not None else sample.call
    with entry.casting():
        if entry.variant == "inplace":
            result = call(args[0].clone(), *args[1:], **kwargs)
        else:
            result = call(*args, **kwargs)
    outputs, out_spec = tree_flatten(result)
    roots = outputs
    if sample.process is not None and entry.differentiable:
        roots = tree_leaves(sample.process(result))
    return Run(leaves, outputs, out_spec, roots, module)


def convert(sample: Sample, tensor: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """The sample's flat arguments with every tensor replaced; a tensor that occurs twice stays one tensor."""
    memo: dict[int, torch.Tensor] = {}
    leaves = tree_leaves((sample.args, sample.kwargs))
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in memo:
            memo[id(leaf)] = tensor(leaf)
    return [memo[id(leaf)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


@dataclass
class Truth:
    """What one process computes.  ``how`` says what of it can be compared; ``error`` is set where torch raises.

    ``slack``: of a call under autocast, the error that is allowed in each value of ``expected()`` and then in each
    gradient: a few times what the casts themselves change.
    """

    run: Run | None = None
    outputs: list[Any] = field(default_factory=list)
    mutated: list[int] = field(default_factory=list)
    cotangents: list[torch.Tensor] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    how: str = "value"
    error: BaseException | None = None
    slack: list[float] = field(default_factory=list)

    def expected(self) -> list[Any]:
        """Outputs, changed inputs and the module's buffers: what the ranks must hold after the forward."""
        assert self.run is not None
        return [*self.outputs, *(self.run.leaves[i].detach() for i in self.mutated), *self.run.state()]


def compute_truth(entry: Entry, sample: Sample) -> Truth:
    """Forward and backward on plain tensors.  A second run with another seed tells random results apart."""
    truth = _one_process(entry, sample)
    if entry.autocast is not None and truth.error is None:
        plain = _one_process(replace(entry, autocast=None), _widened(sample), truth.cotangents)
        pairs = zip(_all_values(truth), _all_values(plain), strict=True)
        truth.slack = [_slack(cast, exact, entry.autocast) for cast, exact in pairs]
    return truth


def _widened(sample: Sample) -> Sample:
    """The sample with its low-precision tensors in float32: what autocast computes roughly, exactly."""
    low = (torch.float16, torch.bfloat16)

    def wide(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype not in low:
            return leaf
        return leaf.detach().float().requires_grad_(leaf.requires_grad)

    return replace(sample, args=tree_map(wide, sample.args), kwargs=tree_map(wide, sample.kwargs))


def _all_values(truth: Truth) -> list[Any]:
    return [*truth.expected(), *truth.gradients]


def _slack(cast: Any, plain: Any, low: torch.dtype) -> float:
    """The rounding of float32 where autocast changes nothing; else a few times its change or its rounding."""
    if not isinstance(cast, torch.Tensor) or cast.layout != torch.strided or not cast.numel():
        return 0.0
    if not (cast.is_floating_point() or cast.is_complex()):
        return 0.0
    wide = torch.complex128 if cast.is_complex() else torch.float64
    size = float(plain.to(wide).abs().nan_to_num(0, 0, 0).max())
    change = float((cast.to(wide) - plain.to(wide)).abs().nan_to_num(0, 0, 0).max())
    if change <= 2e-6 * size:
        return 4e-6 * size + 1e-6
    return max(3 * change, 4 * torch.finfo(low).eps * size)


def _one_process(entry: Entry, sample: Sample, cotangents: Sequence[torch.Tensor] = ()) -> Truth:
    truth = Truth()
    try:
        leaves = convert(sample, lambda t: t.detach().clone().requires_grad_(t.requires_grad))
        run = make_run(entry, sample, leaves, copy.deepcopy(sample.module), SEED)
        truth.run = run
        truth.outputs = [_frozen(leaf) for leaf in run.outputs]
        originals = tree_leaves((sample.args, sample.kwargs))
        truth.mutated = [i for i, (old, new) in enumerate(zip(originals, leaves, strict=True)) if _changed(old, new)]
        truth.how = "shape" if entry.name in UNINITIALISED else _how(entry, sample, truth.outputs)
        if entry.differentiable:
            _add_gradients(truth, run, cotangents)
    except Exception as error:
        truth.error = error
    return truth


def _add_gradients(truth: Truth, run: Run, cotangents: Sequence[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(SEED)
    truth.which = [i for i, root in enumerate(run.roots) if isinstance(root, torch.Tensor) and root.requires_grad]
    truth.cotangents = [g.to(run.roots[i].dtype) for i, g in zip(truth.which, cotangents, strict=False)]
    for i in truth.which[len(cotangents) :]:
        root = run.roots[i]
        truth.cotangents.append(torch.randn(root.shape, dtype=root.dtype, generator=generator))
    if truth.which:
        run.backward(truth.cotangents, truth.which)
        truth.gradients = run.gradients()


def _how(entry: Entry, sample: Sample, outputs: list[Any]) -> str:
    """How outputs can be compared: another seed tells random results apart.

    A call that draws may come to the same result by chance (the windows of a fractional pool in bfloat16 are few), so
    several seeds are tried for it.
    """
    for seed in range(SEED + 1, SEED + 9):
        with torch.no_grad():
            leaves = convert(sample, lambda t: t.detach().clone())
            again = make_run(entry, sample, leaves, copy.deepcopy(sample.module), seed).outputs
        state = torch.get_rng_state()
        for one, two in zip(outputs, again, strict=True):
            if isinstance(one, torch.Tensor) and _changed(one, two):
                return "finite"
            if isinstance(one, (int, float)) and one != two and one == one:
                return "finite"
        seed_everything(seed)
        if torch.equal(state, torch.get_rng_state()):  # nothing was drawn
            break
    return "value"


def _frozen(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _changed(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor):
        return False
    if old.shape != new.shape or old.layout != torch.strided:
        return old.shape != new.shape
    old, new = readable(old.detach()), readable(new.detach())
    if old.is_floating_point() or old.is_complex():
        return not torch.allclose(old, new, rtol=0.0, atol=0.0, equal_nan=True)
    return not torch.equal(old, new)
