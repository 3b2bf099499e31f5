"""The ``lowtide`` command: arguments in, calls to the library, text out."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import platform
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import __version__, kernels
from .attachment import compress
from .graph import capture
from .policy.methods import Method, methods, resolve
from .tools import demo
from .tools.malloc import can_tune
from .tools.measure import ChildError
from .verify.check import check, default_loss


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if it did what was asked, 1 if something failed or is unsafe, 2 if it cannot be done."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "methods":
        print(*methods().values(), sep="\n")
        return 0
    if arguments.command == "doctor":
        return _doctor()
    if arguments.command == "check":
        return _check(arguments)
    try:
        demo.run(arguments.steps, arguments.batch, arguments.json)
    except demo.MissingError as error:
        print(error, file=sys.stderr)
        return 2
    except ChildError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowtide", description="Train with compressed activations.")
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    show = commands.add_parser("demo", help="train a small network exactly and compressed, side by side")
    show.add_argument("--steps", type=_positive, default=demo.STEPS, help="training steps (%(default)s)")
    show.add_argument("--batch", type=_positive, default=demo.BATCH, help="images in a step (%(default)s)")
    show.add_argument("--json", type=_writable, metavar="PATH", help="also write all numbers to this file")
    commands.add_parser("doctor", help="tell what serves here, and try every method")
    commands.add_parser("methods", help="list the methods and their options")
    judge = commands.add_parser("check", help="compare compressed gradients of your model with exact ones")
    judge.add_argument(
        "function",
        type=_function,
        metavar="MODULE:FUNCTION",
        help="called without arguments; returns (model, batch) or (model, batch, loss_fn)",
    )
    judge.add_argument("--method", default="division", help="a name from 'lowtide methods' (%(default)s)")
    judge.add_argument(
        "--set", type=_option, action="append", default=[], metavar="KEY=VALUE", help="an option of the method"
    )
    judge.add_argument("--seeds", type=_seeds, default=4, help="draws of the rounding (%(default)s)")
    judge.add_argument("--json", action="store_true", help="write JSON instead of text")
    return parser


def _function(text: str) -> Callable[[], Any]:
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"expected MODULE:FUNCTION, such as train:build; got {text!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m has it; the installed command does not
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise argparse.ArgumentTypeError(f"cannot import {module!r}: {error}") from error
    if not callable(found):
        raise argparse.ArgumentTypeError(f"{module} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, such as bits=4; got {text!r}")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value  # a word needs no quotes


def _seeds(text: str) -> int:
    number = _positive(text)
    if number < 2:
        raise argparse.ArgumentTypeError("one draw cannot tell bias from noise; give at least 2")
    return number


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text!r}")
    return number


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists; got {text!r}")
    return path


def _check(arguments: argparse.Namespace) -> int:
    """Judge what the user's function builds; what it prints goes to standard error."""
    try:
        method: Method = resolve(arguments.method, dict(arguments.set))
    except (TypeError, ValueError) as error:
        print(f"lowtide check: {error}", file=sys.stderr)
        return 2
    with contextlib.redirect_stdout(sys.stderr):
        given = arguments.function()
        if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
            print("lowtide check: the function must return (model, batch) or (model, batch, loss_fn)", file=sys.stderr)
            return 2
        model, batch, loss_fn = given if len(given) == 3 else (*given, None)
        if loss_fn is None:
            try:
                loss_fn = default_loss(batch)
            except TypeError as error:
                print(f"lowtide check: {error}", file=sys.stderr)
                return 2
        result = check(model, batch, loss_fn, method, seeds=arguments.seeds)
    print(result.to_json() if arguments.json else result)
    return 0 if result.ok else 1


def _doctor() -> int:
    """Versions, abilities, a tiny step with each method, and the kernels that served it."""
    print(f"lowtide {__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(f"torch {torch.__version__} with {torch.get_num_threads()} threads")
    for package in ("numpy", "numba"):
        print(f"{package} {_version(package)}")
    abilities = capture.probe()
    print("\nWhat this torch allows")
    for able, yes, no in (
        (abilities.slots, "saved tensors can be reached", "saved tensors are hidden: nothing is compressed"),
        (abilities.foreign_hooks, "other code's hooks are seen", "other code's hooks are seen only when new"),
        (
            abilities.sole is not None,
            "owners of a storage are counted: each tensor is encoded once, when nobody else needs it",
            "owners of a storage are hidden: tensors are encoded as soon as they are saved",
        ),
    ):
        print(f"  {'yes' if able else 'no ':3}  {yes if able else no}")
    print("\nOne tiny step with each method")
    healthy = abilities.slots
    for name in methods():
        try:
            print(f"  {name}: {_try(name)}")
        except Exception as error:  # a doctor reports what it finds and goes on
            healthy = False
            print(f"  {name}: failed: {type(error).__name__}: {error}")
    print("\nCPU allocator")
    print(
        "  glibc: lowtide.tune_cpu_allocator() keeps freed memory and saves page faults"
        if can_tune()
        else "  not glibc: lowtide.tune_cpu_allocator() has no effect"
    )
    kernels.prepare()
    print("\nKernels on the CPU")
    for operator, served in kernels.status().items():
        print(f"  {operator}: {served}")
    return 0 if healthy else 1


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "is not installed"


def _try(method: str) -> str:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)
    )
    with compress(model, method) as session:
        loss = model(torch.randn(8, 3, 16, 16)).square().mean()
    loss.backward()
    if not all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters()):
        raise RuntimeError("a gradient is missing or not finite")
    return f"ok, {session.report().ratio:.1f}x fewer bytes kept for backward"
