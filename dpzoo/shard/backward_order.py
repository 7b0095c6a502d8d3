"""When in a backward pass a node may run that waits for what other ranks add to the gradient of a tensor.

Autograd runs nodes that are ready by falling sequence number, and nodes of one number in any order, which differs
between ranks. Where three terms come together, the order in which they are added decides the last bits: replicas of a
weight would drift apart. So of the ways on which gradients come together at one place only one may have such a node.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

_MARKS = "dpzoo: edges with waiting nodes above"  # in a node's metadata: input number -> is it where one hands on


def late_place(p: Tensor) -> int | None:
    """The sequence number of a node between a tensor and its users that is to run as late as may be; None: have none.

    It is that of the first node with several inputs on the way back, the layer that made the tensor: it runs after all
    its descendants did. Inputs without a gradient (the number in `1 + scale`) do not count. Not later: FSDP2 counts on
    it that the nodes of a module run before those of its inputs.
    """
    node: Any = p.grad_fn
    if node is None:
        return 0
    way, at = [], p.output_nr
    while True:
        way.append((node, at))
        inputs = [edge for edge in node.next_functions if edge[0] is not None]
        if len(inputs) != 1 or hasattr(inputs[0][0], "variable"):
            break
        node, at = inputs[0]
    return node._sequence_nr() if _alone(way) else None


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
