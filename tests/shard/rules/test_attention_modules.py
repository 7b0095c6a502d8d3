"""torch's own attention modules on cut sequences, unmodified: no gather, no fast path that knows nothing of shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpzoo.shard import attention_mode, manual_seed, strict
from dpzoo.testing import OpCase, distributed, domain_mesh, expect_same_error, op_test
from dpzoo.testing.cutting import cut_tensor, plan_cut

ONE = {"ranks": (3,), "subgroups": False, "layouts": ("uneven", "empty")}
causal = nn.Transformer.generate_square_subsequent_mask


class _With(nn.Module):
    """A module called in a way of its own."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.module, *inputs)


def _self(
    row: str, width: int = 8, batch_first: bool = True, training: bool = True, kwargs: Any = None, **options: Any
) -> OpCase:
    """Self-attention; `kwargs()` are arguments of the call."""

    def build() -> nn.Module:
        module = nn.MultiheadAttention(width, 2, batch_first=batch_first, **options).train(training)
        given = {"need_weights": False} if kwargs is None else kwargs()
        return _With(module, lambda m, x: [y for y in m(x, x, x, **given) if y is not None])

    return OpCase(row, build, (2, 9, width) if batch_first else (9, 2, width), int(batch_first), **ONE)


def _padding() -> Tensor:
    """True for what is padding; the last keys of all samples, and the first one of a sample."""
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, -2:], mask[0, 0] = True, True
    return mask


def _upper() -> Tensor:
    return torch.ones(9, 9, dtype=torch.bool).triu(1)


def _layer(kind: type[nn.Module], **options: Any) -> nn.Module:
    return kind(8, 2, 16, 0.0, batch_first=True, **options)


CASES = [
    OpCase("sequence first", lambda: _With(nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x, need_weights=False)[0]),
           (9, 2, 8), 0, ranks=(2, 3), subgroups=False, covers=("multi_head_attention_forward",)),
    OpCase("unbatched", lambda: _With(nn.MultiheadAttention(8, 2), lambda m, x: m(x, x, x)), (9, 8), 0, **ONE),
    _self("batch first"),
    _self("eval", training=False),
    _self("weights", kwargs=dict),
    _self("weights in eval", training=False, kwargs=dict),
    _self("weights of heads", kwargs=lambda: {"average_attn_weights": False}),
    _self("padding", kwargs=lambda: {"key_padding_mask": _padding(), "need_weights": False}),
    _self("padding in eval", training=False, kwargs=lambda: {"key_padding_mask": _padding()}),
    _self("mask", kwargs=lambda: {"attn_mask": _upper(), "need_weights": False}),
    _self("mask of heads",
          kwargs=lambda: {"attn_mask": torch.arange(324).view(4, 9, 9) % 5 == 0, "need_weights": False}),
    _self("mask and padding",
          kwargs=lambda: {"attn_mask": _upper(), "key_padding_mask": _padding(), "need_weights": False}),
    _self("causal", kwargs=lambda: {"attn_mask": _upper(), "is_causal": True, "need_weights": False}),
    _self("bias of keys", add_bias_kv=True),
    _self("zero key", add_zero_attn=True),
    _self("bias, zero and padding", add_bias_kv=True, add_zero_attn=True,
          kwargs=lambda: {"key_padding_mask": _padding(), "need_weights": False}),
    OpCase("other widths", lambda: _With(nn.MultiheadAttention(8, 2, kdim=6, vdim=5, batch_first=True),
           lambda m, q, k, v: m(q, k, v, need_weights=False)[0]), [(2, 9, 8), (2, 7, 6), (2, 7, 5)], 1, **ONE),
    OpCase("batch cut", lambda: _With(nn.MultiheadAttention(8, 2, batch_first=True), lambda m, x: m(x, x, x)),
           (5, 3, 8), 0, **ONE),
    OpCase("encoder layer", lambda: _layer(nn.TransformerEncoderLayer), (2, 9, 8), 1, **ONE),
    OpCase("encoder layer, eval", lambda: _layer(nn.TransformerEncoderLayer, norm_first=True).eval(), (2, 9, 8), 1,
           **ONE),
    OpCase("encoder layer, mask", lambda: _With(_layer(nn.TransformerEncoderLayer).eval(),
           lambda m, x: m(x, src_mask=causal(9, dtype=torch.float64), is_causal=True)), (2, 9, 8), 1, **ONE),
    OpCase("encoder, padding", lambda: _With(nn.TransformerEncoder(_layer(nn.TransformerEncoderLayer), 2).eval(),
           lambda m, x: m(x, src_key_padding_mask=_padding())), (2, 9, 8), 1, **ONE),
    OpCase("decoder layer", lambda: _layer(nn.TransformerDecoderLayer), [(2, 9, 8), (2, 7, 8)], 1, **ONE),
    OpCase("transformer", lambda: _With(nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True),
           lambda m, x, y: m(x, y, tgt_mask=causal(7, dtype=torch.float64), tgt_is_causal=True)),
           [(2, 9, 8), (2, 7, 8)], 1, **ONE),
]  # fmt: skip

test_modules = op_test(CASES)


def _cut(full: Tensor, dim: int, layout: str = "uneven") -> Tensor:
    mesh = domain_mesh()
    return cut_tensor(full, mesh, plan_cut(full.shape, tuple(mesh.shape), dim, layout))


@distributed(ranks=2)
def test_evaluation_without_gradients_takes_no_fast_path():
    """There torch runs fused and nested kernels in plain modules; padded tokens then come out as zeros, so they are
    not compared."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(_layer(nn.TransformerEncoderLayer), 2).double().eval()
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double().eval()
    x, padding = torch.randn(2, 9, 8, dtype=torch.float64), torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 6:] = True
    with torch.no_grad(), strict():
        sharded = _cut(x, 1)
        torch.testing.assert_close(encoder(sharded).full_tensor(), encoder(x))
        found = encoder(sharded, src_key_padding_mask=padding).full_tensor()
        expected = encoder(x, src_key_padding_mask=padding)
        torch.testing.assert_close(found[~padding], expected[~padding])
        for a, b in zip(attention(*[sharded] * 3), attention(x, x, x), strict=True):
            torch.testing.assert_close(a.full_tensor(), b)


@pytest.mark.parametrize("need_weights", [True, False])
@distributed(ranks=[1, 3])
def test_dropout_in_training(ranks, need_weights):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    found = []
    for dim in (1, 0):
        manual_seed(1)
        found.append(module(*[_cut(x, dim)] * 3, need_weights=need_weights)[0].full_tensor())
    torch.testing.assert_close(*found)
    assert not torch.allclose(found[0], module.eval()(x, x, x)[0])


@pytest.mark.parametrize("mode", ["ring", "gather", "ulysses"])
@distributed(ranks=3)
def test_the_modes_reach_modules(mode):
    torch.manual_seed(0)
    layer = _layer(nn.TransformerEncoderLayer).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    layer.zero_grad()
    with attention_mode(mode), strict():
        layer(_cut(x, 1)).square().sum().backward()
    for found, want in zip(layer.parameters(), expected, strict=True):
        torch.testing.assert_close(found.grad, want, rtol=1e-10, atol=1e-11)


WRONG = {
    "width": lambda m, x: m(x[..., :4], x, x),
    "padding": lambda m, x: m(x, x, x, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool)),
    "mask": lambda m, x: m(x, x, x, attn_mask=torch.zeros(9, 5, dtype=torch.bool)),
    "causal without mask": lambda m, x: m(x, x, x, is_causal=True),
    "keys and values": lambda m, x: m(x, x, x[:, :5]),
}


@pytest.mark.parametrize("name", list(WRONG))
@distributed(ranks=2)
def test_what_torch_refuses(name):
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    expect_same_error(lambda x: WRONG[name](module, x), torch.randn(2, 9, 8), 1)


@distributed(ranks=2)
def test_the_function_under_the_module():
    torch.manual_seed(0)
    x, w, b = torch.randn(9, 2, 8), torch.randn(24, 8), torch.randn(24)
    out, bias = torch.randn(8, 8), torch.randn(8)

    def call(t: Tensor) -> Tensor:
        return F.multi_head_attention_forward(
            t, t, t, 8, 2, w, b, None, None, False, 0.0, out, bias, need_weights=False
        )[0]

    torch.testing.assert_close(call(_cut(x, 0)).full_tensor(), call(x))
