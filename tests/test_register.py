"""Rules for other people's functions: what an autograd.Function saves is compressed once somebody says how."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.codecs import Cast, GroupQuant, Mask, ShapeOnly
from lowtide.report import COMPRESSED


class Rms(torch.autograd.Function):
    """RMS norm in one function, as fused kernels write it."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        ctx.save_for_backward(x, scale, weight)
        return x * scale * weight

    @staticmethod
    def backward(ctx, grad):
        x, scale, weight = ctx.saved_tensors
        xhat = x * scale
        g = grad * weight
        dx = scale * (g - xhat * (g * xhat).mean(-1, keepdim=True))
        return dx, (grad * xhat).flatten(0, -2).sum(0)


class Positive(torch.autograd.Function):
    """ReLU that keeps its whole input, and a copy of which only the shape is read."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x.clone())
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx, grad):
        x, form = ctx.saved_tensors
        return (grad * (x > 0)).expand(form.shape)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x):
        return self.b(Positive.apply(Rms.apply(self.a(x), self.weight)))


def gradient(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.fixture
def rules():
    undo = [
        lowtide.register_rule(Rms, "tensors[0]", need="propagate", why="it enters earlier layers' gradients"),
        lowtide.register_rule("Positive", "tensors[0]", need="lossless", codec=Mask(), why="only the sign is read"),
        lowtide.register_rule("Positive", "tensors[1]", need="lossless", codec=ShapeOnly(), why="only its shape is"),
    ]
    yield
    for each in undo:
        each()


def rows(report):
    return {str(row.site): row for row in report.sites}


def test_functions_without_a_rule_stay_exact_and_are_listed():
    model, x = Net(), torch.randn(128, 64)
    exact = gradient(model, x)
    with lowtide.attach(model, GroupQuant(4)) as handle:
        assert not torch.equal(gradient(model, x), exact)  # the linear layers' inputs
        found = rows(handle.report())
    for name in ("(model): Rms.tensors[0]", "(model): Positive.tensors[0]", "(model): Positive.tensors[1]"):
        assert (found[name].state, found[name].why) == ("exact", "no rule for this op")


@pytest.mark.usefixtures("rules")
def test_registered_functions_are_compressed():
    model, x = Net(), torch.randn(128, 64)
    exact = gradient(model, x)
    with lowtide.attach(model, "lossless") as handle:
        assert torch.equal(gradient(model, x), exact)
        found = rows(handle.report())
    assert found["(model): Positive.tensors[0]"].codec == "mask"
    assert found["(model): Positive.tensors[0]"].stored_nbytes == 128 * 64 // 8
    assert found["(model): Positive.tensors[1]"].stored_nbytes == 0
    with lowtide.attach(model, Cast("bfloat16")) as handle:
        off = gradient(model, x)
        found = rows(handle.report())
    row = found["(model): Rms.tensors[0]"]
    assert (row.state, row.why) == ("compressed", "it enters earlier layers' gradients")
    # A value in bfloat16 is off by 2**-9 of itself at most; xhat enters the gradient twice, and weights' inputs once.
    assert 0 < (off - exact).norm() <= 4 * 2**-9 * exact.norm()
    with lowtide.attach(model, "actnn") as handle:
        gradient(model, x)
        assert rows(handle.report())["(model): Rms.tensors[0]"].codec == "group_quant(4 bits)"


def test_a_rule_is_taken_back_and_replaced():
    model, x = Net(), torch.randn(128, 64)

    def codec():
        with lowtide.attach(model, "actnn") as handle:
            gradient(model, x)
            return rows(handle.report())["(model): Rms.tensors[0]"].codec

    first = lowtide.register_rule("Rms", "tensors[0]", need="linear", why="a test")
    assert codec() == "group_quant(2 bits)"
    second = lowtide.register_rule("Rms", "tensors[0]", need=lowtide.Need.EXPONENT, why="a test")
    assert codec() == "group_quant(8 bits)"
    first()
    assert codec() == "group_quant(8 bits)"
    second()
    second()
    assert codec() == ""


def test_a_rule_for_a_class_does_not_serve_another_of_its_name():
    undo = lowtide.register_rule(Rms, "tensors[0]", need="linear", why="a test")
    other = type("Rms", (torch.autograd.Function,), {"forward": Rms.forward, "backward": Rms.backward})
    model, x = Net(), torch.randn(128, 64)
    for function, state in ((Rms, "compressed"), (other, "exact")):
        with lowtide.compress(model, "actnn") as session:
            function.apply(model.a(x), model.weight).sum()
        row = next(row for row in session.report().sites if row.site.op == "Rms" and row.site.slot == "tensors[0]")
        assert row.state == state
    undo()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"function": 3}, TypeError, "function must be a torch.autograd.Function or its name; got 3"),
        ({"function": Rms.apply}, TypeError, "function must be a torch.autograd.Function or its name"),
        ({"function": nn.Linear}, TypeError, "function must be a torch.autograd.Function or its name"),
        ({"slot": "input"}, ValueError, r"slot must be 'tensors\[i\]'"),
        ({"slot": 0}, ValueError, r"slot must be 'tensors\[i\]'"),
        ({"need": "much"}, ValueError, "need must be one of lossless, linear, batch, propagate"),
        ({"why": ""}, ValueError, "why must say"),
        ({"codec": Mask()}, ValueError, "codec goes with need='lossless'"),
        ({"need": "lossless"}, ValueError, "codec goes with need='lossless'"),
        ({"need": "lossless", "codec": GroupQuant(2)}, ValueError, "codec must give back exactly what is read"),
    ],
)
def test_rules_that_make_no_sense_are_refused(change, error, message):
    given = {"function": "Rms", "slot": "tensors[0]", "need": "linear", "why": "a test", **change}
    with pytest.raises(error, match=message):
        lowtide.register_rule(given.pop("function"), given.pop("slot"), **given)
    with lowtide.attach(model := Net(), "actnn") as handle:
        gradient(model, torch.randn(128, 64))
        assert rows(handle.report())["(model): Rms.tensors[0]"].state == "exact"


# ---------------------------------------------------------------- functions of other packages


def silu_mul(package):
    """A function as Liger-Kernel has it: backward writes its results over what it reads."""

    class LigerSiLUMulFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return torch.nn.functional.silu(a) * b

        @staticmethod
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            s = torch.sigmoid(a)
            for_a, for_b = grad * b * s * (1 + a * (1 - s)), grad * a * s
            a.data.copy_(for_a)
            b.data.copy_(for_b)
            return a, b

    LigerSiLUMulFunction.__module__ = f"{package}.ops.swiglu"
    return LigerSiLUMulFunction


@pytest.mark.parametrize("method", ["actnn", "auto"])
def test_functions_of_known_packages_have_rules(method):
    function = silu_mul("liger_kernel")
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Linear(64, 128), torch.nn.Linear(64, 128), torch.nn.Linear(128, 8)])
    x = torch.randn(64, 64)

    def step(session=None):
        model.zero_grad()
        if session is None:
            loss = model[2](function.apply(model[0](x), model[1](x))).square().sum()
        else:
            with session:
                loss = model[2](function.apply(model[0](x), model[1](x))).square().sum()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact = step()
    for i in range(3):  # auto measures in the first of them, and has its bits in the third
        session = lowtide.compress(model, method, bits=8)
        found = step(session)
        assert float((found - exact).norm() / exact.norm()) < (0.05 if i == 2 or method == "actnn" else 0.6)
        rows = [s for s in session.report().sites if s.site.op == "LigerSiLUMulFunction"]
        assert [s.state for s in rows] == [COMPRESSED] * 2


def test_a_function_of_the_same_name_elsewhere_has_none():
    function = silu_mul("somebody")
    model = torch.nn.Linear(64, 128)
    with lowtide.compress(model, "actnn") as session:
        loss = function.apply(model(torch.randn(64, 64)), torch.randn(64, 128)).sum()
    del loss
    rows = [s for s in session.report().sites if s.site.op == "LigerSiLUMulFunction"]
    assert rows
    assert {s.why for s in rows} == {"no rule for this op"}


def test_auto_tries_noise_in_a_function_with_a_rule():
    """The node of a function of Python cannot be called as those of torch can."""
    undo = lowtide.register_rule(Rms, "tensors[0]", need="propagate", why="it is normalized")
    try:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 128)])
        weight = nn.Parameter(torch.ones(128))
        x, errors = torch.randn(64, 64), []
        model[1](Rms.apply(model[0](x), weight)).square().sum().backward()
        exact = model[0].weight.grad.clone()
        for _ in range(3):
            model.zero_grad()
            with lowtide.compress(model, "auto", bits=6) as session:
                loss = model[1](Rms.apply(model[0](x), weight)).square().sum()
            loss.backward()
            errors.append(float((model[0].weight.grad - exact).norm() / exact.norm()))
        assert errors[-1] < 0.1
        assert [s.state for s in session.report().sites if s.site.op == "Rms"][:1] == [COMPRESSED]
    finally:
        undo()
