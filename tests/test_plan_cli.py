"""The commands that plan memory, and what they can be pointed at."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide import cli
from lowtide.graph import capture
from lowtide.machine.costs import Seconds
from lowtide.planning import fitting, planner, profiling
from lowtide.planning.planner import BudgetPlan
from lowtide.planning.profiling import Profile
from lowtide.planning.verifying import Verification
from lowtide.session.replay import leaves_of
from lowtide.tools import targets
from lowtide.tools.targets import TargetError, resolve

SMALL = """
import torch
from torch import nn

print("a line of the user's")

def loss(model, x):
    return model(x).square().mean()

def net():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))

def build():
    return net(), torch.randn(512, 64), loss

def sized(n):
    return net(), torch.randn(n, 64), loss

def stacked(n=4096):
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*blocks), torch.randn(n, 64), loss

def sized_usually(n=32):
    return sized(n)

def flagged(large=False):
    assert large is False
    return build()

def reads_a_value():
    print("building")
    scale = torch.ones(1).item()
    return net(), scale * torch.randn(512, 64), loss

def masked():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
            self.second.weight = self.first.weight
            self.mask = torch.ones(64)  # neither a parameter nor a buffer
            self.register_buffer("scale", torch.ones(64), persistent=False)
        def forward(self, x):
            return self.second(torch.relu(self.first(x * self.mask) * self.scale))
    return Masked(), torch.randn(512, 64), loss

def says_so():
    print("building")
    return build()

def says_so_and_fails():
    calls.append("a call")
    assert calls == ["a call"]
    print("building")
    return 7

def with_words():
    return net(), {"x": torch.randn(512, 64), "name": "a word"}, lambda model, batch: loss(model, batch["x"])

def value_in_loss():
    return net(), torch.randn(512, 64), lambda model, x: loss(model, x) * float(x.sum() > 0)

def no_loss():
    return net(), torch.randn(512, 64)

def fails():
    raise ValueError("the data are missing\\nsecond line")

def takes_two(a, b):
    return build()

def nonsense():
    return 7

def wrong_tuple():
    return torch.randn(3), net()

number = 7
calls = []
"""


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test measures this machine, and none leaves modules or paths behind."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(profiling, "workspaces", lambda calls: {})
    monkeypatch.setattr(planner, "codec_seconds", lambda codec, dtype, rectified=False: Seconds(1e-9, 1e-9))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(SMALL)
    return str(path)


class Done(SimpleNamespace):
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """What was said of an error: the only line, but for the usage that argparse shows before its own."""
        *usage, line = self.err.splitlines()
        assert not usage or usage[0].startswith("usage: lowtide"), self.err
        return line


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: object) -> Done:
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        out, err = capsys.readouterr()
        return Done(code=code, out=out, err=err.replace("a line of the user's\n", ""))

    return call


# ---------------------------------------------------------------- the commands


def test_profile_tells_where_memory_goes(run: Any, small: str) -> None:
    done = run("profile", f"{small}:build")
    assert (done.code, done.err) == (0, "")
    first = done.out.splitlines()[0]
    assert first.startswith("peak ")
    assert first.endswith("computed without data")
    assert "1: Gelu.self" in done.out
    assert "a line of the user's" not in done.out


def test_profile_writes_json_and_saves_it(run: Any, small: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    done = run("profile", f"{small}:build", "--json", "--save", path)
    assert done.code == 0
    found = Profile.from_json(done.out)
    assert found == Profile.load(path)
    assert found.fake
    assert found.saved_nbytes == profiling.profile(*built(small, "build"), fake=True, measure=False).saved_nbytes


def built(path: str, name: str) -> tuple[Any, Any, Any]:
    return targets.parts_of(targets.function_of(f"{path}:{name}")())


def test_a_real_profile_has_errors_and_times(run: Any, small: str) -> None:
    done = run("profile", f"{small}:sized", "--real", "--batch", 64, "--json")
    assert done.code == 0
    found = Profile.from_json(done.out)
    assert not found.fake
    assert found.step_seconds > 0
    assert 64 * 64 * 4 in [block.nbytes for block in found.blocks if block.role == "inputs"]


def test_plan_meets_a_budget_and_can_be_saved(run: Any, small: str, tmp_path: Path) -> None:
    path, saved = tmp_path / "plan.json", tmp_path / "profile.json"
    plain = Profile.from_json(run("profile", f"{small}:build", "--json", "--save", saved).out).peak
    done = run("plan", f"{small}:build", "--budget", int(0.8 * plain), "--save", path)
    assert (done.code, done.err) == (0, "")
    made = BudgetPlan.load(path)
    assert isinstance(made, BudgetPlan)
    assert made.predicted is not None
    assert made.predicted.peak <= 0.8 * plain
    assert done.out == f"{made.summary()}\n"
    again = run("plan", saved, "--budget", int(0.8 * plain), "--json")
    assert again.code == 0
    assert BudgetPlan.from_data(json.loads(again.out)).to_data() == made.to_data()


def test_plan_takes_every_limit(run: Any, small: str) -> None:
    ratio = json.loads(run("plan", f"{small}:build", "--ratio", 3, "--json").out)
    assert ratio["predicted"]["stored_nbytes"] <= ratio["predicted"]["saved_nbytes"] / 3
    assert ratio["predicted"]["error"] is None
    bits = json.loads(run("plan", f"{small}:build", "--bits", 5, "--json").out)
    assert bits["predicted"]["stored_nbytes"] < bits["predicted"]["saved_nbytes"] / 6
    error = json.loads(run("plan", f"{small}:build", "--error", 0.05, "--json").out)
    assert 0 < error["predicted"]["error"] <= 0.05  # which takes data


def test_verify_measures_real_steps_in_other_processes(run: Any, small: str) -> None:
    done = run("plan", f"{small}:sized", "--batch", 256, "--ratio", 4, "--verify", "--json")
    assert done.code == 0, done.err
    content = json.loads(done.out)
    assert content["verification"]["plain_peak"] > 0
    assert 0 < content["verification"]["error"] < 1
    assert content["verification"]["predicted_peak"] == content["predicted"]["peak"]


VERIFICATION = Verification(peak=7 * 2**20, plain_peak=None, error=0.01, slowdown=None, seconds=0.1)


def test_text_of_a_plan_ends_with_what_was_measured(run: Any, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(self: BudgetPlan, model: nn.Module, batch: Any, loss_fn: Any) -> Verification:
        assert all(map(capture.has_data, [*model.parameters(), batch]))
        return VERIFICATION

    monkeypatch.setattr(BudgetPlan, "verify", verify)
    done = run("plan", f"{small}:build", "--ratio", 4, "--verify")
    assert done.code == 0
    assert done.out.startswith("4x fewer bytes")
    assert done.out.endswith(f"\n{VERIFICATION}\n")


@pytest.mark.parametrize("name", ["sized", "build"])
def test_fit_finds_the_largest_batch(run: Any, small: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = run("fit", f"{small}:{name}", "--budget", "4MiB", "--save", path)
    assert (done.code, done.err) == (0, "")
    planned = json.loads(run("fit", f"{small}:{name}", "--budget", "4MiB", "--json").out)
    assert done.out.startswith(f"{planned['size']} is the largest size that fits 4.0 MiB with a plan")
    assert planned["peak"] <= planned["budget"] == 4 * 2**20
    assert planned["verification"] is None
    assert BudgetPlan.load(path).to_data() == planned["plan"]
    plain = json.loads(run("fit", f"{small}:{name}", "--budget", "4MiB", "--plain", "--json", "--save", path).out)
    assert plain["plan"] is None
    assert 0 < plain["size"] < planned["size"]
    assert Profile.load(path).peak == plain["peak"]


def test_fit_runs_real_steps_only_if_asked(run: Any, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify(plan: Any, model: nn.Module, batch: Tensor, loss_fn: Any, **more: Any) -> Verification:
        assert all(map(capture.has_data, [*model.parameters(), batch]))
        return VERIFICATION

    monkeypatch.setattr(fitting, "verify", verify)
    done = run("fit", f"{small}:sized", "--budget", "8MiB", "--verify", "--json")  # 7 MiB fit at once
    assert done.code == 0
    assert json.loads(done.out)["verification"] == VERIFICATION.to_data()


def test_blocks_may_run_again(run: Any, small: str) -> None:
    target = f"{small}:stacked"
    peak = json.loads(run("profile", target, "--json").out)
    plain = Profile.from_json(json.dumps(peak)).peak
    done = run("plan", target, "--budget", str(int(0.75 * plain)), "--allow", "checkpoint", "--json")
    assert done.code == 0
    paths = json.loads(done.out)["checkpoints"]
    assert paths
    assert set(paths) <= {"0", "1", "2", "3"}
    done = run("plan", target, "--budget", str(int(0.9 * plain)), "--allow", "checkpoint", "--blocks", "[01]", "--json")
    assert set(json.loads(done.out)["checkpoints"]) <= {"0", "1"}
    sizes = [
        json.loads(run("fit", target, "--budget", str(plain), "--json", *more).out)["size"]
        for more in (["--plain"], ["--allow", "checkpoint"])
    ]
    assert sizes[0] < sizes[1]


def test_the_optimizer_and_the_solver_are_named(run: Any, small: str) -> None:
    weights = 4 * (65 * 256 + 257 * 256 + 257)

    def predicted(*more: str) -> Any:
        done = run("plan", f"{small}:build", "--ratio", "4", "--json", *more)
        assert done.code == 0
        return json.loads(done.out)["predicted"]

    alone, solved, adam, sgd = (
        predicted(*more)
        for more in (
            *([], ["--solver", "lagrangian", "--time-weight", "0"]),
            *(["--optimizer", "AdamW"], ["--optimizer", "sgd:momentum=0.9"]),
        )
    )
    assert solved["stored_nbytes"] <= alone["saved_nbytes"] / 4
    counts = 4 * 6  # a step count for each parameter
    assert adam["peak"] - alone["peak"] == adam["optimizer_nbytes"] == 2 * weights + counts
    assert sgd["peak"] - alone["peak"] == sgd["optimizer_nbytes"] == weights


def test_check_takes_a_file_too(run: Any, small: str) -> None:
    done = run("check", f"{small}:build", "--method", "lossless", "--json")
    assert done.code == 0
    assert json.loads(done.out)["method"].startswith("lossless")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:0"])
def test_sizes_for_another_device(run: Any, small: str, device: str) -> None:
    done = run("profile", f"{small}:build", "--device", device, "--json")
    assert done.code == 0, done.err
    assert Profile.from_json(done.out).device == device.partition(":")[0]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_only(
    run: Any, small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    for name in ("TERM", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        if not shown:
            monkeypatch.setenv("FORCE_COLOR", "1")  # with which rich takes anything for a terminal
        with cli._working("counting [/sheep]"):
            print("a line of the user's")
        assert ("counting [/sheep]" in stream.getvalue()) == shown
        assert "a line of the user's" in stream.getvalue()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with cli._working("counting [/sheep]"):
        pass
    assert sys.stderr.getvalue() == ""
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "no_such.py:build"], "lowtide profile: there is no file 'no_such.py'"),
        (["profile", "no_such:build"], "lowtide profile: cannot import 'no_such': No module named 'no_such'"),
        (["profile", "small.py:no_such"], "lowtide profile: small.py has no function 'no_such'"),
        (["profile", "small.py:number"], "lowtide profile: small.py has no function 'number'"),
        (["profile", "small.py"], "timm:NAME or torchvision:NAME; got 'small.py'"),
        (["profile", "small.py:fails"], "lowtide profile: ValueError: the data are missing (--debug shows"),
        (["profile", "small.py:takes_two"], "must take nothing, or one number of samples; it takes a, b"),
        (["profile", "small.py:nonsense"], "must return (model, batch) or (model, batch, loss_fn); got int"),
        (["profile", "small.py:wrong_tuple"], "got a tuple that begins with Tensor"),
        (["profile", "small.py:no_loss"], "lowtide profile: only a mapping has a loss of its own"),
        (["profile", "small.py:value_in_loss"], "(--real runs the step with data; --debug shows the traceback)"),
        (["profile", "small.py:build", "--seq", "8"], "size and seq go with hf:, timm: and torchvision: models"),
        (["profile", "small.py:with_words", "--batch", "4"], "take a number n, and return a batch of n samples"),
        (["fit", "small.py:with_words", "--budget", "1GiB"], "take a number n, and return a batch of n samples"),
        (["profile", "hf:no-such-model"], "'no-such-model' is neither a file nor a model type"),
        (["profile", "hf:no_such.json"], "lowtide profile: there is no file 'no_such.json'"),
        (["profile", "hf:not_a_profile.json"], "not_a_profile.json is not the configuration of a model"),
        (["profile", "hf:gpt2", "--seq", "4096"], "this model takes 1024 tokens at most; got seq=4096"),
        (["profile", "hf:gpt2", "--size", "32"], "hf:gpt2 reads tokens: give seq instead of size"),
        (["profile", "hf:vit", "--seq", "32"], "hf:vit reads images: give size instead of seq"),
        (["profile", "hf:whisper"], "hf:whisper has no head for text or image classes; give FILE.py:FUNCTION instead"),
        (["profile", "small.py:build", "--real", "--device", "cuda"], "--device goes with computed sizes"),
        (["plan", "small.py:build", "--bits", "2", "--verify", "--device", "cuda"], "--device goes with computed"),
        (["profile", "small.py:build", "--device", "toaster"], "expected a device, such as cuda; got 'toaster'"),
        (["profile", "small.py:build", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["profile", "small.py:build", "--save", "no/such/x.json"], "expected a file in a folder that exists"),
        (["plan", "small.py:build"], "one of the arguments --budget --ratio --bits --error is required"),
        (["plan", "small.py:build", "--budget", "1GiB", "--bits", "2"], "not allowed with argument --budget"),
        (["plan", "small.py:build", "--budget", "-5"], "a budget must be above zero; got '-5'"),
        (["plan", "small.py:build", "--budget=-5MB"], "a budget must be above zero; got '-5MB'"),
        (["plan", "small.py:build", "--budget", "0"], "a budget must be above zero"),
        (["plan", "small.py:build", "--budget", "5 parsecs"], "got '5 parsecs'"),
        (["plan", "small.py:build", "--ratio", "nan"], "expected a number above zero; got 'nan'"),
        (["fit", "small.py:sized"], "the following arguments are required: --budget"),
        (["plan", "small.py:build", "--bits", "2", "--allow", "fly"], "allow takes compress, rebuild, offload"),
        (["plan", "small.py:build", "--bits", "2", "--allow", "compress,"], "expected names with commas between them"),
        (["plan", "small.py:build", "--bits", "2", "--blocks", "0"], "blocks goes with allow='checkpoint'"),
        (["plan", "small.py:build", "--budget", "1GB", "--allow", "checkpoint", "--blocks", "x"], "blocks='x' matches"),
        (["plan", "small.py:build", "--bits", "2", "--solver", "luck"], "invalid choice: 'luck'"),
        (["plan", "small.py:build", "--bits", "2", "--optimizer", "best"], "torch.optim has no 'best'; it has ada"),
        (["plan", "small.py:build", "--bits", "2", "--optimizer", "sgd:speed=3"], "--optimizer sgd:speed=3: "),
        (["plan", "small.py:build", "--bits", "2", "--optimizer", "sgd:speed"], "expected KEY=VALUE"),
        (["plan", "x.json", "--bits", "2", "--optimizer", "sgd"], "--optimizer: this goes with a model"),
        (["plan", "no_such.json", "--bits", "2"], "lowtide plan: there is no file 'no_such.json'"),
        (["plan", "not_a_profile.json", "--bits", "2"], "lowtide plan: not_a_profile.json: this is not a profile"),
        (["plan", "broken.json", "--bits", "2"], "lowtide plan: broken.json: this is not a profile"),
        (["plan", "x.json", "--bits", "2", "--seq", "8", "--verify"], "--seq, --verify: this goes with a model"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(run: Any, small: str, arguments: list[str], message: str) -> None:
    Path("not_a_profile.json").write_text('{"format": 1}')
    Path("broken.json").write_text("{")
    done = run(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert message in done.line


def test_a_path_that_cannot_be_written_is_refused_before_any_work(
    run: Any, small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)  # root may write anywhere
    monkeypatch.setattr(targets, "resolve", lambda *given, **more: pytest.fail("it began to work"))
    for command in (["profile"], ["plan", "--bits", "2"], ["fit", "--budget", "1GiB"]):
        done = run(*command, f"{small}:build", "--save", tmp_path / "x.json")
        assert done.code == 2
        assert "expected a file that can be written" in done.line


def test_a_budget_that_is_too_small_ends_with_code_1(run: Any, small: str) -> None:
    done = run("plan", f"{small}:build", "--budget", "300KiB")
    assert (done.code, done.out) == (1, "")
    assert done.line.startswith("lowtide plan: a budget of 300.0 KiB cannot be met: the smallest possible peak is ")
    least = done.line.partition("peak is ")[2].partition(",")[0]
    assert run("plan", f"{small}:build", "--budget", least.replace("1.", "1.1")).code == 0
    done = run("fit", f"{small}:build", "--budget", "300KiB")
    assert (done.code, done.out) == (1, "")
    assert "not even a size of 1 fits 300.0 KiB: its smallest possible peak is " in done.line
    assert run("plan", f"{small}:build", "--ratio", "1000").code == 1


def test_a_profile_without_data_knows_no_errors(run: Any, small: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert run("profile", f"{small}:build", "--save", path).code == 0
    done = run("plan", path, "--error", "0.1")
    assert done.code == 2
    assert "was made without data and knows no errors; profile with --real" in done.line


def test_debug_shows_the_traceback(run: Any, small: str) -> None:
    done = run("profile", f"{small}:fails", "--debug")
    assert done.code == 2
    assert "in fails" in done.err


@pytest.mark.parametrize("package", ["transformers", "timm", "torchvision"])
def test_a_missing_package_is_named(run: Any, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.models", None)
    prefix = "hf" if package == "transformers" else package
    done = run("profile", f"{prefix}:anything")
    assert done.code == 2
    assert done.line.startswith(f"lowtide profile: {package} is not installed: pip install {package}")


# ---------------------------------------------------------------- models of libraries

TINY = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 64, "eos_token_id": 99},
    "llama": {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "bert": {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "t5": {"num_layers": 2, "num_heads": 2, "d_model": 32, "d_kv": 16, "d_ff": 64, "vocab_size": 100},
    "vit": {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32},
}
for kind in ("llama", "bert", "vit"):
    TINY[kind] |= {"hidden_size": 32, "vocab_size": 100, "max_position_embeddings": 64}
TINY["vit"] = {key: value for key, value in TINY["vit"].items() if key not in ("vocab_size", "max_position_embeddings")}
TINY["gpt2"]["bos_token_id"] = 99


@pytest.fixture
def config(tmp_path: Path) -> Any:
    pytest.importorskip("transformers")

    def write(kind: str, **more: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": kind, **TINY[kind], **more}))
        return f"hf:{path}"

    return write


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_configuration_is_enough(run: Any, config: Any, kind: str) -> None:
    done = run("profile", config(kind), "--batch", 16, "--json")
    assert done.code == 0, done.err
    found = Profile.from_json(done.out)
    assert found.fake
    assert found.of_role("inputs") == 16 * 64 * 8 + (16 * 8 if kind == "bert" else 16 * 64 * 8)
    assert not [block.label for block in found.blocks if "attn_mask" in block.label]
    done = run("plan", config(kind), "--batch", 16, "--ratio", 3)
    assert done.code == 0, done.err
    assert done.out.startswith("3x fewer bytes: peak ")


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_sizes_of_a_model_without_data_are_those_of_a_real_step(config: Any, kind: str) -> None:
    text = config(kind)
    found = []
    for fake in (True, False):
        target = resolve(text, batch=8, seq=32, fake=fake)
        assert all(capture.has_data(p) == (not fake) for p in target.model.parameters())
        profile = profiling.profile(
            target.model, target.make_batch(8), target.loss_fn, fake=True, measure=False
        ) if fake else real_profile(target)  # fmt: skip
        found.append((profile.peak, profile.saved_nbytes, profile.model))
    assert found[0] == found[1]


def real_profile(target: targets.Target) -> Profile:
    return profiling.profile(target.model, target.make_batch(8), target.loss_fn, measure=False)


def test_the_task_is_the_one_that_is_named_or_usual(config: Any) -> None:
    def kind(*given: Any, **more: Any) -> str:
        return type(resolve(config(*given, **more), seq=None if given[0] == "vit" else 16).model).__name__

    assert kind("gpt2") == "GPT2LMHeadModel"
    assert kind("llama") == "LlamaForCausalLM"
    assert kind("bert") == "BertForSequenceClassification"
    assert kind("t5") == "T5ForConditionalGeneration"
    assert kind("vit") == "ViTForImageClassification"
    assert kind("bert", architectures=["BertForMaskedLM"]) == "BertForMaskedLM"
    assert kind("gpt2", architectures=["GPT2ForSequenceClassification"]) == "GPT2ForSequenceClassification"
    assert kind("gpt2", architectures=["Unheard"]) == "GPT2LMHeadModel"


def test_batches_of_configurations(config: Any) -> None:
    assert {name: tuple(x.shape) for name, x in resolve(config("gpt2"), fake=False).make_batch(3).items()} == {
        **{"input_ids": (3, 64), "labels": (3, 64)},
    }
    assert tuple(resolve(config("vit")).make_batch(3)["pixel_values"].shape) == (3, 3, 32, 32)
    assert tuple(resolve(config("vit"), size=64).make_batch(3)["pixel_values"].shape) == (3, 3, 64, 64)
    assert sorted(resolve(config("t5"), seq=16).make_batch(3)) == ["decoder_input_ids", "input_ids", "labels"]


def test_models_of_transformers_keep_no_past_and_their_ties(config: Any) -> None:
    target = resolve(config("gpt2"))
    assert not target.model.config.use_cache  # type: ignore[union-attr]
    assert target.model.lm_head.weight is target.model.transformer.wte.weight  # type: ignore[union-attr]
    assert target.model.training
    assert target.batch == 8


def test_types(config: Any) -> None:
    text = config("llama", dtype="bfloat16")
    weights = {p.dtype for p in resolve(text).model.parameters()}
    assert weights == {torch.float32}
    assert {p.dtype for p in resolve(text, dtype="bfloat16").model.parameters()} == {torch.bfloat16}
    image = resolve(config("vit"), dtype="bfloat16").make_batch(2)
    assert (image["pixel_values"].dtype, image["labels"].dtype) == (torch.bfloat16, torch.int64)
    with pytest.raises(TargetError, match="dtype must be one of float32, bfloat16, autocast; got 'int8'"):
        resolve(text, dtype="int8")


@pytest.mark.parametrize("fake", [True, False])
def test_autocast_begins_with_float32_and_computes_in_bfloat16(small: str, fake: bool) -> None:
    target = resolve(f"{small}:build", dtype="autocast", fake=fake)
    assert {p.dtype for p in target.model.parameters()} == {torch.float32}
    seen = []
    target.model[0].register_forward_hook(lambda module, given, result: seen.append(result.dtype))  # type: ignore[index, operator]
    profiling.profile(target.model, target.make_batch(target.batch), target.loss_fn, fake=True, measure=False)
    assert seen == [torch.bfloat16]


class Conv(nn.Module):
    def __init__(self, side: int = 24, classes: int = 10) -> None:
        super().__init__()
        self.default_cfg = {"input_size": (3, side, side)}
        self.num_classes = classes
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * (side - 2) ** 2, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for timm and torchvision, with what is called of them."""

    def create_model(name: str, img_size: int = 24) -> nn.Module:
        return Conv(img_size)

    def get_model(name: str, **more: Any) -> nn.Module:
        if more.get("image_size") and name == "conv":
            raise TypeError("an unexpected keyword argument 'image_size'")
        return Conv(more.get("image_size", 224 if name == "vit" else 30), 1000)

    timm: Any = ModuleType("timm")
    timm.is_model, timm.list_models = lambda name: name in ("conv", "reads"), lambda: ["conv", "reads"]
    timm.create_model = create_model
    torchvision, models = ModuleType("torchvision"), ModuleType("torchvision.models")
    models.list_models = lambda module: ["conv", "vit"] if module is models else ["detector"]  # type: ignore[attr-defined]
    models.get_model = get_model  # type: ignore[attr-defined]
    torchvision.models = models  # type: ignore[attr-defined]
    for module in (timm, torchvision, models):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_image_models(run: Any, libraries: None) -> None:
    done = run("profile", "timm:conv", "--batch", 4, "--json")
    assert done.code == 0, done.err
    assert Profile.from_json(done.out).of_role("inputs") == 4 * 3 * 24 * 24 * 4 + 4 * 8
    done = run("profile", "timm:conv", "--batch", 4, "--size", 12, "--dtype", "bfloat16", "--json")
    assert done.code == 0, done.err
    assert Profile.from_json(done.out).of_role("inputs") == 4 * 3 * 12 * 12 * 2 + 4 * 8
    done = run("profile", "torchvision:conv", "--size", 30, "--batch", 2)
    assert done.code == 0, done.err
    assert resolve("torchvision:vit", size=32).make_batch(2)[0].shape == (2, 3, 32, 32)
    assert resolve("torchvision:vit").make_batch(2)[0].shape == (2, 3, 224, 224)
    assert int(resolve("torchvision:vit", fake=False).make_batch(64)[1].max()) > 10


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("timm:conf", "timm has no model 'conf'; did you mean 'conv'?"),
        ("timm:xyz", "timm has no model 'xyz'"),
        ("torchvision:detector", "torchvision.models has no model 'detector'"),
    ],
)
def test_unknown_image_models(run: Any, libraries: None, text: str, message: str) -> None:
    done = run("profile", text)
    assert done.code == 2
    assert done.line == f"lowtide profile: {message}"
    done = run("profile", text.replace("detector", "conv").replace("conf", "conv"), "--seq", 8)
    assert done.code == 2


def test_a_model_that_returns_no_scores_is_told() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    with pytest.raises(TypeError, match=r"returns tuple and not one tensor of scores; give FILE\.py:FUNCTION"):
        targets.image_loss(Two(), (torch.randn(1, 1), torch.zeros(1)))


# ---------------------------------------------------------------- functions of the user's own


def has_no_data(target: targets.Target) -> bool:
    batch = target.make_batch(target.batch)
    tensors = [*target.model.parameters(), *target.model.buffers()]
    return not any(map(capture.has_data, [*tensors, *(x for x in leaves_of(batch) if isinstance(x, Tensor))]))


def test_models_are_built_without_memory(small: str) -> None:
    target = resolve(f"{small}:masked")
    assert has_no_data(target)
    assert not target.note
    model: Any = target.model
    assert model.second.weight is model.first.weight
    assert not capture.has_data(model.mask)
    assert {x.device.type for x in (model.mask, model.scale, model.first.bias)} == {"cpu"}
    assert all(p.requires_grad for p in model.parameters())
    fake = profiling.profile(model, target.make_batch(512), target.loss_fn, fake=True, measure=False)
    real = profiling.profile(*built(small, "masked"), fake=True, measure=False)
    assert fake.blocks == real.blocks


def test_a_model_that_reads_values_is_built_in_memory_and_that_is_said(run: Any, small: str) -> None:
    done = run("profile", f"{small}:reads_a_value")
    assert done.code == 0
    first, *notes = done.err.splitlines()
    assert first == "building"  # and once only
    assert len(notes) == 1
    assert notes[0].startswith("note: the weights are in memory, because the model cannot be built without data (")
    assert "computed without data" in done.out


def test_what_a_function_prints_is_shown_once(run: Any, small: str) -> None:
    assert run("profile", f"{small}:says_so").err == "building\n"
    said, line = run("profile", f"{small}:says_so_and_fails").err.splitlines()
    assert said == "building"
    assert line.startswith("lowtide profile: the function must return (model, batch)")


def test_a_function_may_take_a_number(small: str) -> None:
    def sizes(name: str, **more: Any) -> tuple[int, int, int]:
        target = resolve(f"{small}:{name}", **more)
        return target.batch, len(target.make_batch(target.batch)), len(target.make_batch(3))

    assert sizes("sized") == (8, 8, 3)
    assert sizes("sized", batch=5) == (5, 5, 3)
    assert sizes("sized_usually") == (32, 32, 3)
    assert sizes("sized_usually", batch=5) == (5, 5, 3)
    assert sizes("build") == (512, 512, 3)
    assert sizes("build", batch=5) == (5, 5, 3)
    assert sizes("flagged") == (512, 512, 3)


def test_samples_are_cut_off_and_repeated_as_copies() -> None:
    batch = {"x": torch.arange(6).view(3, 2), "scale": 2.0, "one": torch.tensor(1.0)}
    make = targets._resized(batch, "f")
    assert make(3) is batch
    assert make(2)["x"].tolist() == [[0, 1], [2, 3]]
    assert make(2)["x"].untyped_storage().nbytes() == 4 * 8
    assert make(7)["x"][:, 0].tolist() == [0, 2, 4, 0, 2, 4, 0]
    assert make(7)["scale"] == 2.0
    assert make(7)["one"] is batch["one"]
    for odd in ([torch.ones(2), torch.ones(3)], torch.ones(1, 4)):
        make = targets._resized(odd, "f")
        assert make(1) is odd
        with pytest.raises(TargetError, match="let f take a number n, and return a batch of n samples"):
            make(2)


def test_a_file_may_have_any_name(tmp_path: Path) -> None:
    lines = "import torch, beside\ndef build():\n    return torch.nn.Linear(beside.WIDTH, 1), torch.ones(2, 1), len\n"
    for number, name in enumerate(
        ["first/model.py", "second/model.py", "third/json.py", "third/my-model.py", "third/v1.2.py"], 1
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# {number}\n{lines}def which():\n    return {number}\n")
    (tmp_path / "first" / "beside.py").write_text("WIDTH = 3\n")
    for number, name in enumerate(
        ["first/model.py", "second/model.py", "third/json.py", "third/my-model.py", "third/v1.2.py"], 1
    ):
        for _ in range(2):
            assert targets.function_of(f"{tmp_path / name}:which")() == number
        assert targets.function_of(f"{tmp_path / name}:which") is targets.function_of(f"{tmp_path / name}:which")
    assert sys.modules["json"] is json
    assert sys.modules["model"].which() == 1
    assert targets.function_of("first/model.py:which")() == 1  # from the present folder


def test_a_file_that_fails_leaves_no_half_module(tmp_path: Path) -> None:
    path = tmp_path / "half-done.py"
    path.write_text("def build():\n    pass\nraise KeyError('x')\n")
    for _ in range(2):
        with pytest.raises(KeyError):
            targets.function_of(f"{path}:build")
    (tmp_path / "lacks.py").write_text("import no_such_package\n")
    with pytest.raises(TargetError, match=r"cannot import '.*lacks\.py': No module named 'no_such_package'"):
        targets.function_of(f"{tmp_path / 'lacks.py'}:build")


def test_a_module_of_the_present_folder_can_be_named_too(run: Any, small: str) -> None:
    assert run("profile", "small:build").code == 0
