"""The ``lowtide`` command: it reads arguments, calls the library and prints what that returns."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import os
import platform
import sys
import traceback
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
from .machine.malloc import can_tune, start_environment
from .machine.measure import ChildError
from .verify.check import check, default_loss


class _RefusedError(Exception):
    """What was asked cannot be done; the message says why, and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    The code is 0 if all is well, 1 if the answer is bad (unsafe gradients, a method that fails in ``doctor``), 2 if
    there is no answer because of an error, and 130 after an interrupt. An error is one line on standard error;
    ``--debug`` adds the traceback.
    """
    arguments = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"lowtide {arguments.command}: {_in_one_line(error, arguments.debug)}", file=sys.stderr)
        return 2


def _in_one_line(error: Exception, debug: bool) -> str:
    first, *more = str(error).splitlines() or [""]
    if isinstance(error, (_RefusedError, demo.MissingError)):
        return first
    # The last line of a child's traceback is that of the exception.
    text = " ".join((first, *more[-1:])) if isinstance(error, ChildError) else f"{type(error).__name__}: {first}"
    return text if debug else f"{text} (--debug shows the traceback; lowtide doctor shows what works here)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lowtide", description="Train with compressed activations.")
    parser.add_argument("--version", action="version", version=f"lowtide {__version__}")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text.capitalize() + ".", parents=[common])
        command.set_defaults(run=run, refuse=command.error)
        return command

    show = add("demo", _demo, "train a small network exactly and compressed, side by side")
    show.add_argument("--steps", type=_positive, default=demo.STEPS, help="training steps (%(default)s)")
    show.add_argument("--batch", type=_positive, default=demo.BATCH, help="images in a step (%(default)s)")
    show.add_argument("--json", type=_writable, metavar="PATH", help="also write all numbers to this file")
    add("doctor", _doctor, "tell what serves here, and try every method")
    add("methods", _methods, "list the methods and their options")
    judge = add("check", _check, "compare compressed gradients of your model with exact ones")
    judge.add_argument(
        "function",
        type=_module_and_function,
        metavar="MODULE:FUNCTION",
        help="called without arguments; returns (model, batch) or (model, batch, loss_fn)",
    )
    judge.add_argument("--method", default="auto", help="a name from 'lowtide methods' (%(default)s)")
    judge.add_argument(
        "--set", type=_option, action="append", default=[], metavar="KEY=VALUE", help="an option of the method"
    )
    judge.add_argument("--seeds", type=_seeds, default=4, help="draws of the rounding (%(default)s)")
    judge.add_argument("--json", action="store_true", help="write JSON instead of text")
    return parser


def _module_and_function(text: str) -> tuple[str, str]:
    module, _, name = text.partition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"expected MODULE:FUNCTION, such as train:build; got {text!r}")
    return module, name


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
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists; got {text!r}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"expected a file that can be written; {text!r} cannot")
    return path


def _demo(arguments: argparse.Namespace) -> int:
    demo.run(arguments.steps, arguments.batch, arguments.json)
    return 0


def _methods(arguments: argparse.Namespace) -> int:
    print(*methods().values(), sep="\n")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Judge what the user's function builds; what it prints goes to standard error."""
    try:
        method: Method = resolve(arguments.method, dict(arguments.set))
    except (TypeError, ValueError) as error:
        raise _RefusedError(str(error)) from error
    with contextlib.redirect_stdout(sys.stderr):
        given = _function(arguments)()
        if not isinstance(given, tuple) or len(given) not in (2, 3) or not isinstance(given[0], nn.Module):
            kind = f"a tuple of {len(given)}" if isinstance(given, tuple) else type(given).__name__
            raise _RefusedError(f"the function must return (model, batch) or (model, batch, loss_fn); got {kind}")
        model, batch, loss_fn = given if len(given) == 3 else (*given, None)
        if loss_fn is None:
            try:
                loss_fn = default_loss(batch)
            except TypeError as error:
                raise _RefusedError(str(error)) from error
        result = check(model, batch, loss_fn, method, seeds=arguments.seeds)
    print(result.to_json() if arguments.json else result)
    return 0 if result.ok else 1


def _function(arguments: argparse.Namespace) -> Callable[[], Any]:
    """Import the user's function; a module or function that does not exist is a wrong argument."""
    module, name = arguments.function
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m has it; the installed command does not
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if arguments.debug:
            traceback.print_exc()
        arguments.refuse(f"cannot import {module!r}: {error}")
    if not callable(found):
        arguments.refuse(f"{module} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def _doctor(arguments: argparse.Namespace) -> int:
    """Print versions, abilities, a tiny step with each method, and the kernels that served it."""
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
    if not abilities.slots:
        print("  Install torch 2.6 or newer, or report this version of torch.")
    print("\nOne tiny step with each method")
    healthy = abilities.slots
    for name in methods():
        try:
            print(f"  {name}: {_try(name)}")
        except Exception as error:  # a doctor reports what it finds and goes on
            healthy = False
            print(f"  {name}: failed: {type(error).__name__}: {error}")
            if arguments.debug:
                traceback.print_exc()
    print("\nCPU allocator")
    print(
        "  glibc: lowtide.tune_cpu_allocator() keeps freed memory and saves page faults"
        if can_tune()
        else "  not glibc's: lowtide.tune_cpu_allocator() has no effect"
    )
    for name, value in start_environment().items():
        print(f"  This glibc is older than 2.38: start Python with {name}={value} when you call it.")
    kernels.prepare()
    print("\nKernels on the CPU")
    status = kernels.status()
    for operator, served in status.items():
        print(f"  {operator}: {served}")
    slow = [served for served in status.values() if served.startswith("reference")]
    if slow:
        print(f"  {len(slow)} of {len(status)} are served by the reference, right but slow. {_cure(slow[0])}")
    return 0 if healthy else 1


def _cure(served: str) -> str:
    """Say what to do about an operator that the reference serves for this reason."""
    if "LOWTIDE_KERNELS" in served:
        return "Unset LOWTIDE_KERNELS to use the compiled kernels."
    if "ModuleNotFoundError" in served:
        return "Install Numba: pip install numba"
    return "Update Numba: pip install --upgrade numba"


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
