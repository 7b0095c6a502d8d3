"""How cut keys and values reach the queries: estimated from numbers that all ranks know, so that all choose alike.

| way | sends, per rank and pass | holds | good for |
| --- | --- | --- | --- |
| gather | keys and values, once | all keys and values | few keys: one message each way |
| ring | the same in `ranks - 1` steps, behind compute | three blocks | long sequences |
| ulysses | its share of queries, keys, values, output | its heads of all tokens | many ranks, causal, uneven shards |

Times are forward and backward together, so that training and evaluation go the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dpzoo.shard.errors import LayoutError
from dpzoo.shard.partition import Interval, Sizes, own_intervals

HELD_BYTES = 64 * 2**20  # what one call may hold besides its shards: gathered keys and values, a whole mask
MODES = ("auto", "ring", "gather", "ulysses")
_mode = "auto"


@contextmanager
def attention_mode(mode: str) -> Iterator[None]:
    """How cut keys and values reach cut queries inside the block; the result is the same.

    Args:
        mode: "auto" (by estimated time and memory), "ring", "gather" or "ulysses". Calls whose keys are not cut, and
            calls whose queries every rank holds, send neither; they are not affected.

    Raises:
        ValueError: for another word. A call that the mode cannot serve raises `LayoutError` on every rank.
    """
    global _mode
    if mode not in MODES:
        raise ValueError(f"attention_mode takes one of {', '.join(map(repr, MODES))}, got {mode!r}")
    before, _mode = _mode, mode
    try:
        yield
    finally:
        _mode = before


def current_mode() -> str:
    """The mode in force."""
    return _mode


@dataclass(frozen=True)
class Link:
    """Speeds of one rank.

    Attributes:
        flops: arithmetic, 1/s. bandwidth: what it sends, bytes/s. copying: what it copies locally, bytes/s.
        latency: start of a message, s.
        hides: messages travel while it computes. A CPU rank moves the bytes itself.
    """

    flops: float
    bandwidth: float
    copying: float
    latency: float
    hides: bool


# Orders of magnitude, not measurements of a machine: a core with gloo through memory, a GPU with NVLink.
LINKS = {"cpu": Link(4e10, 1.5e9, 3e9, 5e-4, False), "cuda": Link(2e14, 1e11, 2e12, 2e-5, True)}


@dataclass(frozen=True)
class Work:
    """One call in numbers. Sizes along other mesh axes are those of the largest shard.

    Attributes:
        q_sizes, kv_sizes: lengths of the query and key shards of every rank.
        batch, heads: leading dims; `heads` counts those of keys, each of which serves `group` query heads.
        head_dim, value_dim: channels of queries and keys, and of values.
        itemsize: bytes of an element.
        mask_bytes: of the whole mask, 0 without one.
    """

    q_sizes: Sizes
    kv_sizes: Sizes
    batch: int
    heads: int
    group: int
    head_dim: int
    value_dim: int
    itemsize: int
    causal: bool = False
    mask_bytes: int = 0

    @property
    def ranks(self) -> int:
        """Number of ranks that share the sequence."""
        return len(self.q_sizes)

    @property
    def kv_bytes(self) -> int:
        """All keys and values."""
        return self.batch * self.heads * sum(self.kv_sizes) * (self.head_dim + self.value_dim) * self.itemsize

    @property
    def q_bytes(self) -> int:
        """All queries and their outputs."""
        channels = self.head_dim + self.value_dim
        return self.batch * self.heads * self.group * sum(self.q_sizes) * channels * self.itemsize

    def flops(self, pairs: float) -> float:
        """Arithmetic of so many pairs of a query and a key, in all heads, forward and backward."""
        return 7.0 * pairs * self.batch * self.heads * self.group * (self.head_dim + self.value_dim)


@dataclass(frozen=True)
class Choice:
    """What was chosen and why.

    Attributes:
        mode: "ring", "gather", "ulysses", "split keys" or "local".
        reason: text for people.
        balanced: queries (in a ring keys too) change places so that a causal mask gives all ranks the same work.
        cut_dim: in ulysses, what is cut during the call: heads (1) or batch entries (0).
    """

    mode: str
    reason: str
    balanced: bool = False
    cut_dim: int | None = None


def choose_mode(work: Work, mode: str = "auto", link: Link = LINKS["cpu"]) -> Choice:
    """The way for one call; raises `LayoutError` when a mode that was asked for cannot serve it."""
    cut_dim, parts = 1, work.heads
    if parts < work.ranks and work.batch > parts:
        cut_dim, parts = 0, work.batch
    times, notes = {}, []
    balance = {name: work.causal and _time(work, name, link, True) < _time(work, name, link, False)
               for name in ("ring", "gather")}  # fmt: skip
    for name in ("gather", "ring", "ulysses"):
        why_not = _refusal(work, name, parts)
        if why_not:
            notes.append(f"{name}: {why_not}")
        else:
            seconds = _ulysses_time(work, link, parts) if name == "ulysses" else _time(work, name, link, balance[name])
            times[name] = seconds
            notes.append(f"{name}: {seconds * 1e3:.3g} ms")
    best = min(times, key=lambda name: times[name])
    if mode != "auto":
        if mode == "ulysses" and parts < 2:
            raise LayoutError(
                "scaled_dot_product_attention: attention_mode('ulysses') cuts heads or batch entries, but this call "
                "has one key head and one batch entry; use 'ring', 'gather' or 'auto'"
            )
        best = mode
    reason = f"{'asked for' if mode != 'auto' else 'estimated'}; {', '.join(notes)}"
    return Choice(best, reason, balance.get(best, False), cut_dim if best == "ulysses" else None)


def _refusal(work: Work, name: str, parts: int) -> str:
    """Why "auto" does not take a way; "" if it may. The ring serves everything."""
    if name == "gather" and work.kv_bytes > HELD_BYTES:
        return f"{work.kv_bytes / 2**20:.0f} MiB of keys and values on every rank"
    if name == "ulysses" and parts < work.ranks:
        return f"{parts} head(s) for {work.ranks} ranks"
    if name == "ulysses" and work.mask_bytes > HELD_BYTES:
        return f"{work.mask_bytes / 2**20:.0f} MiB of mask on every rank"
    return ""


def _time(work: Work, name: str, link: Link, balanced: bool) -> float:
    """Seconds of the slowest rank, by ring or gather."""
    n = work.ranks
    pairs: float = slowest_pairs(work.q_sizes, work.kv_sizes, work.causal)
    moved = 0.0
    if balanced:
        pairs = sum(visible_pairs(rows, (0, sum(work.kv_sizes))) for rows in own_intervals(work.q_sizes)) / n
        moved = 2 * (work.q_bytes + (work.kv_bytes if name == "ring" else 0)) / n / link.bandwidth + 4 * link.latency
    compute = work.flops(pairs) / link.flops
    if name == "gather":
        whole = work.kv_bytes / link.copying  # put together in forward, taken apart in backward
        return compute + moved + 2 * (work.kv_bytes * (n - 1) / n / link.bandwidth + whole + link.latency)
    longest = max(work.kv_sizes) / max(1, sum(work.kv_sizes))
    step = work.kv_bytes * longest / link.bandwidth
    # Backward also carries the gradients of a block; the last of them, and the start of each message, are waited for.
    sent = 3 * (n - 1) * step
    busy = max(compute, sent) + step if link.hides else compute + sent
    return busy + moved + 3 * (n - 1) * link.latency


def _ulysses_time(work: Work, link: Link, parts: int) -> float:
    n = work.ranks
    pairs = float(sum(work.kv_sizes) * sum(work.q_sizes))
    if work.causal:
        pairs = sum(visible_pairs(rows, (0, sum(work.kv_sizes))) for rows in own_intervals(work.q_sizes))
    compute = work.flops(pairs * (-(-parts // n)) / max(1, parts)) / link.flops
    longest = max(max(s) / max(1, sum(s)) for s in (work.q_sizes, work.kv_sizes))
    sent = 2 * (work.q_bytes + work.kv_bytes) * longest * (n - 1) / n
    return compute + sent / link.bandwidth + 4 * link.latency


def slowest_pairs(q_sizes: Sizes, kv_sizes: Sizes, causal: bool) -> int:
    """Pairs of a query and a key that the busiest rank has with contiguous shards."""
    total = sum(kv_sizes)
    if not causal:
        return max(q_sizes) * total
    return max(visible_pairs(rows, (0, total)) for rows in own_intervals(q_sizes))


def visible_pairs(rows: Interval, columns: Interval) -> int:
    """Pairs (i, j) with j <= i of the two intervals."""
    (a, b), (c, d) = rows, columns
    full = max(0, b - max(a, d)) * (d - c)
    top, bottom = max(a, c), min(b, d)
    if top >= bottom:
        return full
    first, last = top - c + 1, bottom - c
    return full + (first + last) * (bottom - top) // 2
