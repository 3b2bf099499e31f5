"""The page about a step: what it says is what the library says, in any browser, whatever the names in a model."""

from __future__ import annotations

import csv
import dataclasses
import html
import json
import logging
import random
import re
import time
from collections import OrderedDict
from importlib import resources

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from browser import CHROMIUM, browser
from lowtide.page import document as documents
from lowtide.page import timeline
from lowtide.page.document import document
from lowtide.page.writing import embedded, page, read, text, write
from lowtide.planning.planner import Problem
from lowtide.planning.solvers import KEEP, REBUILD
from lowtide.policy.choice import Action
from lowtide.report import FORMS, size
from zoo import ZOO

DASH = "\N{EN DASH}"
HOSTILE = [
    "</script><script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "line\u2028and\u2029line",
    '=HYPERLINK("http://x")',
    "<!--",
    "a&lt;b\"'`",
]


def net() -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(64, 1))


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x[:, :1]).square().mean()


@pytest.fixture(scope="module")
def step():
    """A model, its batch, its profile, a plan for two thirds of its peak, and the check of that plan."""
    torch.manual_seed(0)
    model, batch = net(), torch.randn(512, 64)
    profile = lowtide.profile(model, batch, loss, measure=False)
    profile = dataclasses.replace(profile, step_seconds=0.0)  # so that no codec is timed
    plan = lowtide.plan(profile, budget=int(0.66 * profile.peak))
    check = lowtide.check(model, batch, loss, plan, seconds=0)
    return model, batch, profile, plan, check


@pytest.fixture(scope="module")
def whole(step):
    return document(profile=step[2], plan=step[3], check=step[4], title="A whole page")


# ---------------------------------------------------------------- what the document says


def picks_of(problem, plan):
    found = []
    for saved, offered in zip(problem.profile.saved, problem.choices, strict=True):
        choice = plan.choice_for(saved.sites)
        if not saved.has_values:
            found.append(0)
        elif choice is None or choice.action is Action.KEEP:
            found.append(KEEP)
        else:
            found.append(REBUILD if choice.action is Action.REBUILD else offered.index(choice))
    return found


@pytest.mark.parametrize("name", ["mobilenet", "unet", "encoder", "gru"])
def test_the_timeline_is_that_of_profile_and_planner(name, monkeypatch):
    monkeypatch.setattr(timeline, "_POINTS", 10**6)
    model, batch, closure = ZOO[name]()
    profile = lowtide.profile(model, batch, closure, fake=True, measure=False)
    profile = dataclasses.replace(profile, optimizer_nbytes=12345, workspaces=((3, 777), (profile.times, 99)))
    plan = lowtide.plan(profile, ratio=3)
    made = document(plan=plan)["timeline"]
    assert made["before"]["at"] == list(range(profile.times + 1))
    assert np.sum(made["before"]["nbytes"], axis=0).tolist() == profile.level().tolist()
    problem = Problem.of(profile, ("compress", "rebuild"))
    assert np.sum(made["after"]["nbytes"], axis=0).tolist() == problem.levels(picks_of(problem, plan)).tolist()
    before, after = made["before"]["peak"], made["after"]["peak"]
    assert (before["nbytes"], after["nbytes"]) == (profile.peak, plan.predicted.peak)
    held = [(h["role"], h["label"], h["nbytes"]) for h in before["holders"]]
    assert sorted(n for _, _, n in held) == sorted(n for _, _, n in profile.holders()[: len(held)])
    assert set(held) <= set(profile.holders())
    for side in (before, after):
        assert sum(side["roles"].values()) == side["nbytes"]
        assert sum(h["nbytes"] for h in side["holders"]) + side["others"]["nbytes"] == side["nbytes"]
    assert 2 <= len({s["stage"] for s in made["series"] if s["role"] == "saved"}) <= 5


def test_few_points_still_have_the_peak(step, monkeypatch):
    profile = step[2]
    for points in (1, 7):
        monkeypatch.setattr(timeline, "_POINTS", points)
        made = document(profile=profile)
        side = made["timeline"]["before"]
        assert made["headline"]["peak"]["before"] == profile.peak
        assert made["timeline"]["after"] is made["headline"]["peak"]["after"] is None
        assert len(side["at"]) == points
        assert max(np.sum(side["nbytes"], axis=0)) == side["peak"]["nbytes"] == profile.peak
        assert side["peak"]["at"] in side["at"]


def test_the_peak_is_that_of_measured_bytes():
    """The timeline's total at the peak, plain and planned, is within 2 % of what a process takes more."""
    torch.manual_seed(0)
    model, batch = net(), torch.randn(2**16, 64)  # 16 MiB a tensor, so that pages and small objects do not count
    profile = dataclasses.replace(lowtide.profile(model, batch, loss), step_seconds=0.0)
    plan = lowtide.plan(profile, budget=int(0.7 * profile.peak))
    found = plan.verify(model, batch, loss)
    made = document(plan=plan)["timeline"]
    assert made["before"]["peak"]["nbytes"] == pytest.approx(found.plain_peak, rel=0.02)
    assert made["after"]["peak"]["nbytes"] == pytest.approx(found.peak, rel=0.02)
    headline = document(plan=plan, verification=found)["headline"]
    assert headline["peak"] | {"how": ""} == {"before": found.plain_peak, "after": found.peak, "how": ""}
    assert headline["step"]["after"] == found.seconds
    assert headline["gradient"]["error"] == found.error


def test_a_report_beside_a_profile_has_the_peak_of_its_plan(step):
    model, batch, profile, plan, _ = step
    with lowtide.compress(model, plan) as session:
        loss(model, batch)
    made = document(report=session.report(), profile=profile)
    assert made["timeline"]["after"]["peak"]["nbytes"] == plan.predicted.peak
    assert made["headline"]["peak"]["after"] == plan.predicted.peak


def test_numbers_are_those_of_the_report_and_of_the_check(step, whole):
    report, check = step[4].report, step[4]
    head = whole["headline"]
    assert head["kept"] == {"before": report.plain_nbytes, "after": report.stored_nbytes, "held": report.held_nbytes}
    counted = [row for row in whole["sites"] if row["form"] != "skipped"]
    assert sum(row["plain_nbytes"] for row in counted) == report.plain_nbytes
    assert sum(row["stored_nbytes"] for row in counted) == report.stored_nbytes
    assert len(whole["sites"]) == len(report.sites)
    assert head["gradient"]["error"] == check.overall.error == whole["fidelity"]["overall"]["error"]
    assert (head["gradient"]["verdict"], head["gradient"]["reason"]) == (check.verdict, check.reason)
    rows = {row["parameter"]: row for row in whole["fidelity"]["parameters"]}
    assert rows.keys() == check.parameters.keys()
    for name, each in check.parameters.items():
        assert rows[name]["error"] == each.error
        assert rows[name]["sgd_noise"] == each.sgd_noise
    ratios = [row["ratio"] for row in whole["fidelity"]["parameters"] if row["counts"]]
    assert ratios == sorted(ratios, reverse=True)
    assert check.worst_layer == (whole["fidelity"]["parameters"][0]["parameter"], ratios[0])


def test_the_frontier_falls_and_has_the_plan(step, whole):
    points = whole["frontier"]["points"]
    peaks = [point["peak"] for point in points]
    assert peaks == sorted(peaks, reverse=True)
    assert points[0]["error"] <= points[-1]["error"]
    assert whole["frontier"]["chosen"]["peak"] == step[3].predicted.peak
    assert whole["frontier"]["chosen"]["error"] == step[3].predicted.error
    fake = lowtide.profile(step[0], step[1], loss, fake=True, measure=False)
    made = document(plan=lowtide.plan(fake, ratio=2))["frontier"]
    assert made["measure"] == "cost"
    assert min(p["cost"] for p in made["points"]) <= made["chosen"]["cost"] <= max(p["cost"] for p in made["points"])


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Holding(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        self.kept = torch.relu(self.first(x))
        return Odd.apply(self.second(self.kept) * 0.01).sum(1, keepdim=True)


def test_sentences_name_what_holds_memory():
    torch.manual_seed(0)
    model, x = Holding(), torch.randn(512, 64)
    profile = lowtide.profile(model, x, loss, measure=False)
    with lowtide.compress(model, "actnn") as session:
        loss(model, x)
    report = session.report()
    words = "\n".join(document(report=report, profile=profile)["why"])
    assert "no rule: Odd.tensors[0] (128.0 KiB)" in words
    assert f"Other code keeps {size(report.held_nbytes)} alive" in words
    assert "is there before the step: weights, batch and optimizer" in words
    forms = {row["form"] for row in document(report=report)["sites"]}
    assert {"skipped", "kept"} <= forms <= set(FORMS)


def test_the_peak_that_does_not_fall_is_called_so(step):
    model, batch, profile = step[:3]
    with lowtide.compress(model, lowtide.Plan()) as session:
        loss(model, batch)
    first = document(report=session.report(), profile=profile)["why"][0]
    assert first.startswith("The peak does not fall: ")


# ---------------------------------------------------------------- files


def test_every_kind_is_saved_read_and_joined(step, whole, tmp_path):
    profile, plan, check = step[2:]
    profile.save(tmp_path / "profile.json")
    plan.save(tmp_path / "plan.json")
    check.save(tmp_path / "check.json")
    (tmp_path / "report.json").write_text(check.report.to_json())
    assert lowtide.Profile.load(tmp_path / "profile.json") == profile
    joined = read(*(tmp_path / f"{name}.json" for name in ("profile", "plan", "check")))
    assert joined | {"title": ""} == whole | {"title": ""}
    assert read(tmp_path / "report.json") == document(report=check.report)
    assert read(tmp_path / "check.json") == document(check=check)
    assert read(tmp_path / "plan.json")["headline"]["peak"]["after"] == plan.predicted.peak
    plan.save(tmp_path / "page.html", check=check, title="A whole page")
    assert read(tmp_path / "page.html") == whole
    check.report.save(tmp_path / "document.json", profile=profile)
    assert read(tmp_path / "document.json") == json.loads((tmp_path / "document.json").read_text())
    for made in (profile, check, check.report):
        made.save(tmp_path / "other.htm")
        assert read(tmp_path / "other.htm")["kind"] == documents.KIND
    assert text(whole).startswith("A whole page\n  Peak of a step         ")


def test_what_cannot_be_saved_or_read_is_refused_in_words(step, tmp_path):
    profile, check = step[2], step[4]
    with pytest.raises(ValueError, match=r"expected a name that ends in \.html"):
        check.report.save(tmp_path / "report.txt")
    with pytest.raises(TypeError, match="profile must be a Profile; got str"):
        check.report.save(tmp_path / "report.html", profile="profile.json")
    other = lowtide.profile(nn.Linear(64, 1), step[1], loss, fake=True, measure=False)
    with pytest.raises(ValueError, match="of models with other parameters"):
        step[3].save(tmp_path / "x.html", profile=other)
    for content, message in (
        ("{", "this is not JSON"),
        ("[1]", "expected a mapping; got list"),
        ("{}", "no profile, plan, report, check or page"),
        ('{"kind": "lowtide page", "format": 99}', "has format 99"),
        ('{"verdict": "safe"}', "not the result of a check"),
        ('{"plain_nbytes": 1}', "this report cannot be read"),
    ):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "x.json")
    (tmp_path / "x.html").write_text("<p>")
    with pytest.raises(ValueError, match="not written by Lowtide"):
        read(tmp_path / "x.html")
    profile.save(tmp_path / "p.json")
    with pytest.raises(ValueError, match="one profile, plan, report and check each"):
        read(tmp_path / "p.json", tmp_path / "p.json")


def test_a_page_of_a_huge_model_is_small(whole):
    row = whole["sites"][0]
    many = [row | {"module": f"encoder.layers.{i}.attention.output.dense", "ordinal": i} for i in range(4000)]
    points = 600 * len(whole["timeline"]["series"])
    side = whole["timeline"]["before"] | {"at": list(range(600))}
    side["nbytes"] = [[10**11 + i for i in range(600)] for _ in whole["timeline"]["series"]]
    huge = whole | {"sites": many, "timeline": whole["timeline"] | {"before": side, "after": side}}
    assert points > 5000
    assert len(page(huge).encode()) < 2 * 10**6


def test_smallest_tensors_are_left_out_and_counted(step, monkeypatch):
    full = document(report=step[4].report)
    monkeypatch.setattr(documents, "_ROWS", 5)
    made = document(report=step[4].report)
    assert len(made["sites"]) == 5
    assert made["left_out"]["sites"] == len(full["sites"]) - 5
    kept = sum(row["plain_nbytes"] for row in made["sites"])
    assert kept + made["left_out"]["plain_nbytes"] == sum(row["plain_nbytes"] for row in full["sites"])


def test_what_is_not_a_number_is_null(step):
    check = step[4]
    broken = dataclasses.replace(check, overall=dataclasses.replace(check.overall, error=float("nan")))
    made = document(check=broken)
    assert made["headline"]["gradient"]["error"] is None
    json.dumps(made, allow_nan=False)
    assert "not finite" in text(made)


def test_the_chart_library_comes_with_its_licence():
    assets = resources.files("lowtide.page").joinpath("assets")
    assert "MIT" in assets.joinpath("uPlot.LICENSE").read_text()
    assert assets.joinpath("uPlot.iife.min.js").read_text().startswith("/*! https://github.com/leeoniya/uPlot (v")


# ---------------------------------------------------------------- hostile names, notebooks


@pytest.fixture(scope="module")
def hostile():
    layers = OrderedDict((name.replace(".", ""), nn.Linear(64, 64)) for name in HOSTILE)
    model, x = nn.Sequential(layers), torch.randn(64, 64)
    with lowtide.compress(model, "actnn") as session:
        model(x).sum()
    return session.report()


def test_hostile_names_stay_text(hostile):
    made = document(report=hostile)
    source = page(made)
    inside = source[
        source.index('id="lowtide-document">') : source.index("</script>", source.index("lowtide-document"))
    ]
    assert not set("\u2028\u2029&") & set(inside)
    assert "<" not in inside.partition(">")[2]
    assert json.loads(inside.partition(">")[2]) == made
    assert source.count("</script>") == source.count("<script") == 4
    assert json.loads(embedded({name: name for name in HOSTILE})) == {name: name for name in HOSTILE}
    shown = hostile._repr_html_()
    assert "<script" not in shown
    assert "<img" not in shown
    assert html.escape(HOSTILE[0].replace(".", "")) in shown


def test_notebooks_show_headline_and_largest_tensors(step):
    for made in step[2:]:
        shown = made._repr_html_()
        assert shown.startswith("<div>")
        assert "<script" not in shown
        assert shown.count("<tr>") >= 8
    assert size(step[4].report.stored_nbytes) in step[4]._repr_html_()
    assert size(step[2].peak) in step[2]._repr_html_()


# ---------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def tab():
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (apt-get install chromium), so pages are not looked at")
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def file(whole, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "whole.html"
    write(whole, path)
    return path


def colours(tab, selector):
    """How many colours a canvas has."""
    return tab.run(f"""(() => {{
      const c = document.querySelector('{selector} canvas');
      const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
      const found = new Set();
      for (let i = 0; i < p.length; i += 4) found.add(p[i] << 24 | p[i + 1] << 16 | p[i + 2] << 8 | p[i + 3]);
      return found.size; }})()""")


def texts(tab, selector):
    return tab.run(f"[...document.querySelectorAll('{selector}')].map((e) => e.textContent.trim())")


def type_in(tab, value):
    tab.run(f"""(() => {{ const s = document.getElementById('search'); s.value = {json.dumps(value)};
      s.dispatchEvent(new Event('input')); }})()""")


def test_a_page_draws_everything_and_asks_for_nothing(tab, file, whole):
    tab.look(1200, 900)
    tab.said.clear()
    tab.asked.clear()
    tab.open(file)
    assert tab.said == []
    assert tab.asked == [file.as_uri()]
    for place in ("#timeline .panel:nth-child(1)", "#timeline .panel:nth-child(2)", "#frontier"):
        assert colours(tab, place) > 5
    assert texts(tab, "#why li") == whole["why"]
    assert texts(tab, "#notes li") == whole["notes"]
    assert len(texts(tab, "#bars li")) >= 3
    assert texts(tab, "#main > section[hidden]") == [texts(tab, "#tables")[0]]


def test_numbers_on_the_page_are_those_of_the_library(tab, file, whole, step):
    profile, plan, check = step[2:]
    report = check.report
    tab.open(file)
    peak, kept, gradient = texts(tab, ".card .big")
    assert (peak, kept) == (size(plan.predicted.peak), size(report.stored_nbytes))
    assert gradient == f"{check.overall.error:.3g}"
    assert texts(tab, ".card .was")[0].startswith(f"from {size(profile.peak)}")
    assert texts(tab, ".card .was")[1].startswith(f"from {size(report.plain_nbytes)}")
    *_, last = texts(tab, "#timeline .roles tbody tr")
    assert last == f"all{size(profile.peak)}{size(plan.predicted.peak)}"
    held = [f"{h['nbytes']}" for h in whole["timeline"]["after"]["peak"]["holders"]]
    shown = texts(tab, "#timeline .holders > div:nth-child(2) tr td:nth-child(2)")[: len(held)]
    assert shown == [size(int(n)) for n in held]
    rows = texts(tab, "#sites tbody tr")
    assert len(rows) == min(100, len(report.sites))
    cells = tab.run(
        "[...document.querySelectorAll('#sites tbody tr')].map((r) => [...r.cells].map((c) => c.textContent.trim()))"
    )
    by_site = {
        (s.site.module or "(model)", f"{s.site.op}.{s.site.slot}{f'#{s.site.ordinal}' * bool(s.site.ordinal)}"): s
        for s in report.sites
    }
    for module, op, _, before, after, form, codec, why in cells:
        s = by_site[module, op]
        expected = (DASH, DASH) if s.form == "shared" else (size(s.plain_nbytes), size(s.stored_nbytes))
        assert (before, after, form, codec, why) == (*expected, s.form, s.codec, s.why)
    fidelity = tab.run(
        "[...document.querySelectorAll('#fidelity .scroll tbody tr')].slice(0, 5)"
        ".map((r) => [...r.cells].map((c) => c.textContent))"
    )
    for name, ratio, error, noise, bias, cosine in fidelity:
        d = check.parameters[name]
        assert ratio == f"{d.error / d.sgd_noise:.3g}x"
        assert [error, noise, bias, cosine] == [f"{n:.3g}" for n in (d.error, d.sgd_noise, d.bias, d.cosine)]


def test_the_page_writes_numbers_as_python_does(tab, whole, tmp_path):
    draw = random.Random(0)
    sizes = [1280, 1331, 1023, 1024, 1024**2 - 1, 2**20 * 5 // 4, 2**31, 3 * 2**40]
    sizes += [draw.randrange(2 ** draw.randrange(1, 45)) for _ in range(80)]
    row = whole["sites"][0] | {"form": "kept", "stored_nbytes": 0}
    numbers = [0.0, 1.0, 0.25, 12.0, 999.4, 1234.5, 1e-5, 0.00012345, 3e9] + [
        10 ** draw.uniform(-9, 9) for _ in range(60)
    ]
    parameter = whole["fidelity"]["parameters"][0]
    made = whole | {
        "sites": [row | {"plain_nbytes": n, "ordinal": i} for i, n in enumerate(sizes)],
        "fidelity": whole["fidelity"] | {"parameters": [parameter | {"error": n, "counts": True} for n in numbers]},
    }
    write(made, tmp_path / "numbers.html")
    tab.open(tmp_path / "numbers.html")
    shown = tab.run(
        "[...document.querySelectorAll('#sites tbody tr')].map((r) => [r.cells[1].textContent, r.cells[3].textContent])"
    )
    assert {int(place.partition("#")[2] or 0): n for place, n in shown} == {i: size(n) for i, n in enumerate(sizes)}
    tab.run("document.getElementById('more-parameters').click()")
    shown = tab.run("[...document.querySelectorAll('#fidelity .scroll tbody tr')].map((r) => r.cells[2].textContent)")
    assert shown[: len(numbers)] == [f"{n:.3g}" for n in numbers]


def test_search_and_chips_filter_bars_and_table(tab, file, whole):
    tab.open(file)
    everything = len(texts(tab, "#sites tbody tr"))
    type_in(tab, "gelu 2:")
    rows = texts(tab, "#sites tbody tr td:first-child")
    wanted = [r for r in whole["sites"] if "gelu" in (r["op"] + r["codec"] + r["why"]).lower() and r["module"] == "2"]
    assert 0 < len(rows) < everything
    assert len(rows) >= len(wanted)
    assert texts(tab, "#found")[0].startswith(f"{len(rows)} of {everything} shown")
    type_in(tab, "no such tensor")
    assert texts(tab, "#sites tbody tr") == texts(tab, "#bars li") == []
    type_in(tab, "")
    form = next(row["form"] for row in whole["sites"])
    tab.run(f"[...document.querySelectorAll('#forms button')].find((b) => b.textContent === '{form}').click()")
    assert len(texts(tab, "#sites tbody tr")) == sum(row["form"] == form for row in whole["sites"])
    tab.run(
        "(() => { const g = document.getElementById('group'); g.value = 'tensor';"
        " g.dispatchEvent(new Event('change')); })()"
    )
    assert all(": " in line for line in texts(tab, "#bars li .name"))


def test_the_table_sorts(tab, file):
    tab.open(file)
    column = "[...document.querySelectorAll('#sites tbody tr')].map((r) => r.cells[0].textContent)"
    tab.run("document.querySelector('#sites thead button').click()")
    up = tab.run(column)
    assert texts(tab, "#sites th[aria-sort=ascending]") == ["module"]
    assert [name for name in up if name != "(model)"] == sorted((n for n in up if n != "(model)"), key=lambda n: int(n))
    assert tab.run("document.activeElement.textContent") == "module"
    tab.run("document.querySelector('#sites thead button').click()")
    assert tab.run(column)[0] == up[-1]


def downloaded(tab, folder, button):
    tab.send("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    tab.run(f"document.getElementById('{button}').click()")
    end = time.monotonic() + 20
    while time.monotonic() < end:
        found = [path for path in folder.iterdir() if path.suffix in (".csv", ".json") and path.stat().st_size]
        if found:
            return found[0]
        time.sleep(0.05)
    raise TimeoutError(f"nothing was downloaded: {tab.said}")


def test_csv_has_every_tensor_and_no_formula(tab, hostile, tmp_path):
    made = document(report=hostile)
    write(made, tmp_path / "hostile.html")
    tab.open(tmp_path / "hostile.html")
    with downloaded(tab, tmp_path, "csv").open(newline="", encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    assert len(rows) == len(made["sites"])
    assert sum(int(row["plain_nbytes"]) for row in rows) == sum(row["plain_nbytes"] for row in made["sites"])
    modules = {row["module"] for row in made["sites"]}
    assert {row["module"].removeprefix("'") for row in rows} == modules
    assert not [row for row in rows if row["module"].startswith("=")]


def test_json_downloads_whole(tab, file, whole, tmp_path):
    tab.open(file)
    assert json.loads(downloaded(tab, tmp_path, "json").read_text()) == whole


def test_hostile_names_run_nowhere(tab, hostile, tmp_path):
    tab.said.clear()
    tab.asked.clear()
    path = tmp_path / "hostile.html"
    hostile.save(path)
    tab.open(path)
    assert tab.run("typeof window.hacked") == "undefined"
    assert tab.run("document.images.length") == 0
    assert set(texts(tab, "#sites td.module")) >= {re.sub(r"\s+$", "", name.replace(".", "")) for name in HOSTILE}
    assert tab.said == []
    assert tab.asked == [path.as_uri()]


def test_dark_follows_the_system_and_the_switch(tab, file):
    back = "getComputedStyle(document.body).backgroundColor"
    ink = "getComputedStyle(document.documentElement).getPropertyValue('--stage0')"
    tab.look(1200, 900)
    tab.open(file)
    tab.run("localStorage.clear()")
    tab.open(file)
    light = tab.run(back), tab.run(ink)
    tab.look(1200, 900, dark=True)
    dark = tab.run(back), tab.run(ink)
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    tab.run("document.getElementById('theme').click()")
    assert (tab.run(back), tab.run(ink)) == light
    for pause in (0.0, 0.2, 1.0, 3.0):  # what was chosen is kept; the browser writes it down a little later, or never
        time.sleep(pause)  # if its process for the page ends before that
        tab.open(file)
        if tab.run(back) == light[0]:
            break
        tab.run("document.getElementById('theme').click()")
    assert tab.run(back) == light[0]
    assert tab.run("document.getElementById('theme').getAttribute('aria-pressed')") == "false"
    tab.run("localStorage.clear()")
    tab.look(1200, 900)


def test_a_phone_is_wide_enough(tab, file, hostile, tmp_path):
    hostile.save(tmp_path / "hostile.html")
    for path in (file, tmp_path / "hostile.html"):
        for width in (360, 320, 768):
            tab.look(width, 740)
            tab.open(path)
            assert tab.run("document.documentElement.scrollWidth") <= width
    tab.look(1200, 900)


def test_keys_and_screen_readers_reach_everything(tab, file):
    tab.look(1200, 900)
    tab.open(file)
    tab.run("document.querySelector('#timeline .plot').focus()")
    assert texts(tab, "#timeline caption") == ["At the peak"]
    tab.key("ArrowRight")
    tab.settle()
    assert texts(tab, "#timeline caption")[0].startswith("At moment 1 of ")
    tab.open(file)
    for _ in range(3):
        tab.key("Tab")
    assert tab.run("document.activeElement.id") == "theme"
    assert tab.run("document.querySelectorAll('main, header, footer, h1').length") == 4
    tab.send("Accessibility.enable")
    nodes = tab.send("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "searchbox", "combobox", "image", "region", "table"}
    found = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n.get("ignored")]
    assert {role for role, _ in found} >= wanted - {"table"}
    assert not [role for role, name in found if role in wanted - {"table"} and not name.strip()]
    assert tab.run("[...document.querySelectorAll('th')].every((h) => h.scope)")


# ---------------------------------------------------------------- one line while training


def test_a_line_of_status_every_so_many_steps(caplog):
    model, x = net(), torch.randn(512, 64)
    with (
        caplog.at_level(logging.INFO, logger="lowtide"),
        lowtide.attach(model, "actnn", log_every=2, guard=True) as handle,
    ):
        for _ in range(5):
            loss(model, x).backward()
        with torch.no_grad():
            model(x)
        report = handle.report()
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == ["step 2", "step 4"]
    kept = f"{size(report.stored_nbytes)} kept for backward instead of {size(report.plain_nbytes)}"
    assert all(kept in line and "peak so far" in line and "guard raised 0 tensors" in line for line in lines)
    assert not model._forward_hooks


def test_no_status_unless_asked_for_and_no_nonsense(caplog):
    model, x = net(), torch.randn(512, 64)
    with caplog.at_level(logging.INFO, logger="lowtide"), lowtide.attach(model, "actnn"):
        loss(model, x).backward()
    assert not caplog.records
    for wrong in (0, -1, True, 2.5):
        with pytest.raises(ValueError, match="log_every must be a whole number"):
            lowtide.attach(model, "actnn", log_every=wrong)
