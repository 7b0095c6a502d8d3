"""When in a backward pass a node may run that waits for what other ranks add to the gradient of a tensor.

Autograd runs nodes that are ready by falling sequence number, and nodes of one number in any order, which differs
between ranks. Where three terms come together, the order in which they are added decides the last bits: replicas of a
weight would drift apart. So of the ways on which gradients come together at one place only one may have such a node,
and nodes of different layers have different numbers.

Every wait costs the ranks time in which they meet. Layers that start from one tensor (the modulations of all blocks,
from the embedded noise level) can wait together, after all that was made since the first of them: for these nodes some
numbers are set aside when it is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dpzoo.shard import averaging

# Of a node's metadata:
_MARKS = "dpzoo: edges with waiting nodes above"  # input number -> is it where one hands on
_NUMBER = "dpzoo: number of its waiting nodes"
_FREE = "dpzoo: numbers for waiting nodes of layers that start here"

LAYERS = 64  # that wait together; numbers are set aside for so many
FARTHEST = 32  # nodes from a layer to where it starts


def late_place(node: Any, at: int) -> int | None:
    """The sequence number of a node between a tensor and its users that is to run late; None: have none.

    It runs after all descendants of the layer that made the tensor: the first node with several inputs on the way back.
    Inputs without a gradient (the number in `1 + scale`) do not count.

    Args:
        node, at: what made the tensor, and which of its results it is.
    """
    way = [(node, at), *_way_back(node)]
    return _number(way[-1][0]) if _alone(way) else None


def _way_back(node: Any) -> Iterator[tuple[Any, int]]:
    """The nodes before `node`, and which of their results was taken, while there is one that is not a weight."""
    while True:
        inputs = [edge for edge in node.next_functions if edge[0] is not None]
        if len(inputs) != 1 or hasattr(inputs[0][0], "variable"):
            return
        yield inputs[0]
        node = inputs[0][0]


def _alone(way: list[tuple[Any, int]]) -> bool:
    """Whether gradients on this way meet none from another waiting node in one input; if so, mark the way."""
    for i, (node, at) in enumerate(way):
        marks = node.metadata.get(_MARKS, {})
        if i == 0 and marks.get(at):  # of this very tensor: its nodes share what arrives
            return True
        if at in marks:
            return False
        if marks:  # another input of a node that was met before: from here on there is one way
            way = way[: i + 1]
            break
    for i, (node, at) in enumerate(way):
        node.metadata.setdefault(_MARKS, {})[at] = i == 0
    return True


def _number(layer: Any) -> int:
    """Of the waiting nodes of a layer: the same for all of them."""
    number: int | None = layer.metadata.get(_NUMBER)
    if number is None:
        start = _start(layer)
        number = layer._sequence_nr() if start is None else _set_aside(start, layer._sequence_nr())
        layer.metadata[_NUMBER] = number
    return number


def _set_aside(start: Any, otherwise: int) -> int:
    """The next of the numbers for layers that start from one node."""
    free = start.metadata.get(_FREE)
    if free is None:
        first = torch._C._autograd._get_sequence_nr()
        like = torch.empty((), requires_grad=True)
        for _ in range(LAYERS):
            like.view(())  # its node takes a number
        free = start.metadata[_FREE] = iter(range(first, first + LAYERS))
    return next(free, otherwise)


def _start(layer: Any) -> Any:
    """The node where a layer and others may start: before it there is none, or more than one; None: it waits alone.

    With weights of FSDP2 on the way it does: FSDP2 counts on it that the nodes of a module run before those of its
    inputs.
    """
    node = layer
    for _ in range(FARTHEST):
        before = [(n, _weight(n)) for n, _ in node.next_functions if n is not None]
        if any(w is not None and averaging.is_fully_sharded(w) for _, w in before):
            return None
        others = [n for n, w in before if w is None]
        if len(others) != 1:
            break
        node = others[0]
    return None if node is layer else node


def _weight(node: Any) -> Tensor | None:
    """The leaf behind a node that makes something of it alone (a transpose), or accumulates its gradient."""
    for _ in range(FARTHEST):
        if hasattr(node, "variable"):
            leaf: Tensor = node.variable
            return leaf
        before = [n for n, _ in node.next_functions if n is not None]
        if len(before) != 1:
            return None
        node = before[0]
    return None
