"""One record of a decision: choices, plans that every method makes and that run again, and what is learned."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from golden import CASES, NETS
from lowtide.codecs import BlockMean, Cast, GroupQuant, LogQuant, Mask, Raw, SampleQuant, ShapeOnly
from lowtide.policy.choice import Action, Choice
from lowtide.session import memory

SITE = lowtide.Site("fc", "Addmm", "mat1", 0)


def case(net):
    torch.manual_seed(0)
    model, x = NETS[net]()
    return model, x, torch.randint(0, 10, (len(x),))


def gradients(model, x, y):
    """Of one training step; dropout draws the same numbers each time."""
    model.zero_grad()
    torch.manual_seed(1)
    functional.cross_entropy(model(x), y).backward()
    return [p.grad.clone() for p in model.parameters()]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------- choices


def test_choices_survive_plain_data():
    for choice in (
        Choice.keep("because"),
        Choice.store(GroupQuant(3), "file", "few"),
        Choice.store(SampleQuant(3, 2)),
        Choice.rebuild(),
        Choice.offload("file"),
    ):
        again = Choice.from_config(json.loads(json.dumps(choice.to_config())))
        assert (again, again.why, hash(again)) == (choice, choice.why, hash(choice))


def test_choices_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="a codec goes with 'store'"):
        Choice(Action.STORE)
    with pytest.raises(ValueError, match="a codec goes with 'store'"):
        Choice(Action.KEEP, Raw())
    with pytest.raises(ValueError, match="home must be one of device, host, file; got 'moon'"):
        Choice.store(Raw(), "moon")
    with pytest.raises(ValueError, match="rebuild stores nothing"):
        Choice(Action.REBUILD, home="file")
    with pytest.raises(ValueError, match="away from the device"):
        Choice.offload("device")


@pytest.mark.parametrize("codec", [ShapeOnly(), Mask()], ids=str)
def test_a_codec_that_does_not_keep_values_is_refused(codec):
    model = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="does not give back the values of a tensor"):
        lowtide.compress(model, codec)
    with pytest.raises(ValueError, match="does not give back the values of a tensor"):
        lowtide.Plan({SITE: codec})
    text = json.dumps({"version": 2, "sites": [{**SITE._asdict(), "action": "store", "codec": codec.to_config()}]})
    with pytest.raises(ValueError, match=r"row 0 of the plan: .*does not give back the values"):
        lowtide.Plan.from_json(text)


def test_bytes_and_exactness_are_those_of_what_happens():
    meta = lowtide.codecs.TensorMeta((100, 100), (100, 1), torch.float32)
    assert Choice.keep().nbytes(meta) == Choice.offload("file").nbytes(meta) == 40000
    assert Choice.rebuild().nbytes(meta) == 0
    assert Choice.store(GroupQuant(2)).nbytes(meta) == GroupQuant(2).packed_nbytes(meta)
    exact = [c.exact for c in (Choice.keep(), Choice.offload("file"), Choice.store(Raw()), Choice.rebuild())]
    assert exact == [True, True, True, False]


# ---------------------------------------------------------------- plans run again


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", CASES)
def test_a_plan_of_every_method_repeats_it_bit_for_bit(net, name):
    model, x, y = case(net)
    with lowtide.attach(model, name.split()[0], min_numel=512, **CASES[name]) as handle:
        for _ in range(3):
            wanted = gradients(model, x, y)
        plan = lowtide.Plan.from_json(handle.plan().to_json())
        stored = handle.report().stored_nbytes
    assert plan == handle.plan()
    with lowtide.attach(model, plan, min_numel=512) as again:
        state = again.state_dict()
        again.load_state_dict({**state, "step": 2})
        assert equal(gradients(model, x, y), wanted)
        assert again.report().stored_nbytes == stored
        assert again.plan() == plan
        assert not [note for note in again.report().notes if "plan" in note]


def test_plans_of_rebuilding_methods_do_rebuild():
    model, x, y = case("residual")
    for method, options in (("blpa", {}), ("division", {"derive": True}), ("auto", {})):
        with lowtide.attach(model, method, min_numel=512, **options) as handle:
            for _ in range(2):
                gradients(model, x, y)
            actions = {choice.action for choice in handle.plan().choices.values()}
        assert Action.REBUILD in actions, method


def test_a_plan_that_rebuilds_what_cannot_be_rebuilt_keeps_it_and_says_so():
    model, x, y = case("residual")
    exact = gradients(model, x, y)
    site = lowtide.Site("1", "NativeBatchNorm", "input", 0)  # what a convolution made
    with lowtide.attach(model, lowtide.Plan({site: Choice.rebuild()}), min_numel=512) as handle:
        assert equal(gradients(model, x, y), exact)
        row = next(row for row in handle.report().sites if row.site == site)
    assert (row.state, row.why) == ("exact", "it was to be rebuilt, and here it cannot be")


def test_offload_moves_exact_bytes_to_a_file():
    model, x, y = case("residual")
    exact = gradients(model, x, y)
    with lowtide.attach(model, "division", min_numel=512) as handle:
        gradients(model, x, y)
        plan = handle.plan()
    away = lowtide.Plan(dict.fromkeys(plan.choices, Choice.offload("file")))
    with lowtide.attach(model, away, min_numel=512) as handle:
        assert equal(gradients(model, x, y), exact)
        report = handle.report()
        rows = [row for row in report.sites if row.codec.startswith("exact") and row.state == "compressed"]
        assert len(rows) >= 5
        assert report.stored_nbytes < report.plain_nbytes / 5
        assert any("in a file" in note for note in report.notes)


def test_offload_to_host_memory_is_nothing_on_a_cpu():
    model, x, y = case("perceptron")
    exact = gradients(model, x, y)
    with lowtide.attach(model, "cast", min_numel=512) as handle:
        gradients(model, x, y)
        plan = handle.plan()
    with lowtide.attach(model, lowtide.Plan(dict.fromkeys(plan.choices, Choice.offload())), min_numel=512) as handle:
        assert equal(gradients(model, x, y), exact)
        assert {c.why for c in handle.plan().choices.values()} == {"it lies in host memory as it is"}


def test_bits_that_samples_share_serve_a_smaller_batch():
    model, x, y = case("residual")
    x = x * torch.arange(1.0, 9.0).view(-1, 1, 1, 1)
    with lowtide.attach(model, "actnn", min_numel=512) as handle:
        gradients(model, x, y)
        plan = handle.plan()
    assert any(isinstance(c.codec, SampleQuant) for c in plan.choices.values())
    with lowtide.attach(model, plan, min_numel=512) as handle:
        gradients(model, x[:3], y[:3])
        shared = [r for r in handle.report().sites if "sample_quant" in r.codec]
    assert handle.plan() == plan
    assert shared
    assert {row.shape[0] for row in shared} == {3}


def test_a_codec_given_for_every_value_keeps_what_it_does_not_fit():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(1152, 64), nn.Linear(64, 10))
    with lowtide.attach(model, BlockMean(8, dims=3), min_numel=512) as handle:
        model(torch.randn(16, 3, 16, 16)).sum().backward()
        choices = {site.module: choice for site, choice in handle.plan().choices.items()}
    assert choices["1"] == Choice.store(BlockMean(8, dims=3))
    assert choices["4"] == Choice.keep()
    assert choices["4"].why.startswith("its codec does not fit: block_mean")


# ---------------------------------------------------------------- plans as data


def test_a_difference_tells_what_matched_and_what_did_not_by_name():
    other = lowtide.Site("fc2", "Addmm", "mat1", 0)
    third = lowtide.Site("fc3", "Addmm", "mat1", 0)
    a = lowtide.Plan({SITE: GroupQuant(2), other: GroupQuant(2)})
    b = lowtide.Plan({SITE: GroupQuant(4), third: Choice.keep()})
    found = a.diff(b)
    assert found
    assert not a.diff(a)
    assert found.changed == {SITE: (Choice.store(GroupQuant(2)), Choice.store(GroupQuant(4)))}
    assert (found.same, found.missing, found.added) == ((), (other,), (third,))
    assert str(found).splitlines() == [
        "0 sites are the same, 1 changed, 1 missing, 1 added",
        "changed  fc: Addmm.mat1: group_quant(2 bits) -> group_quant(4 bits)",
        "missing  fc2: Addmm.mat1",
        "added    fc3: Addmm.mat1",
    ]


def test_a_plan_for_a_changed_model_says_what_was_met(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    x = torch.randn(256, 64)
    with lowtide.compress(model, "actnn", bits=4) as session:
        model(x).sum()
    session.plan().save(tmp_path / "plan.json")
    plan = lowtide.Plan.load(tmp_path / "plan.json")
    changed = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 10))
    with lowtide.compress(changed, plan) as session:
        changed(x).sum()
    notes = session.report().notes
    assert "3 of the plan's 4 sites were met" in notes
    assert "in the plan and not met: 3: Gelu.self" in notes
    assert "met and not in the plan, so kept exactly: 3: Silu.self" in notes
    row = next(row for row in session.report().sites if row.site.op == "Silu")
    assert (row.state, row.why) == ("exact", "not in the plan")


def test_a_plan_that_lists_one_site_of_a_shared_tensor_says_nothing_false():
    model, x = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)]), torch.randn(256, 64)
    with lowtide.compress(model, lowtide.Plan({lowtide.Site("1", "Addmm", "mat1", 0): GroupQuant(2)})) as session:
        h = model[0](x)
        loss = (model[1](h) + model[2](h)).sum()
        del h
    loss.backward()
    assert session.plan().choices[lowtide.Site("2", "Addmm", "mat1", 0)] == Choice.store(GroupQuant(2))
    assert not [note for note in session.report().notes if "2: Addmm" in note]


def test_forwards_that_were_treated_differently_are_noted():
    model, x, y = case("residual")
    scale = torch.arange(1.0, 9.0).view(-1, 1, 1, 1)
    with lowtide.compress(model, "actnn", min_numel=512) as session:
        loss = model(x * scale).sum() + model(x[:3] * scale[:3]).sum()
    loss.backward()
    assert session.ambiguous()
    assert any("treated differently in several forwards" in note for note in session.report().notes)
    result = lowtide.check(model, (x, y), lambda m, b: m(b[0] * scale).sum() + m(b[0][:3]).square().sum(), "actnn")
    assert result.overall.error > 0


def test_a_plan_is_not_overruled_by_derive():
    with pytest.raises(ValueError, match="a plan says itself what is rebuilt"):
        lowtide.compress(nn.Linear(2, 2), lowtide.Plan(), derive=True)


def test_stretches_of_a_storage_are_decided_about_one_by_one():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(64, n) for n in (192, 64, 64))

        def forward(self, x):
            q, k, _ = self.a(x).chunk(3, -1)
            return self.b(q).sum() + self.c(k).square().sum()

    model, x = Split(), torch.randn(256, 64)
    model(x).backward()
    exact = model.b.weight.grad.clone()
    model.zero_grad()
    b, c = (lowtide.Site(name, "Addmm", "mat1", 0) for name in "bc")
    with lowtide.compress(model, lowtide.Plan({c: GroupQuant(2)})) as session:
        loss = model(x)
    loss.backward()
    assert torch.equal(model.b.weight.grad, exact)
    assert session.plan().choices[b] == Choice.keep()
    assert session.plan().choices[c] == Choice.store(GroupQuant(2))
    row = next(row for row in session.report().sites if row.site == b)
    assert row.stored_nbytes == 256 * 64 * 4 + GroupQuant(2).packed_nbytes(
        lowtide.codecs.TensorMeta((256, 64), (192, 1), torch.float32)
    )


def test_a_plan_for_another_model_is_refused():
    with pytest.raises(ValueError, match="this plan is for another model: none of its modules exists here, such as"):
        lowtide.compress(nn.Linear(2, 2), lowtide.Plan({SITE: GroupQuant(2)}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not a plan, which is a JSON document"),
        ("[]", "this is not a plan of version 2"),
        ('{"version": 1}', "this is not a plan of version 2"),
        ('{"version": 2}', "a plan has a list of 'sites'; got None"),
        ('{"version": 2, "sites": [3]}', "row 0 of the plan: a site is a mapping; got 3"),
        ('{"version": 2, "sites": [{"module": "a"}]}', "row 0 of the plan: op, slot, ordinal, action missing"),
    ],
)
def test_what_is_no_plan_is_refused_in_words(text, message):
    with pytest.raises(ValueError, match=message):
        lowtide.Plan.from_json(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": "burn"}, "row 0 of the plan: action must be one of keep, store, rebuild, offload; got 'burn'"),
        ({"ordinal": -1}, "ordinal is a whole number from 0"),
        ({"home": "moon"}, "home must be one of device, host, file; got 'moon'"),
        ({"colour": "red"}, "got also colour"),
        ({"codec": {"id": "nothing"}}, "unknown codec 'nothing'"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused_in_words(change, message):
    data = lowtide.Plan({SITE: GroupQuant(2)}).to_data()
    data["sites"][0].update(change)
    with pytest.raises(ValueError, match=message):
        lowtide.Plan.from_json(json.dumps(data))
    data = lowtide.Plan({SITE: GroupQuant(2)}).to_data()
    data["sites"] *= 2
    with pytest.raises(ValueError, match=r"row 1 of the plan: fc: Addmm\.mat1 is listed twice"):
        lowtide.Plan.from_data(data)


def test_a_plan_of_other_things_is_refused():
    with pytest.raises(TypeError, match=r"a plan maps a lowtide\.Site"):
        lowtide.Plan({"fc": GroupQuant(2)})
    with pytest.raises(TypeError, match=r"a plan maps a lowtide\.Site"):
        lowtide.Plan({SITE: None})


# ---------------------------------------------------------------- what is learned stays with the model


@pytest.mark.parametrize("method", ["auto", "actnn", "tinyscript", "gact", "division", "lowrank"])
def test_twenty_sessions_equal_twenty_attached_steps_bit_for_bit(method):
    found = []
    for attached in (True, False):
        model, x, y = case("residual")
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        handle = lowtide.attach(model, method, min_numel=512) if attached else None
        losses = []
        for _ in range(20):
            other = nn.Linear(64, 64)
            with lowtide.compress(other, method, min_numel=512):
                other(x.view(-1, 64)[:64]).sum()
            optimizer.zero_grad()
            if attached:
                loss = functional.cross_entropy(model(x), y)
            else:
                with lowtide.compress(model, method, min_numel=512):
                    out = model(x)
                loss = functional.cross_entropy(out, y)
            loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
        found.append((losses, [p.detach().clone() for p in model.parameters()]))
        if handle is not None:
            handle.remove()
    assert found[0][0] == found[1][0]
    assert equal(found[0][1], found[1][1])


def test_deciding_takes_no_time_once_the_plan_stands():
    model, x, y = case("residual")
    spent = []
    for _ in range(8):
        with lowtide.compress(model, "auto", min_numel=512) as session:
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        spent.append(session.tuner_seconds)
    # Steps 1 and 3 measure, steps 2 and 4 begin by deciding.
    assert 0 < spent[0] < spent[1] < spent[2] < spent[3]
    assert spent[3] == spent[4] == spent[7]


def test_memory_is_shared_by_equal_arguments_only_and_dies_with_the_model():
    model, x, y = case("perceptron")

    def steps(**options):
        with lowtide.compress(model, "auto", min_numel=512, **options) as session:
            functional.cross_entropy(model(x), y)
        return session.step

    assert [steps(), steps(bits=2), steps(), steps(seed=1), steps(), steps(exclude="0")] == [1, 1, 2, 1, 3, 1]
    assert (
        lowtide.compress(model, "auto", min_numel=512).policy is lowtide.compress(model, "auto", min_numel=512).policy
    )
    lowtide.forget(model)
    assert steps() == 1
    gone = weakref.ref(model)
    assert model in memory._memories
    model = None
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("hashed", [True, False])
def test_noise_differs_from_step_to_step_for_methods_that_are_not_recognised(hashed):
    class Own(lowtide.Method):
        name = "own"

        def choose(self, use):
            return Choice.store(GroupQuant(2))

    if not hashed:
        Own.__hash__ = None
    model, x, y = case("residual")
    found = []
    for step in (1, 2):
        model.zero_grad()
        with lowtide.compress(model, Own(), min_numel=512) as session:
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
        assert session.step == step
    assert not equal(*found)


def test_a_codec_that_cannot_be_hashed_runs():
    @dataclass(frozen=True)
    class Listed(GroupQuant):
        id: ClassVar[str] = "listed_for_a_test"
        __hash__ = None

    model, x, y = case("perceptron")
    with lowtide.compress(model, Listed(4), min_numel=512) as session:
        functional.cross_entropy(model(x), y)
    assert any(choice.codec == Listed(4) for choice in session.plan().choices.values())


def test_settings_that_change_each_step_do_not_pile_up():
    model, x, y = case("perceptron")
    for seed in range(40):
        with lowtide.compress(model, "auto", seed=seed, min_numel=512):
            functional.cross_entropy(model(x), y)
    assert len(memory._memories[model]) == memory._KEPT


def test_a_loop_of_sessions_resumes_bit_for_bit():
    model, x, y = case("residual")

    def step():
        model.zero_grad()
        with lowtide.compress(model, "auto", min_numel=512) as session:
            out = model(x)
        functional.cross_entropy(out, y).backward()
        return session, [p.grad.clone() for p in model.parameters()]

    for _ in range(3):
        session, _ = step()
    state = json.loads(json.dumps(session.state_dict()))
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    _, wanted = step()
    lowtide.forget(model)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    lowtide.compress(model, "auto", min_numel=512).load_state_dict(state)
    session, found = step()
    assert session.step == 4
    assert equal(found, wanted)


# ---------------------------------------------------------------- every method on every kind of tensor


@pytest.mark.parametrize("method", lowtide.methods())
def test_log_probabilities_of_maps_err_relative_to_themselves(method):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LogSoftmax(1), nn.Conv2d(8, 8, 3))
    with lowtide.attach(model, method, min_numel=512) as handle:
        model(torch.randn(4, 3, 16, 16)).square().mean().backward()
        choice = handle.plan().choices[lowtide.Site("1", "LogSoftmax", "result", 0)]
    assert choice in (Choice.store(Cast("bfloat16")), Choice.store(LogQuant(8)), Choice.keep())
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("method", lowtide.methods())
def test_every_method_runs_a_step_on_fake_tensors(method):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        with lowtide.attach(model, method) as handle:
            for _ in range(2):
                model(torch.randn(8, 3, 32, 32)).square().mean().backward()
            assert handle.report().plain_nbytes > 0


# ---------------------------------------------------------------- which modules


def test_excluded_modules_stay_as_they_are():
    model, x, y = case("residual")
    exact = gradients(model, x, y)
    with lowtide.attach(model, "division", min_numel=512, exclude=["3", "5.n?"]) as handle:
        assert not equal(gradients(model, x, y), exact)
        rows = {row.site: row for row in handle.report().sites if row.state != "shared"}
    assert {row.why for site, row in rows.items() if site.module.startswith("3.") and row.state == "exact"} >= {
        "excluded by 3"
    }
    assert not any(row.state == "compressed" for site, row in rows.items() if site.module.startswith("3."))
    assert any(row.state == "compressed" for site, row in rows.items() if site.module == "5.a")
    assert rows[lowtide.Site("5.na", "NativeBatchNorm", "input", 0)].why == "excluded by 5.n?"
    with lowtide.attach(model, "division", min_numel=512, exclude="*"):
        assert equal(gradients(model, x, y), exact)


def test_only_included_modules_are_compressed():
    model, x, y = case("transformer")
    with lowtide.attach(model, "actnn", min_numel=512, include="1.layers.1") as handle:
        gradients(model, x, y)
        rows = handle.report().sites
    states = {row.site.module.startswith("1.layers.1") for row in rows if row.state == "compressed"}
    assert states == {True}
    assert {row.why for row in rows if row.site.module.startswith("1.layers.0") and row.state == "exact"} == {
        "not included"
    }


def test_a_pattern_that_matches_nothing_is_an_error():
    model = NETS["residual"]()[0]
    with pytest.raises(ValueError, match=r"no module matches exclude='3\.aa'; .* such as '3\.a'"):
        lowtide.attach(model, exclude="3.aa")
    with pytest.raises(TypeError, match="include must be a pattern of module paths or several"):
        lowtide.compress(model, include=3)
    with pytest.raises(ValueError, match="exclude has an empty pattern"):
        lowtide.compress(model, exclude="")


# ---------------------------------------------------------------- attaching


def test_an_attachment_is_a_context_that_removes_itself():
    model, x, y = case("perceptron")
    exact = gradients(model, x, y)
    with lowtide.attach(model, "division", min_numel=512):
        assert not equal(gradients(model, x, y), exact)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), lowtide.attach(model, "division"):
        model(x[:, :3])
    assert equal(gradients(model, x, y), exact)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_attaching_twice_is_an_error_and_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    handle = lowtide.attach(model)
    hooks = dict(model._forward_hooks)
    with pytest.raises(RuntimeError, match=r"is attached already; remove\(\) that handle first"):
        lowtide.attach(model)
    assert dict(model._forward_hooks) == hooks
    handle.remove()
    inner = lowtide.attach(model[0])
    with pytest.raises(RuntimeError, match="or a module of it"):
        lowtide.attach(model)
    inner.remove()
    lowtide.attach(model).remove()


def test_a_state_names_its_format_and_method():
    model = nn.Linear(4, 4)
    with lowtide.attach(model, "division") as handle:
        state = handle.state_dict()
    assert state["format"] == 1
    assert state["method"].startswith("division(block=8, bits=2")
    with lowtide.attach(model, "division", bits=4) as other:
        with pytest.raises(ValueError, match=r"this state is of division\(.*bits=2.*and here division\(.*bits=4"):
            other.load_state_dict(state)
        with pytest.raises(ValueError, match="expected a state of format 1"):
            other.load_state_dict({"seed": 0, "step": 3})
        with pytest.raises(TypeError, match="expected what state_dict\\(\\) gave; got list"):
            other.load_state_dict([])
        assert other.state_dict()["step"] == 0


@pytest.mark.parametrize("method", ["auto", "actnn", "tinyscript", "gact"])
def test_a_broken_state_is_refused_in_words_and_changes_nothing(method):
    model, x, y = case("residual")
    with lowtide.attach(model, method, min_numel=512) as handle:
        for _ in range(2):
            gradients(model, x, y)
        state = handle.state_dict()
        before = json.dumps(state)
        for learned in (None, {}, [], {**dict.fromkeys(state["learned"]), "x": 1}, dict.fromkeys(state["learned"], 3)):
            with pytest.raises(ValueError, match=f"what {method} learned cannot be read from this state"):
                handle.load_state_dict({**state, "step": 7, "learned": learned})
            assert json.dumps(handle.state_dict()) == before
        for key in ("seed", "step"):
            with pytest.raises(ValueError, match=f"{key} must be a whole number; got '3'"):
                handle.load_state_dict({**state, key: "3"})
        handle.load_state_dict(json.loads(before))
        assert json.dumps(handle.state_dict()) == before


def test_methods_can_be_given_as_typed_values():
    model, x, y = case("perceptron")
    for name, value in (("auto", lowtide.Auto(bits=3)), ("actnn", lowtide.ActNN(bits=3)), ("cast", lowtide.CastAll())):
        found = []
        for method, options in ((name, {} if name == "cast" else {"bits": 3}), (value, {})):
            with lowtide.attach(model, method, min_numel=512, **options):
                found.append(gradients(model, x, y))
        assert equal(*found)
    with pytest.raises(ValueError, match="bits must be a number from 1 to 8"):
        lowtide.Auto(bits=0)
    for kind in (*lowtide.policy.methods._NAMED.values(),):
        assert getattr(lowtide, kind.__name__) is kind


# ---------------------------------------------------------------- reports by module


def test_sums_by_module_are_those_of_the_rows():
    model, x, y = case("residual")
    with lowtide.attach(model, "division", min_numel=512) as handle:
        gradients(model, x, y)
        report = handle.report()
    for depth in (None, 1, 2):
        found = report.by_module(depth)
        assert sum(m.plain_nbytes for m in found) == report.plain_nbytes
        assert sum(m.stored_nbytes for m in found) == report.stored_nbytes
        assert sum(m.held_nbytes for m in found) == report.held_nbytes
        assert sum(m.sites for m in found) == len(report.sites)
    third = next(m for m in report.by_module(1) if m.module == "3")
    rows = [row for row in report.sites if row.site.module.split(".")[0] == "3"]
    assert third.sites == len(rows)
    assert third.plain_nbytes == sum(row.plain_nbytes for row in rows if row.state != "held")
    assert third.stored_nbytes == sum(row.stored_nbytes for row in rows if row.state != "held")
    assert {m.module for m in report.by_module(1)} <= {"", "0", "1", "2", "3", "4", "5", "6", "7", "8"}
    head, *lines = report.module_table(1).splitlines()
    assert head.split() == ["module", "sites", "plain", "stored", "kept", "by", "other", "code"]
    assert len(lines) == len(report.by_module(1))
    assert json.loads(report.to_json())["modules"][0]["module"] == report.by_module()[0].module
    with pytest.raises(ValueError, match="depth must be a whole number of at least 1"):
        report.by_module(0)
