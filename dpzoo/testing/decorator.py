"""`@distributed(ranks=...)`: a pytest test whose body runs on every rank of the session's pool."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from dpzoo.testing.pool import session_pool
from dpzoo.testing.transport import RANK_BODY


def distributed(
    ranks: int | Sequence[int] = 2, timeout: float = 30.0
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function that every rank executes; an assertion that fails on any rank fails the test.

    Args:
        ranks: number of ranks, or several: the test is then parametrized over them. A body with a parameter named
            `ranks` receives the number.
        timeout: seconds after which a hang becomes a `RankTimeout` with every rank's stack.

    Values from `pytest.mark.parametrize` are sent to the ranks and must be picklable; other fixtures are not supported.
    The test must be a function at the top level of its module. `pytest.skip` inside works when no rank fails.

        @distributed(ranks=[1, 2, 3])
        def test_sum(ranks):
            x = torch.ones(())
            torch.distributed.all_reduce(x)
            assert x.item() == ranks
    """
    counts = [ranks] if isinstance(ranks, int) else list(ranks)

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        import pytest

        signature = inspect.signature(body)
        if "self" in signature.parameters or "<locals>" in body.__qualname__:
            raise TypeError(f"@distributed: {body.__qualname__} must be a function at the top level of a test module")
        wants_ranks = "ranks" in signature.parameters

        @functools.wraps(body)
        def test(**values: Any) -> None:
            __tracebackhide__ = True
            count = values["ranks"] if wants_ranks else values.pop("ranks")
            session_pool().run(body, ranks=count, timeout=timeout, kwargs=values)

        setattr(test, RANK_BODY, body)
        test.__signature__ = _with_ranks(signature)  # type: ignore[attr-defined]
        marked: Callable[..., None] = pytest.mark.parametrize("ranks", counts, ids=lambda n: f"{n}ranks")(test)
        return marked

    return decorate


def _with_ranks(signature: inspect.Signature) -> inspect.Signature:
    """The signature that pytest sees: always with `ranks`, which the parametrization fills."""
    parameters = list(signature.parameters.values())
    if "ranks" not in signature.parameters:
        parameters.append(inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY))
    return signature.replace(parameters=parameters)
