"""BLPA: the fixed-range quantizer against brute force, and one code for each unit of convolution, BN and ReLU."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.codecs import BlockMean, SixSigma, TensorMeta, sixsigma
from lowtide.policy.methods import Blpa

WIDTHS = (1, 2, 4, 8)


def brute_force(x, bits):
    """The formula of the docstring, channel by channel in float64, with statistics rounded to float32."""
    x = x.double().numpy()
    out, n = np.empty_like(x), 2**bits
    for channel in range(x.shape[1]):
        values = x[:, channel]
        mean = float(np.float32(values.mean()))
        std = float(np.float32(np.sqrt(np.square(values - mean).mean())))
        code = np.clip(np.floor((values - mean) / std * (n / 6)) + n // 2, 0, n - 1)
        out[:, channel] = (code - n / 2 + 0.5) * 6 / n * std + mean
    return torch.from_numpy(out)


FORMS = {
    "matrix": lambda: torch.randn(200, 7),
    "rows": lambda: torch.randn(6, 5, 40),
    "maps": lambda: torch.randn(4, 5, 9, 10) * 3 + 2,
    "one channel": lambda: torch.randn(4, 1, 9, 10),
    "one sample": lambda: torch.randn(1, 3, 30, 20),
    "channels last": lambda: torch.randn(4, 5, 9, 10).contiguous(memory_format=torch.channels_last),
    "channels outermost": lambda: torch.randn(5, 4, 9, 10).transpose(0, 1),
    "channels in the middle": lambda: torch.randn(9, 5, 4, 10).permute(2, 1, 3, 0),
    "volumes channels last": lambda: torch.randn(2, 3, 4, 5, 6).contiguous(memory_format=torch.channels_last_3d),
    "slice": lambda: torch.randn(4, 10, 9, 10)[:, ::2, 1:],
}


@pytest.mark.parametrize("chunk", [20, 2**18])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", WIDTHS)
def test_values_are_those_of_the_formula(bits, form, chunk, monkeypatch):
    monkeypatch.setattr(sixsigma, "_CHUNK", chunk)
    monkeypatch.setattr(sixsigma, "_SUMMED", chunk)
    torch.manual_seed(0)
    x = FORMS[form]()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = SixSigma(bits).encode(x.to(dtype), key=0).decode()
        # One rounding to the type, and the last bits of float64.
        torch.testing.assert_close(out.double(), brute_force(x.to(dtype), bits), rtol=torch.finfo(dtype).eps, atol=1e-9)


@pytest.mark.parametrize("bits", WIDTHS)
def test_error_is_half_a_bin_inside_and_the_distance_beyond(bits):
    torch.manual_seed(0)
    x = torch.randn(64, 4, 16, 16)
    x[0, :, 0, 0] = torch.tensor([9.0, -9.0, 20.0, -20.0])
    mean, std = (s.view(1, -1, 1, 1) for s in (x.mean((0, 2, 3)), x.std((0, 2, 3), correction=0)))
    out = SixSigma(bits).encode(x, key=0).decode()
    error, inside = (out - x).abs() / std, (x - mean).abs() <= 3 * std
    half = 3 / 2**bits
    assert 0.9 < inside.float().mean() < 1
    assert float(error[inside].max()) <= half + 1e-5
    assert float(error[inside].max()) > 0.95 * half  # the bound is reached: the bins are no finer than they say
    clipped = mean + (3 - half) * std * (x - mean).sign()
    torch.testing.assert_close(out[~inside], clipped.expand_as(x)[~inside], rtol=1e-5, atol=1e-5)


def test_every_run_of_threads_gives_the_same_bytes():
    """Torch splits long sums among threads. Here all that is left of them is the rounding, which shows their order."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    for shape in ((3, 1, 300, 301), (5, 2, 150, 151), (40, 33, 30, 30)):
        x = torch.randn(shape) * 10 ** torch.empty(shape).uniform_(-6, 6)
        order = torch.randperm(x[0, 0].numel())
        x = torch.cat([x, -x.flatten(2)[:, :, order].view(shape)])
        found = []
        try:
            for count in (1, 2, 4):
                torch.set_num_threads(count)
                found.append(SixSigma().encode(x, key=0).buffers)
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


class Large(TorchDispatchMode):
    """Bytes of all fresh memory beyond the chunks that values are widened in."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > 8 * sixsigma._CHUNK:
                self.made[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return out


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_no_full_size_temporary(form):
    x = torch.randn(1, 8, 1024, 512).contiguous(memory_format=form)
    with Large() as encoding:
        packed = SixSigma().encode(x, key=0)
    encoding.made.pop(x.untyped_storage().data_ptr(), None)
    assert sum(encoding.made.values()) <= x.nbytes // 2  # codes, unpacked and packed
    with Large() as decoding:
        out = packed.decode()
    decoding.made.pop(out.untyped_storage().data_ptr())
    decoding.made.pop(packed.buffers[0].untyped_storage().data_ptr(), None)
    assert sum(decoding.made.values()) <= x.nbytes // 2


# ---------------------------------------------------------------- the method


class Units(nn.Module):
    """Two units of convolution, BN and ReLU, then a convolution whose gradient comes in exactly."""

    def __init__(self):
        super().__init__()
        self.one, self.norm1, self.relu1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.two, self.norm2, self.relu2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.relu1(self.norm1(self.one(x)))
        return self.last(self.relu2(self.norm2(self.two(x))))


@pytest.fixture
def units():
    torch.manual_seed(0)
    model, x = Units(), torch.randn(4, 3, 9, 9)
    for norm in (model.norm1, model.norm2):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    return model, x


def gradients(model, x, context):
    """The loss is outside, and therefore exact."""
    model.zero_grad()
    with context as session:
        out = model(x)
    torch.manual_seed(1)
    (out * torch.randn_like(out)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), session


def blpa(model, bits=4, faithful=False, seed=0):
    return lowtide.compress(model, "blpa", bits=bits, faithful=faithful, seed=seed, min_numel=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("faithful", [False, True])
def test_a_unit_keeps_one_code_and_one_mask(units, bits, faithful):
    model, x = units
    _, session = gradients(model, x, blpa(model, bits, faithful))
    report = session.report()
    codec = SixSigma(bits) if faithful else BlockMean(8, 2, bits, 256)
    sites = {(s.site.module, s.site.op): s for s in report.sites if s.codec}
    assert {k: s.codec for k, s in sites.items()} == {
        ("norm1", "NativeBatchNorm"): str(codec),
        ("relu1", "Relu"): "rebuilt + mask",
        ("norm2", "NativeBatchNorm"): str(codec),
        ("relu2", "Relu"): "rebuilt + mask",
    }
    maps = TensorMeta.of(torch.empty(4, 8, 9, 9))
    mask = maps.numel // 8
    if faithful:
        assert codec.packed_nbytes(maps) == maps.numel * bits // 8 + 8 * 8
    statistics = 2 * 8 * 4  # mean and scale of each of a norm's 8 channels
    assert report.stored_nbytes == 2 * (codec.packed_nbytes(maps) + mask + statistics)


@pytest.mark.parametrize("faithful", [False, True])
def test_error_falls_with_bits(units, faithful):
    model, x = units
    exact, _ = gradients(model, x, nullcontext())
    errors = []
    for bits in (2, 4, 8):
        found, _ = gradients(model, x, blpa(model, bits, faithful))
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[0] > errors[1] > errors[2]
    if faithful:
        assert errors[2] < 0.05
    else:  # a step is 15 times finer with 8 bits than with 4, and 5 times finer with 4 than with 2
        assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_random_rounding_leaves_no_bias_and_the_published_quantizer_does(units):
    model, x = units
    gradients(model, x, nullcontext())
    exact = model.last.weight.grad.clone()

    def runs(faithful, count):
        found = []
        for seed in range(count):
            gradients(model, x, blpa(model, 2, faithful, seed))
            found.append(model.last.weight.grad.clone())
        return torch.stack(found)

    drawn = runs(False, 200)
    spread = drawn.std(0) / len(drawn) ** 0.5
    assert bool((spread > 0).all())
    # 32 weights: five standard errors are passed by chance once in 50000 tries.
    assert bool(((drawn.mean(0) - exact).abs() <= 5 * spread).all())
    fixed_runs = runs(True, 3)
    assert torch.equal(fixed_runs[0], fixed_runs[1])  # nothing to average over
    assert torch.equal(fixed_runs[0], fixed_runs[2])
    # With as many bits, the mean over many steps is far better than what the published quantizer gives in every step.
    assert (fixed_runs[0] - exact).norm() > 3 * (drawn.mean(0) - exact).norm()


@pytest.mark.parametrize("bits", WIDTHS)
def test_published_gradient_is_that_of_the_decoded_input(units, bits):
    """The last convolution's weight gradient, from the formula alone: bins, BN, exact mask."""
    model, x = units
    seen = {}
    model.norm2.register_forward_hook(lambda module, args, out: seen.update(x=args[0].clone(), y=out.clone()))
    gradients(model, x, blpa(model, bits, faithful=True))
    inside, norm = seen["x"].detach(), model.norm2
    scale = norm.weight.detach() / (inside.var((0, 2, 3), correction=0) + norm.eps).sqrt()
    centred = brute_force(inside, bits) - inside.double().mean((0, 2, 3)).view(1, -1, 1, 1)
    rebuilt = centred * scale.view(1, -1, 1, 1) + norm.bias.detach().view(1, -1, 1, 1)
    rebuilt = torch.where(seen["y"] > 0, rebuilt, 0.0)
    torch.manual_seed(1)
    upstream = torch.randn(4, 4, 9, 9)
    wanted = torch.einsum("nohw,nihw->oi", upstream.double(), rebuilt)
    # A few roundings of float32 in each of 324 terms.
    bound = 324 * 2.0**-22 * float(rebuilt.abs().max() * upstream.abs().max())
    assert float((model.last.weight.grad[:, :, 0, 0].double() - wanted).abs().max()) <= bound


def test_what_is_no_unit_has_the_same_bits_and_sums_have_none():
    torch.manual_seed(0)

    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv, self.norm, self.next = (
                nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1),
            )  # fmt: skip
            self.head = nn.Linear(8, 5)

        def forward(self, x):
            x = self.stem(x)
            return self.head(self.next(torch.relu(x + self.norm(self.conv(x)))).flatten(2).mT)

    model, x = Residual(), torch.randn(4, 3, 16, 16)
    _, session = gradients(model, x, blpa(model, faithful=True))
    codecs = {s.site.module: s.codec for s in session.report().sites if s.codec}
    assert codecs == {
        "conv": "block_mean(4 bits)",
        "norm": "six_sigma(4 bits)",
        "": "rebuilt + mask",  # the ReLU after the addition, which is the next convolution's input
        "head": "group_quant(4 bits)",
    }


def test_values_that_need_more_bits_are_not_rebuilt_from_fewer():
    """A GELU's input wants 4 bits, whatever BN's has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 4, 1))
    x = torch.randn(4, 3, 16, 16)
    for bits, wanted in ((2, "block_mean(4 bits)"), (4, "rebuilt")):
        _, session = gradients(model, x, blpa(model, bits))
        found = {s.site.op: s.codec for s in session.report().sites if s.codec}
        assert found["Gelu"].replace("group_quant", "block_mean") == wanted


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="bits must be one of 1, 2, 3, 4, 5, 6, 7, 8; got 9"):
        Blpa(9)
    with pytest.raises(ValueError, match="bits must be one of 1, 2, 4, 8; got 3"):
        Blpa(3, faithful=True)
    assert Blpa(3).bits == 3
