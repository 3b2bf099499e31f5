"""Whole steps on the CPU and on the stand-in: ``python -m standin.steps '["counted", CASES]'``; or "networks", NAMES.

Prints what was found as JSON. It needs ``LOWTIDE_KERNELS=reference``, so that both compute with the same kernels.
"""

import json
import sys
import warnings

import torch
from torch import nn
from torch.nn import functional as F

import lowtide
import standin
from zoo import ZOO


class Block(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.n1, self.n2 = nn.BatchNorm2d(b), nn.BatchNorm2d(b)
        self.short = nn.Conv2d(a, b, 1, stride, bias=False) if a != b else nn.Identity()

    def forward(self, x):
        return (self.n2(self.c2(self.n1(self.c1(x)).relu())) + self.short(x)).relu()


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.n1, self.n2 = heads, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out, self.up, self.down = (nn.Linear(d, n * d) for n in (3, 1, 4, 1))
        self.down = nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = ((q @ k.transpose(-1, -2)) / 8).softmax(-1) @ v
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


def cnn():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        Block(16, 16, 1),
        Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return net, torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))


def gpt():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(500, 64), Layer(64, 4), Layer(64, 4), nn.LayerNorm(64), nn.Linear(64, 500))
    tokens = torch.randint(0, 500, (4, 64))
    return net, tokens, tokens


class Standardised(nn.Conv2d):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, 3, bias=False)

    def forward(self, x):
        w = F.batch_norm(self.weight.view(1, len(self.weight), -1), None, None, None, None, True, 0.0, 1e-6)
        return F.conv2d(x, w.view_as(self.weight), padding=1)


class Cast(nn.Linear):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x):
        return F.linear(x.bfloat16(), self.weight.to(torch.bfloat16)).float()


def weights():
    torch.manual_seed(0)
    parts = nn.utils.parametrizations
    net = nn.Sequential(
        Standardised(3, 16),
        nn.ReLU(),
        parts.spectral_norm(nn.Conv2d(16, 16, 3, 1, 1)),
        nn.ReLU(),
        parts.weight_norm(nn.Conv2d(16, 16, 3, 1, 1)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        Cast(16, 10),
    )
    return net, torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))


def train(make, device, method, steps, options):
    net, x, y = make()
    net, x, y = net.to(device), x.to(device), y.to(device)
    guard = options.pop("guard", False) and lowtide.Guard(every=2)
    handle = lowtide.attach(net, method, min_numel=1024, guard=guard, **options)
    gradients, waits = [], []
    for _ in range(steps):
        with standin.watch() as seen:
            F.cross_entropy(net(x).flatten(0, -2), y.flatten()).backward()
        waits.append({" ".join(where): count for where, count in seen.items()})
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in net.parameters()]))
        net.zero_grad()
    report = handle.report()
    notes, remade = list(report.notes), sum("made again" in row.why for row in report.sites)
    handle.remove()
    return gradients, waits, report.kernels, notes, remade


def counted(cases):
    found = {}
    for name, method, steps, options in cases:
        make = {"cnn": cnn, "gpt": gpt, "weights": weights}[name]
        here, _, _, _, _ = train(make, "cpu", method, steps, dict(options))
        there, waits, served, notes, remade = train(make, "tide", method, steps, dict(options))
        equal = [torch.equal(a, b) for a, b in zip(here, there, strict=True)]
        label = " ".join([name, method, *options])
        found[label] = {
            "equal": equal,
            "waits": waits,
            "served": sorted(served.get("tide", {})),
            "notes": notes,
            "remade": remade,
        }
    return found


# ------------------------------------------------------------ what is looked at later


class Shifted(Standardised):
    """Its op does not save the bias, which is zero at first."""

    def __init__(self, *given):
        super().__init__(*given)
        self.register_buffer("shift", torch.zeros(len(self.weight)))

    def forward(self, x):
        w = F.batch_norm(self.weight.view(1, len(self.weight), -1), None, None, None, self.shift, True, 0.0, 1e-6)
        return F.conv2d(x, w.view_as(self.weight), padding=1)


def exact(net, x):
    net(x).square().sum().backward()
    gradient = torch.cat([p.grad.flatten().cpu() for p in net.parameters()])
    net.zero_grad()
    return gradient


def refuted():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), Shifted(3, 16)).to("tide")
    x = torch.randn(4, 3, 16, 16).to("tide")
    handle, equal, told = lowtide.attach(net, "lossless", min_numel=16), [], []
    for step in range(4):
        if step == 1:
            net[1].shift.fill_(0.5)
        with handle._session.aside():
            truth = exact(net, x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            equal.append(torch.equal(exact(net, x), truth))
        told.append([str(w.message) for w in caught if "made again" in str(w.message)])
    whys = [row.why for row in handle.report().sites if tuple(row.site)[:3] == ("1", "Convolution", "weight")]
    return {"equal": equal, "told": told, "whys": whys}


def changed(first, second, x):
    torch.manual_seed(0)
    net, x = nn.Sequential(first, second).to("tide"), x.to("tide")
    handle = lowtide.attach(net, "lossless", min_numel=16)
    exact(net, x)
    loss = net(x).square().sum()
    second.weight.data.mul_(2.0)
    loss.backward()
    try:
        net(x)
        net(x)
    except RuntimeError as error:
        return str(error)
    finally:
        handle.remove()
    return "nothing was said"


# ------------------------------------------------------------ the networks of tests/zoo.py


def moved(batch, device):
    if isinstance(batch, dict):
        return {key: value.to(device) for key, value in batch.items()}
    return tuple(value.to(device) for value in batch)


def carried(net, device):
    """``net.to(device)``, where tied parameters stay tied: for a device from outside of torch it makes new ones."""
    names = [name for name, _ in net.named_parameters(remove_duplicate=False)]
    first = {}
    tied = {name: first.setdefault(net.get_parameter(name), name) for name in names}
    net.to(device)
    for name, one in tied.items():
        if name != one:
            owner, _, last = name.rpartition(".")
            setattr(net.get_submodule(owner), last, net.get_parameter(one))
    return net


def steps_of(name, device, method):
    torch.manual_seed(0)
    net, batch, loss_fn = ZOO[name]()
    net = carried(net.train(), device)
    batch, found, waits = moved(batch, device), [], []
    handle = None if method is None else lowtide.attach(net, method, min_numel=256)
    for step in range(1 if method is None else 2):
        torch.manual_seed(step)
        with standin.watch() as seen:
            loss_fn(net, batch).backward()
        waits.append({" ".join(where): count for where, count in seen.items() if where[1] != "(user)"})
        found += [p.grad.cpu() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
    packed = 0
    if handle is not None:
        packed = handle.report().plain_nbytes - handle.report().stored_nbytes
        handle.remove()
    return found, waits, packed


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


def networks(names, methods):
    found = {}
    for name in names:
        try:
            plain = same(steps_of(name, "cpu", None)[0], steps_of(name, "tide", None)[0])
        except Exception as error:
            found[name] = {"cannot": f"{type(error).__name__}: {error}"[:200]}
            continue
        found[name] = {"plain": plain}
        for method in methods:
            here, _, _ = steps_of(name, "cpu", method)
            there, waits, packed = steps_of(name, "tide", method)
            found[name][method] = {"equal": same(here, there), "waits": waits, "packed": packed}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    what, given = json.loads(sys.argv[1])
    if what == "counted":
        found = counted(given)
        found["refuted"] = refuted()
        found["changed"] = [
            changed(nn.Conv2d(3, 3, 1), Standardised(3, 16), torch.randn(4, 3, 16, 16)),
            changed(nn.Linear(64, 64), Cast(64, 32), torch.randn(16, 64)),
        ]
    else:
        found = networks(given, ["division", "auto"])
    print(json.dumps(found))
