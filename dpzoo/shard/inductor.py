"""Keep collectives in the order of the program when inductor makes code of a graph.

Ops with an ordered effect are chained, and inductor means to keep the chain. But torch 2.14 notes each link under the
name of the op's buffer and looks it up under the name of the operation, so the links are lost, and collectives move as
sizes (which differ from rank to rank) suggest. The lowering here notes them under the right name.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._library.effects import EffectType
from torch.utils._pytree import tree_map_only


@cache
def keep_in_order() -> None:
    """Register the lowering of `dpzoo::collective`; once, when the first graph is made: inductor is large to import."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    op = torch.ops.dpzoo.collective.default

    def lower(*args: Any) -> Any:
        before = len(V.graph.operations)
        out = tree_map_only(ir.IRNode, lambda made: made.wrap_for_lowering(), ir.FallbackKernel.create(op, *args))
        previous = V.graph.effectful_ops.get(EffectType.ORDERED)
        if previous is not None:
            for made in V.graph.operations[before:]:
                V.graph.additional_star_deps[made.get_operation_name()].add(previous.get_name())
        return out

    register_lowering(op, type_promotion_kind=None)(lower)
