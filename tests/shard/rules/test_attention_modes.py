"""Ring, gather and ulysses give the same numbers, send what their arithmetic says, and hold what they promise."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpzoo.shard import LayoutError, attention_mode, manual_seed
from dpzoo.shard.collectives import gather_objects
from dpzoo.shard.kernels import attention_block, gather_attention, ulysses
from dpzoo.shard.rules import attention, attention_choice
from dpzoo.shard.traffic import count_traffic
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_error, layout_sizes, op_test
from dpzoo.testing.cutting import cut_tensor, plan_cut

MODES = ("ring", "gather", "ulysses")
FEW = {"ranks": (3,), "subgroups": False}
sdpa = F.scaled_dot_product_attention


def _in(mode: str, **options):
    def call(q, k, v, *rest):
        with attention_mode(mode):
            return sdpa(q, k, v, *rest, **options)

    return call


QKV, CROSS = [(2, 3, 9, 4)] * 3, [(2, 3, 9, 4), (2, 3, 7, 4), (2, 3, 7, 5)]
GROUPED = [(2, 6, 9, 4), (2, 3, 9, 4), (2, 3, 9, 4)]
LAYOUTS = ("even", "misaligned", "empty", "empty_first", "empty_last")

CASES = [
    row
    for mode in MODES
    for row in (
        OpCase(mode, fn=_in(mode), shape=QKV, shard=2, layouts=("even", "uneven", "empty")),
        OpCase(f"{mode} on a grid", fn=_in(mode), shape=QKV, mesh2d=(0, 2), ranks=(), subgroups=False),
        OpCase(f"{mode} cross", fn=_in(mode, scale=2.0), shape=CROSS, shard=2, layouts=LAYOUTS, **FEW),
        OpCase(f"{mode} causal", fn=_in(mode, is_causal=True), shape=CROSS, shard=2, layouts=LAYOUTS, **FEW),
        OpCase(f"{mode} three dims", fn=_in(mode), shape=[(2, 9, 4)] * 3, shard=1, **FEW),
        OpCase(f"{mode} grouped", fn=_in(mode, enable_gqa=True, is_causal=True), shape=GROUPED, shard=2, **FEW),
        OpCase(f"{mode} mask", fn=_in(mode), shape=[*CROSS, (2, 3, 9, 7)], shard=[2, 2, 2, 3], **FEW),
        OpCase(f"{mode} mask of keys", fn=_in(mode), shape=[*CROSS, (2, 1, 1, 7)], shard=[2, 2, 2, None], **FEW),
        OpCase(f"{mode} mask of heads", fn=_in(mode), shape=[*CROSS, (3, 9, 1)], shard=[2, 2, 2, 1], **FEW),
    )
]  # fmt: skip

test_modes = op_test(CASES)


def _normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _cut(full: Tensor, dim: int, sizes) -> Tensor:
    mesh = domain_mesh()
    return cut_tensor(full, mesh, plan_cut(full.shape, tuple(mesh.shape), dim, sizes))


@contextmanager
def _links(link):
    """Other speeds, and no memory of what was chosen with the usual ones."""
    before, attention_choice.LINKS["cpu"] = attention_choice.LINKS["cpu"], link
    attention._PLANS.clear()
    try:
        yield
    finally:
        attention_choice.LINKS["cpu"] = before
        attention._PLANS.clear()


SLOW_ARITHMETIC = attention_choice.Link(1e3, 1e15, 1e15, 0.0, True)  # balance always pays


def _derivatives(call, tensors: list[Tensor], twice: bool) -> list[Tensor]:
    """Output, gradients, and gradients of a function of the gradients; whole."""
    out = call(*tensors)
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=twice)
    found = [out, *grads]
    if twice:
        found += torch.autograd.grad(sum(g.square().sum() for g in grads), tensors)
    return [t.full_tensor().detach() if hasattr(t, "full_tensor") else t.detach() for t in found]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["uneven", "empty"])
@distributed(ranks=[2, 3, 4])
def test_modes_agree_with_one_process_to_second_order(ranks, layout, causal):
    full = [_normal(1, 4, 13, 6, seed=i) for i in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = _derivatives(lambda *t: sdpa(*t, is_causal=causal), [t.clone().requires_grad_() for t in full], True)
    for mode in MODES:
        sharded = [_cut(t, 2, layout).requires_grad_() for t in full]
        found = _derivatives(_in(mode, is_causal=causal), sharded, True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, mode=mode: f"{mode}: {m}")


@pytest.mark.parametrize("mode", ["ring", "gather"])
@distributed(ranks=[2, 3])
def test_balanced_causal(ranks, mode):
    full = [_normal(2, 2, 31, 4, seed=i) for i in range(2)] + [_normal(2, 2, 31, 5, seed=3)]
    expected = _derivatives(lambda *t: sdpa(*t, is_causal=True), [t.clone().requires_grad_() for t in full], False)
    for layout in ("even", "uneven", "empty_last"):
        sharded = [_cut(t, 2, layout).requires_grad_() for t in full]
        with _links(SLOW_ARITHMETIC):
            found = _derivatives(_in(mode, is_causal=True), sharded, False)
            ((_, choice),) = attention.attention_choices()
        assert choice.mode == mode and choice.balanced
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@distributed(ranks=3)
def test_what_was_received_is_fetched_again_when_it_is_large():
    full = [_normal(1, 5, 12, 4, seed=i) for i in range(3)]
    expected = _derivatives(sdpa, [t.clone().requires_grad_() for t in full], False)
    before = gather_attention.KEEP_BYTES, ulysses.KEEP_BYTES
    gather_attention.KEEP_BYTES = ulysses.KEEP_BYTES = 0
    try:
        for mode in ("gather", "ulysses"):
            found = _derivatives(_in(mode), [_cut(t, 2, "uneven").requires_grad_() for t in full], False)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    finally:
        gather_attention.KEEP_BYTES, ulysses.KEEP_BYTES = before


# ---------------------------------------------------------------------- what is sent
@distributed(ranks=[2, 3, 4])
def test_bytes_are_those_of_the_arithmetic(ranks):
    batch, heads, n, d, item = 2, 5, 24, 4, 4
    sizes, me = layout_sizes(n, ranks, "uneven"), domain_mesh().get_local_rank()
    full = [_normal(batch, heads, n, d, seed=i, dtype=torch.float32) for i in range(3)]
    row = batch * heads * d * item  # one token of q, k or v
    own_heads = [heads // ranks + (r < heads % ranks) for r in range(ranks)]
    by_heads = batch * d * item * sizes[me] * (heads - own_heads[me])  # tokens of the heads of others
    by_tokens = batch * d * item * own_heads[me] * (n - sizes[me])  # own heads of the tokens of others
    blocks = [sizes[(me - step) % ranks] for step in range(ranks)]
    expected = {
        # calls and bytes forward, then backward
        "gather": (1, 2 * row * max(sizes), 1, 2 * row * (n - sizes[me])),
        "ring": (ranks - 1, 2 * row * sum(blocks[:-1]),
                 2 * (ranks - 1), 2 * row * (sum(blocks[:-1]) + sum(blocks[1:]))),
        "ulysses": (2, 3 * by_heads + by_tokens, 2, by_heads + 3 * by_tokens),
    }  # fmt: skip
    for mode, (calls, nbytes, calls_back, nbytes_back) in expected.items():
        q, k, v = (_cut(t, 2, "uneven").requires_grad_() for t in full)
        with count_traffic() as forward:
            out = _in(mode)(q, k, v)
        g = torch.ones_like(out)
        with count_traffic() as backward:
            out.backward(g)
        assert (forward.calls, forward.nbytes) == (calls, nbytes), mode
        assert (backward.calls, backward.nbytes) == (calls_back, nbytes_back), mode


@distributed(ranks=3)
def test_latent_queries_do_not_move_keys():
    k, v = (_cut(_normal(2, 3, 60, 4, seed=i), 2, "uneven").requires_grad_() for i in range(2))
    q = _normal(2, 3, 2, 4).requires_grad_()
    with count_traffic() as traffic:
        sdpa(q, k, v).square().sum().backward()
    assert traffic.nbytes < k.numel()  # far less than the 8 bytes of each number


# ---------------------------------------------------------------------- what is held
class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any op makes."""

    largest, made_by = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if type(t) is Tensor and t.device.type != "meta" and t.nbytes > self.largest:
                self.largest, self.made_by = t.nbytes, f"{func} {tuple(t.shape)}"
        return out


@distributed(ranks=4)
def test_a_ring_holds_blocks_only():
    heads, n, d = 2, 512, 8
    full = [_normal(1, heads, n, d, seed=i, dtype=torch.float32) for i in range(3)]
    found = {}
    for mode in ("gather", "ring"):
        q, k, v = (_cut(t, 2, "even").requires_grad_() for t in full)
        with _Largest() as seen:
            torch.autograd.grad(_in(mode)(q, k, v).sum(), (q, k, v))
        found[mode] = seen.largest
    assert found["gather"] >= 2 * heads * n * d * 4
    assert found["ring"] <= 2 * heads * (n // 4) * d * 4, seen.made_by  # a block of keys and values


@distributed(ranks=2)
def test_scores_are_never_whole():
    """Not even with dropout, for which no kernel is used."""
    n = 512
    q, k, v = (_cut(_normal(1, 2, n, 4, seed=i, dtype=torch.float32), 2, "even").requires_grad_() for i in range(3))
    before, attention_block.CHUNK_BYTES = attention_block.CHUNK_BYTES, 2**16
    try:
        with _Largest() as seen:
            torch.autograd.grad(_in("ring", dropout_p=0.1)(q, k, v).sum(), (q, k, v))
    finally:
        attention_block.CHUNK_BYTES = before
    assert seen.largest <= 2 * 2**16, seen.made_by


# ---------------------------------------------------------------------- what is refused, chosen, rounded
@distributed(ranks=3)
def test_ulysses_needs_heads():
    q = _cut(_normal(1, 1, 9, 4), 2, "uneven")
    expect_error(lambda: _in("ulysses")(q, q, q), LayoutError, "one key head and one batch entry")
    torch.testing.assert_close(_in("auto")(q, q, q).full_tensor(), sdpa(*[q.full_tensor()] * 3))


@distributed(ranks=2)
def test_choices_are_kept_with_their_reasons():
    attention._PLANS.clear()
    q = _cut(_normal(1, 2, 9, 4), 2, "uneven")
    sdpa(q, q, q)
    sdpa(q, q, q)
    sdpa(_normal(1, 2, 3, 4), q, q)
    (layouts, first), (_, second) = attention.attention_choices()
    assert "dim 2 over 'domain': 3+6" in layouts and first.mode == "gather" and "ring" in first.reason
    assert second.mode == "split keys"


@pytest.mark.parametrize("mode", MODES)
@distributed(ranks=[1, 2, 4])
def test_error_in_bfloat16_does_not_grow_with_the_ranks(ranks, mode):
    plain = [_normal(1, 4, 64, 8, seed=i, dtype=torch.bfloat16) for i in range(3)]
    exact = [t.double().requires_grad_() for t in plain]
    sharded = [_cut(t, 2, "uneven").requires_grad_() for t in plain]
    out, expected = _in(mode)(*sharded), sdpa(*exact)
    assert out.dtype is torch.bfloat16
    out.float().square().sum().backward()
    expected.square().sum().backward()
    # One rounding of the result, and of each gradient, whatever the number of ranks.
    torch.testing.assert_close(out.full_tensor().double(), expected, rtol=2**-7, atol=2**-8)
    for found, want in zip(sharded, exact, strict=True):
        torch.testing.assert_close(found.grad.full_tensor().double(), want.grad, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("mode", MODES)
@distributed(ranks=2)
def test_half_precision_and_any_head_dim(mode):
    for dtype, tolerance in ((torch.float16, 2**-9), (torch.float32, 1e-6)):
        for d in (1, 3, 17, 80):
            plain = [_normal(1, 2, 12, d, seed=i, dtype=dtype) for i in range(3)]
            out = _in(mode)(*[_cut(t, 2, "uneven") for t in plain]).full_tensor()
            torch.testing.assert_close(out, sdpa(*plain), rtol=tolerance, atol=tolerance)


@distributed(ranks=3)
def test_ranks_agree_about_the_memory_order():
    """A later view must be one on all ranks or on none."""
    for mode, causal, layout in product(MODES, (False, True), ("empty", "tiny")):
        q, k, v = (_cut(_normal(2, 3, 9, 4, seed=i), 2, layout).requires_grad_() for i in range(3))
        out = _in(mode, is_causal=causal)(q, k, v)
        (dq,) = torch.autograd.grad(out.sum(), q)
        orders = gather_objects((out._spec.stride, dq._spec.stride), out._spec.layout.groups[0])
        assert len(set(orders)) == 1, (mode, causal, orders)
        assert out._spec.stride == sdpa(*[t.full_tensor() for t in (q, k, v)]).stride()


# ---------------------------------------------------------------------- dropout
DROPPED_IN = {
    "ring": (2, 2, 2), "gather": (2, 2, 2), "ulysses": (2, 2, 2), "heads": (1, 1, 1), "split": (None, 2, 2),
    "queries": (2, None, None),
}  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
@distributed(ranks=[1, 2, 3])
def test_dropout_is_the_same_for_any_number_of_ranks(ranks, causal):
    plain = [_normal(1, 2, 9, 8, seed=i) for i in range(3)]
    found = {}
    for name, dims in DROPPED_IN.items():
        manual_seed(7)
        cut = [t.clone() if d is None else _cut(t, d, "uneven") for t, d in zip(plain, dims, strict=True)]
        tensors = [t.requires_grad_() for t in cut]
        with attention_mode(name if name in MODES else "auto"):
            out = sdpa(*tensors, dropout_p=0.4, is_causal=causal)
        out.square().sum().backward()
        grads = [t.grad.full_tensor() if hasattr(t.grad, "full_tensor") else t.grad for t in tensors]
        found[name] = [out.full_tensor().detach(), *grads]
    for a, b in pairwise(found.values()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    marks = torch.stack([t.square().sum() for t in found["ring"]])
    expected = torch.tensor(DROPPED[causal], dtype=torch.float64)  # what one rank finds
    torch.testing.assert_close(marks, expected, rtol=1e-7, atol=0.0, msg=str(marks.tolist()))
    assert not torch.allclose(found["ring"][0], sdpa(*plain, is_causal=causal))


DROPPED = {
    False: (43.82905548932163, 552.5497460717141, 255.7038776153229, 184.26339124631843),
    True: (101.60373240021943, 303.9264086627785, 238.20893931644764, 1289.4119898135093),
}


@distributed(ranks=2)
def test_dropout_can_be_differentiated_twice():
    plain = [_normal(1, 2, 9, 4, seed=i) for i in range(3)]
    found = []
    for mode, sizes in (("ring", (5, 4)), ("ulysses", (9, 0)), ("gather", (2, 7))):
        manual_seed(3)
        found.append(_derivatives(_in(mode, dropout_p=0.3), [_cut(t, 2, sizes).requires_grad_() for t in plain], True))
    for a, b in pairwise(found):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
