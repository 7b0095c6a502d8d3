"""Fourier transforms over cut and uncut dims, odd lengths, several dims, all norms."""

import torch
from torch import Tensor

from dpzoo.testing import OpCase, op_test

SHAPE = (2, 3, 9, 7)


def real(t: Tensor) -> Tensor:
    """Complex results as pairs of real numbers."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def _case(name: str, fn, covers: str, shard: int = 2, **kwargs) -> OpCase:
    return OpCase(name, fn=lambda x: real(fn(x)), shape=SHAPE, shard=shard, covers=(covers,), **kwargs)


CASES = [
    _case("fft, cut dim", lambda x: torch.fft.fft(x, dim=2), "fft.fft"),
    _case("fft, uncut dim", lambda x: torch.fft.fft(x, dim=-1), "fft.fft"),
    _case("fft, longer, ortho", lambda x: torch.fft.fft(x, n=12, dim=2, norm="ortho"), "fft.fft"),
    _case("fft, shorter", lambda x: torch.fft.fft(input=x, n=4, dim=-2), "fft.fft"),
    _case("ifft", lambda x: torch.fft.ifft(x, dim=2), "fft.ifft"),
    _case("rfft", lambda x: torch.fft.rfft(x, dim=2), "fft.rfft"),
    _case("irfft", lambda x: torch.fft.irfft(torch.complex(x, x.sin()), n=9, dim=2), "fft.irfft"),
    _case("hfft", lambda x: torch.fft.hfft(x, dim=2), "fft.hfft"),
    _case("ihfft", lambda x: torch.fft.ihfft(x, dim=2), "fft.ihfft"),
    _case("fft2", lambda x: torch.fft.fft2(x), "fft.fft2", mesh2d=(2, 3)),
    _case("ifft2", lambda x: torch.fft.ifft2(x, norm="forward"), "fft.ifft2"),
    _case("rfft2", lambda x: torch.fft.rfft2(x), "fft.rfft2", mesh2d=(2, 3)),
    _case("irfft2 of rfft2", lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:]), "fft.irfft2"),
    _case("last dim cut", lambda x: torch.fft.rfft2(x), "fft.rfft2", shard=3),
    _case("fftn", lambda x: torch.fft.fftn(x), "fft.fftn"),
    _case("ifftn over chosen dims", lambda x: torch.fft.ifftn(x, dim=(1, 2)), "fft.ifftn"),
    _case("fftn over one dim, given as a number", lambda x: torch.fft.fftn(x, s=5, dim=2), "fft.fftn"),
    _case("rfftn with sizes", lambda x: torch.fft.rfftn(x, s=(4, 8), dim=(1, 2)), "fft.rfftn"),
    _case("irfftn", lambda x: torch.fft.irfftn(torch.complex(x, x.cos()), s=(9, 12)), "fft.irfftn"),
    _case("fftshift", lambda x: torch.fft.fftshift(x, dim=(2, 3)), "fft.fftshift"),
    _case("ifftshift, all dims", lambda x: torch.fft.ifftshift(x), "fft.fftshift"),
]
test_fft = op_test(CASES)
