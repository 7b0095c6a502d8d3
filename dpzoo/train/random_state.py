"""The state of random number generators, for loops that do not seed every sample as `fit` does (see `seeds.py`).

What does not depend on the number of ranks is the stream of ShardTensors (`dpzoo.shard.manual_seed`): it is the same on
every rank and goes on on any number of them. Torch's own generators belong to a rank and its devices: they go on on as
many ranks as saved them, and are left as they are on another number.
"""

from collections.abc import Mapping
from typing import Any

import torch

from dpzoo.shard import get_rng_state, set_rng_state
from dpzoo.train.team import Team


def random_state(team: Team) -> dict[str, Any]:
    """`{"stream": ShardTensors', "generators": {this rank of so many: torch's own}}`, of tensors and numbers."""
    own = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    return {"stream": get_rng_state(), "generators": {generators_of(team): own}}


def generators_of(team: Team) -> str:
    """The name under which this rank's generators are stored."""
    return f"rank_{team.rank}_of_{team.size}"


def set_random_state(state: Mapping[str, Any], team: Team) -> None:
    """Go on from a state that was found on these ranks, or on others: see above."""
    if "stream" in state:
        set_rng_state(state["stream"])
    own = state.get("generators", {}).get(generators_of(team), {})
    if "cpu" in own:
        torch.set_rng_state(own["cpu"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
