"""`assert_parity`: does code that runs on shards compute what it computes on one device?

Every rank runs the code twice: on plain full tensors, and on ShardTensors cut as told. Outputs and gradients of the
second run are collected from the ranks' own data and compared with the first run, in float64 unless told otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from dpzoo.shard import ShardTensor
from dpzoo.shard import strict as strict_rules
from dpzoo.testing.comparing import Entry, Limits, compare_all
from dpzoo.testing.cutting import Cut, InputPlacement, InputSizes, cut_tensor, plan_cut
from dpzoo.testing.gathering import gather_over_mesh
from dpzoo.testing.meshes import domain_mesh
from dpzoo.testing.seeding import set_seed


def assert_parity(
    module_or_fn: nn.Module | Callable[..., Any],
    inputs: Any | Sequence[Any],
    placements: InputPlacement | Sequence[InputPlacement],
    sizes: InputSizes | Sequence[InputSizes] = None,
    *,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = torch.float64,
    rtol: float | None = None,
    atol: float | None = None,
    grads: bool = True,
    loss: Callable[[Any], Tensor] | None = None,
    seed: int = 0,
    strict: bool = False,
) -> None:
    """Compare `module_or_fn(*inputs)` on shards with the same call on full tensors. All ranks of `mesh` call it.

    Compared are: output values, shapes, dtypes and structure; every rank's local shape with its spec; `full_tensor()`;
    the loss; input gradients (ShardTensors cut like the input); gradients of plain inputs and of parameters (plain,
    complete, the same bits on every rank); the module's buffers.

    Args:
        module_or_fn: an nn.Module (copied and converted to `dtype`) or a function.
        inputs: a tensor, or a tuple or list of arguments. Tensors are full and the same on every rank; other values are
            passed as they are.
        placements: how an input is cut: a dim, `Shard(dim)`, `Replicate()`, or None for a plain tensor; on a mesh of
            several axes a tuple with one entry per axis. A list with one for each argument when there are several.
        sizes: per input the shard sizes, e.g. `(5, 9, 3)`, or a layout of `dpzoo.testing.LAYOUTS`; a name alone holds
            for all inputs. The default is "even".
        mesh: the device mesh; all ranks of the task on one axis by default.
        dtype: what floating inputs and the module are converted to; None leaves them.
        rtol, atol: tolerances; by default those of `dpzoo.testing.comparing.TOLERANCES`.
        grads: also run backward and compare gradients, if any output on one device needs one.
        loss: makes a scalar of the outputs; by default every floating output times a fixed random tensor, summed.
        seed: for torch's generator before each of the two runs.
        strict: an op that has no rule and would gather raises `MissingShardPatch`, in forward and in backward.

    Raises:
        ParityError: on every rank, naming the first output or gradient that differs and where.
    """
    __tracebackhide__ = True
    mesh = domain_mesh() if mesh is None else mesh
    several = isinstance(inputs, (list, tuple))
    values = inputs if several else [inputs]
    cuts = plan_cuts(values, mesh, placements if several else [placements], sizes if several else [sizes])
    job = Parity(module_or_fn, values, mesh, dtype, grads, loss or contract, seed, strict)
    job.run_on(cuts)
    job.compare(Limits(dtype, rtol, atol))


def plan_cuts(inputs: Sequence[Any], mesh: DeviceMesh, placements: Any, sizes: Any) -> list[Cut | None]:
    """The cut of each input from what `assert_parity` is told about all of them; None for what stays as it is."""
    placements = list(placements) if isinstance(placements, (list, tuple)) else [placements] * len(inputs)
    sizes = list(sizes) if isinstance(sizes, (list, tuple)) else [sizes] * len(inputs)
    if not len(inputs) == len(placements) == len(sizes):
        raise ValueError(
            f"assert_parity: {len(inputs)} inputs, {len(placements)} placements and {len(sizes)} sizes; "
            "give one of each per input (or one name of a layout for all)"
        )
    return [
        plan_cut(value.shape, mesh.shape, placement, size) if isinstance(value, Tensor) else None
        for value, placement, size in zip(inputs, placements, sizes, strict=True)
    ]


def contract(outputs: Any) -> Tensor:
    """The default loss: `(output * w).sum()` over all outputs that need a gradient, with fixed random w."""
    generator = torch.Generator().manual_seed(20240229)
    total = None
    for output in pytree.tree_leaves(outputs):
        if isinstance(output, Tensor) and output.requires_grad:
            real = torch.float64 if output.dtype in (torch.float64, torch.complex128) else torch.float32
            weight = torch.randn(tuple(output.shape), generator=generator, dtype=real).to(output.device)
            term = (output * weight.to(output.dtype)).sum()
            term = term.real if term.is_complex() else term
            total = term if total is None else total + term
    if total is None:
        raise ValueError("no output needs a gradient")
    return total


@contextmanager
def _noted(note: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        error.add_note(note)
        raise


@dataclass
class Parity:
    """A call on full tensors, made once, and the same call on these tensors cut in one or more ways.

    All ranks of the mesh do the same. What they found travels once, in `compare`: with tiny ops the exchange of results
    takes longer than the ops. The arguments are those of `assert_parity`.
    """

    module_or_fn: nn.Module | Callable[..., Any]
    inputs: Sequence[Any]
    mesh: DeviceMesh
    dtype: torch.dtype | None = torch.float64
    grads: bool = True
    loss: Callable[[Any], Tensor] = contract
    seed: int = 0
    strict: bool = False
    runs: list[tuple[str, list[Entry]]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.inputs = [self._converted(value) if isinstance(value, Tensor) else value for value in self.inputs]
        self.check_that_ranks_agree()
        self.expected = self._entries([None] * len(self.inputs))

    def run_on(self, cuts: list[Cut | None], note: str = "") -> None:
        """Call on shards; `note` (by default how the inputs are cut) goes with an error of this run, now or later."""
        note = note or self._described(cuts)
        with _noted(note):
            self.runs.append((note, self._entries(cuts, like=self.expected)))

    def compare(self, limits: Limits | None = None) -> None:
        """Compare every run on shards, in order, with the run on full tensors; default limits unless told otherwise.

        Raises:
            ParityError: on every rank, for the first difference.
        """
        __tracebackhide__ = True
        packed = [[(entry.name, entry.packed()) for entry in found] for _, found in self.runs]
        gathered = gather_over_mesh(packed, self.mesh)
        limits = limits or Limits(self.dtype)
        for i, (note, found) in enumerate(self.runs):
            with _noted(note):
                of_run = {at: runs[i] for at, runs in gathered.items()}
                compare_all(self.expected, found, of_run, tuple(self.mesh.shape), limits)

    def check_that_ranks_agree(self) -> None:
        """A test whose ranks start from different numbers compares nothing; say so instead."""
        tensors = {f"input {i}": value for i, value in enumerate(self.inputs) if isinstance(value, Tensor)}
        if isinstance(self.module_or_fn, nn.Module):
            state = self.module_or_fn.state_dict()
            tensors |= {name: value for name, value in state.items() if isinstance(value, Tensor)}
        marks = {name: (tuple(t.shape), str(t.dtype), t.detach().sum().item()) for name, t in tensors.items()}
        everyone = gather_over_mesh(repr(sorted(marks.items())), self.mesh)
        if len(set(everyone.values())) > 1:
            raise ValueError(
                "assert_parity: inputs or weights differ between ranks; make them from the same seed on every rank. "
                f"Found, by mesh coordinate: {everyone}"
            )

    def _entries(self, cuts: list[Cut | None], like: list[Entry] | None = None) -> list[Entry]:
        """Call, and backward when asked; everything that is compared, in order.

        Args:
            like: None runs on full tensors. The result of that, to run on shards; outputs that differ from it in kind
                end the run before backward, which could not work or would hide the difference.
        """
        runnable = self._runnable()
        arguments = [self._argument(value, cut) for value, cut in zip(self.inputs, cuts, strict=True)]
        set_seed(self.seed)
        with torch.set_grad_enabled(self.grads), self._rules_only():
            outputs = runnable(*arguments)
        entries = [self._output(path, value) for path, value in pytree.tree_flatten_with_path(outputs)[0]]
        if like is not None and [e.kind for e in entries] != [e.kind for e in like[: len(entries)]]:
            return entries
        if self.grads and (self.loss is not contract or any(entry.needs_grad for entry in entries)):
            entries += self._gradients(runnable, arguments, outputs, cuts)
        if isinstance(runnable, nn.Module):
            entries += [Entry(f"buffer {name}", buffer) for name, buffer in runnable.named_buffers()]
        return entries

    def _gradients(
        self, runnable: nn.Module | Callable[..., Any], arguments: list[Any], outputs: Any, cuts: list[Cut | None]
    ) -> Iterator[Entry]:
        with self._rules_only():
            loss = self.loss(outputs)
            loss.backward()
        yield Entry("loss", loss.item())
        for i, (argument, cut) in enumerate(zip(arguments, cuts, strict=True)):
            if isinstance(argument, Tensor) and argument.requires_grad:
                yield Entry(f"gradient of input {i}", argument.grad, "plain" if cut is None else "cut", cut)
        if isinstance(runnable, nn.Module):
            for name, parameter in runnable.named_parameters():
                yield Entry(f"gradient of {name}", parameter.grad, "plain")

    def _rules_only(self) -> AbstractContextManager[None]:
        return strict_rules() if self.strict else nullcontext()

    def _described(self, cuts: list[Cut | None]) -> str:
        """The inputs and how they are cut, one line each."""
        lines = []
        for i, (value, cut) in enumerate(zip(self.inputs, cuts, strict=True)):
            if isinstance(value, Tensor):
                lines.append(f"  input {i}: shape {tuple(value.shape)}, {'plain' if cut is None else cut}")
        return "\n".join([f"  mesh {tuple(self.mesh.shape)}", *lines])

    def _converted(self, value: Tensor) -> Tensor:
        value = value.detach().to(self.mesh.device_type)
        if self.dtype is None or not (value.is_floating_point() or value.is_complex()):
            return value
        return value.to(torch.complex128 if value.is_complex() and self.dtype == torch.float64 else self.dtype)

    def _runnable(self) -> nn.Module | Callable[..., Any]:
        if not isinstance(self.module_or_fn, nn.Module):
            return self.module_or_fn
        module = copy.deepcopy(self.module_or_fn).to(self.mesh.device_type)
        module.zero_grad()
        return module if self.dtype is None else module.to(self.dtype)

    def _argument(self, value: Any, cut: Cut | None) -> Any:
        if not isinstance(value, Tensor):
            return value
        argument = value.clone() if cut is None else cut_tensor(value, self.mesh, cut)
        needs_grad = self.grads and (value.is_floating_point() or value.is_complex())
        return argument.requires_grad_(True) if needs_grad else argument

    def _output(self, path: Any, value: Any) -> Entry:
        name = f"output{pytree.keystr(path)}"
        if not isinstance(value, Tensor):
            return Entry(name, value)
        full = value.full_tensor().detach() if isinstance(value, ShardTensor) else None
        return Entry(name, value, needs_grad=value.requires_grad, full=full)
