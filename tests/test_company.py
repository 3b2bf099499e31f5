"""A model in company: parts of it are compiled, it is copied, saved, or called in other ways than a plain loop does."""

from __future__ import annotations

import copy
import io
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call

import lowtide
from ranks import on_two_ranks


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))


# ---------------------------------------------------------------- compiled parts


@pytest.mark.filterwarnings("ignore")  # torch.compile warns about any global module hook
@pytest.mark.parametrize("how", ["attach", "compress"])
def test_compiled_parts_are_compiled_once_for_all_sessions(how):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    model, x = net(), torch.randn(128, 64)
    part = nn.Sequential(nn.Linear(256, 256), nn.GELU())
    model.insert(2, torch.compile(part, backend=counter))
    if how == "attach":
        lowtide.attach(model, "lossless", min_numel=0)
    try:
        for step in range(4):
            if how == "attach":
                model(x).sum().backward()
            else:
                with lowtide.compress(model, "lossless", min_numel=0):
                    model(x).sum().backward()
            with torch.no_grad():
                model(x)  # no session, so no hooks of ours, and other code
            assert counter.frame_count == 2, f"after step {step}"
    finally:
        torch._dynamo.reset()


# ---------------------------------------------------------------- copies


def copied(model):
    return copy.deepcopy(model)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def copied_shallowly(model):
    return copy.copy(model)


@pytest.mark.parametrize("make", [copied, averaged, saved_and_loaded, copied_shallowly])
def test_a_copy_is_not_attached(make):
    model, x = net(), torch.randn(128, 64)
    handle = lowtide.attach(model, "actnn")
    other = make(model)
    other(x).sum().backward()
    assert handle.state_dict()["step"] == 0
    model(x).sum().backward()
    assert handle.state_dict()["step"] == 1
    if make is not copied_shallowly:  # which has the very hooks of the first
        second = lowtide.attach(other, "lossless")  # the copy is as free as any model
        other(x).sum().backward()
        assert (handle.state_dict()["step"], second.state_dict()["step"]) == (1, 1)
    handle.remove()
    other(x).sum().backward()
    assert handle.state_dict()["step"] == 1


# ---------------------------------------------------------------- other ways to call


def test_a_functional_call_is_exact_within_transforms_and_compressed_without():
    model, x = net(), torch.randn(128, 64)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(weights, x):
        return functional_call(model, weights, (x,)).square().mean()

    one = torch.func.grad(loss)
    each = torch.func.vmap(one, in_dims=(None, 0))
    plain = one(weights, x), each(weights, x)
    handle = lowtide.attach(model, "actnn")
    found = one(weights, x), each(weights, x)
    for ours, exact in zip(found, plain, strict=True):
        assert all(torch.equal(ours[name], exact[name]) for name in weights)
    assert all("torch.func" in s.why for s in handle.report().sites)
    loss({name: w.requires_grad_() for name, w in weights.items()}, x).backward()
    assert handle.report().ratio > 6
    assert not torch.equal(weights["0.weight"].grad, plain[0]["0.weight"])


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, x):
        return self.net(x).sum()


def test_a_forward_of_an_inner_module_is_not_seen_and_the_report_says_so():
    model = Trained()
    handle = lowtide.attach(model, "actnn")
    model.training_step(torch.randn(128, 64)).backward()
    (note,) = handle.report().notes
    assert "a module inside it does not count" in note
    assert "training_step" in note


# ---------------------------------------------------------------- what lives on after the forward


class Keeping(nn.Module):
    """Hands out what lies between its layers, as caches of keys and values are."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])

    def forward(self, x):
        between = []
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
            between.append(x)
        return x, between


@pytest.mark.parametrize("dropped", [True, False])
def test_what_is_let_go_before_backward_is_packed_when_backward_begins(dropped):
    torch.manual_seed(0)
    model, x = Keeping(), torch.randn(256, 64)
    handle = lowtide.attach(model, "actnn", min_numel=0)
    result, between = model(x)
    held = handle.report().held_nbytes
    assert held == 4 * x.numel() * x.element_size() - result.numel() * result.element_size()  # x, and two of the three
    loss = result.square().mean()
    if dropped:
        first = weakref.ref(between[0].untyped_storage())
        del between
        assert first() is not None
    del result
    gone = []
    model.layers[2].weight.register_hook(lambda g: gone.append(dropped and first() is None))
    loss.backward()
    assert gone == [dropped]
    report = handle.report()
    assert report.held_nbytes == (x.numel() * x.element_size() if dropped else held)
    late = [s for s in report.sites if s.site.op == "Addmm" and s.site.module != "layers.0"]
    assert {(s.state, s.why.startswith("the weight gradient")) for s in late} == {
        ("compressed", True) if dropped else ("held", False)
    }


def test_what_changed_after_the_forward_raises_though_it_is_let_go():
    torch.manual_seed(0)
    model, x = Keeping(), torch.randn(256, 64)
    lowtide.attach(model, "actnn", min_numel=0)
    result, between = model(x)
    between[0].zero_()
    del between
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


# ---------------------------------------------------------------- several processes


def _train_in_a_team(rank):
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for method in ("plain", "lossless", "actnn", "auto"):
        model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        handle = None if method == "plain" else lowtide.attach(model, method, min_numel=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(64, 64).cumsum(1).sin()).square().mean().backward()
            optimizer.step()
        weights = [full.full_tensor() if isinstance(full, DTensor) else full for full in model.parameters()]
        stored = None if handle is None else (handle.report().plain_nbytes, handle.report().stored_nbytes)
        found[method] = [w.detach() for w in weights], stored
    return found


def test_tensor_parallel_ranks_round_and_decide_alike(tmp_path):
    """More of this is in tests/stacks."""
    first, second = on_two_ranks(_train_in_a_team, tmp_path)
    for method, (weights, stored) in first.items():
        assert all(map(torch.equal, weights, second[method][0])), method
        exact = all(map(torch.equal, weights, first["plain"][0]))
        assert exact == (method in ("plain", "lossless"))
        if not exact:
            # Inputs of three layers, the GELU's input, and the part of the GELU's output that this rank has.
            assert stored[0] == 64 * (64 + 128 + 128 + 64) * 4
            assert stored[1] * 4 < stored[0]
