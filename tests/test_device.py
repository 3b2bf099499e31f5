"""Whole steps on a stand-in for an accelerator: the gradients of the CPU, and nobody waits for the device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zoo import ZOO

REPO = Path(__file__).parent.parent

CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    *(("cnn", "division", 2, {}), ("gpt", "division", 2, {}), ("cnn", "lossless", 1, {}), ("gpt", "cast", 1, {})),
    *(("cnn", "actnn", 4, {"refresh": 2}), ("cnn", "auto", 10, {}), ("cnn", "tinyscript", 2, {})),
    *(("gpt", "lowrank", 2, {}), ("gpt", "lowrank", 2, {"kind": "subspace"}), ("weights", "division", 3, {})),
    *(("cnn", "blpa", 2, {}), ("cnn", "pool", 2, {}), ("gpt", "gact", 2, {})),
    ("cnn", "division", 4, {"guard": True}),
]
LABELS = [" ".join([net, method, *options]) for net, method, _, options in CASES]

UNABLE = {name: f"Could not run 'aten::_thnn_fused_{name}_cell'" for name in ("lstm", "gru")}
"""Networks that the stand-in cannot run, with what torch says: the CPU has no kernel of this kind to serve them."""

NETWORKS = [name for name in ZOO if "resnet" not in name]  # that one takes a minute

ASKED = {"llama": {"item codecs/lossless.py": 2}}
"""Reads of the first forward: rotary tables are factors without a gradient, as masks are, so their values are asked."""


def child(what: str, given: Any) -> dict[str, Any]:
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        pytest.skip("the stand-in device is written in C++: it needs g++ and ninja")
    environment = {**os.environ, "LOWTIDE_KERNELS": "reference", "MAX_JOBS": "1"}
    paths = [str(REPO / "tests"), str(REPO / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    run = [sys.executable, "-m", "standin.steps", json.dumps([what, given])]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    return child("counted", CASES)


@pytest.mark.parametrize("case", LABELS)
def test_gradients_are_those_of_the_cpu(steps: dict[str, Any], case: str) -> None:
    assert all(steps[case]["equal"])
    assert steps[case]["served"], "the report names what served the device"


@pytest.mark.parametrize(
    "case",
    [
        *("cnn division", "gpt division", "cnn lossless", "gpt cast", "gpt lowrank", "gpt lowrank kind"),
        *("cnn blpa", "cnn pool", "gpt gact"),
    ],
)
def test_nobody_waits_for_the_device(steps: dict[str, Any], case: str) -> None:
    assert all(waits == {} for waits in steps[case]["waits"])


def places(waits: dict[str, int]) -> dict[str, int]:
    """Waits by kind and file."""
    found: dict[str, int] = {}
    for where, count in waits.items():
        place = where.partition(":")[0]
        found[place] = found.get(place, 0) + count
    return found


READ = "d2h policy/tuners/base.py"


def test_auto_reads_once_for_each_decision(steps: dict[str, Any]) -> None:
    """It measures in steps 1, 3 and 9, and decides when the next one begins."""
    noise = {"h2d session/watching.py": 1}  # what is tried, once for a device
    own = [places(waits) for waits in steps["cnn auto"]["waits"]]
    assert own == [noise, {READ: 1}, {}, {READ: 1}, *[{}] * 5, {READ: 1}]


def test_actnn_reads_once_when_layers_compete(steps: dict[str, Any]) -> None:
    assert [places(waits) for waits in steps["cnn actnn refresh"]["waits"]] == [
        {"h2d codecs/groups.py": 1},  # what a bit gains, once for a device
        {READ: 1},
        {},
        {READ: 1},
    ]


def test_tinyscript_reads_a_histogram_for_each_table(steps: dict[str, Any]) -> None:
    first, second = steps["cnn tinyscript"]["waits"]
    assert places(first) == {"d2h policy/tuners/levels.py": 9, "h2d codecs/groups.py": 9}
    assert second == {}


def test_weights_made_again_are_read_in_their_first_forward(steps: dict[str, Any]) -> None:
    assert steps["weights division"]["remade"] == 3
    first, second, third = steps["weights division"]["waits"]
    assert places(first) == {"item session/session.py": 3}
    assert second == third == {}


def test_a_weight_that_comes_out_otherwise_later_is_told_and_kept(steps: dict[str, Any]) -> None:
    found = steps["refuted"]
    assert found["equal"][0]
    assert not found["equal"][1], "the bias that was not saved makes a difference"
    told = [step for step, said in enumerate(found["told"]) if said]
    assert told == [2] or told == [3]
    assert "keeps it exactly from now on" in found["told"][told[0]][0]
    assert found["equal"][3]
    assert found["whys"] == ["kept exactly: made again, it once came out otherwise"]


def test_a_parameter_changed_by_data_is_told_in_a_later_forward(steps: dict[str, Any]) -> None:
    assert all("was modified by an inplace operation" in said for said in steps["changed"])


def test_the_guard_reads_once_for_each_gradient(steps: dict[str, Any]) -> None:
    """Two exact gradients and two compressed ones, and in its first look one that has to repeat."""
    found = steps["cnn division guard"]
    assert not any("guard: off" in note for note in found["notes"])
    assert [places(waits) for waits in found["waits"]] == [{}, {READ: 5}, {}, {READ: 4}]


@pytest.fixture(scope="module")
def networks() -> dict[str, Any]:
    return child("networks", NETWORKS)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_there_as_on_the_cpu(networks: dict[str, Any], name: str) -> None:
    found = networks[name]
    if name in UNABLE or "No module named" in found.get("cannot", ""):
        assert UNABLE.get(name, "No module named") in found["cannot"]
        pytest.skip(found["cannot"])
    assert found["plain"], "without lowtide the stand-in computes as the CPU does"
    for method, second in (("division", {}), ("auto", {READ: 1})):
        own = found[method]
        assert own["packed"] > 0
        assert own["equal"], method
        waits = [places(step) for step in own["waits"]]
        waits[0].pop("h2d session/watching.py", None)  # once for a device, so with the first network
        assert waits == [ASKED.get(name, {}), second]
