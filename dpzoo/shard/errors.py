"""What the core raises and warns; every error names the op, the layout found and what to do about it."""


class ShardError(RuntimeError):
    """Base of all errors raised by `dpzoo.shard`; raised on every rank of the mesh, before any communication."""


class MissingShardPatch(ShardError, NotImplementedError):
    """An op has no rule and may not be computed by gathering: strict mode, or gathering would falsify it."""


class UndeterminedShardingError(ShardError):
    """The layout of a tensor cannot be told from what was given (shard shapes missing or contradictory)."""


class LayoutError(ShardError, ValueError):
    """A mesh, placement or size that does not fit the tensor or the other operands."""


class GatherWarning(UserWarning):
    """An op without a rule for this layout was computed on the gathered tensor: right, but not domain-parallel."""


class PromotionWarning(UserWarning):
    """A plain tensor met a ShardTensor and was taken as replicated (`TensorPromotionMode.WARN`)."""
