"""The ``lowtide`` command: it reads arguments, calls the library and prints what that returns."""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import __version__, kernels
from .attachment import compress
from .graph import capture
from .machine.measure import ChildError
from .malloc import can_tune, start_environment
from .page import writing
from .page.document import document
from .planning.fitting import fit
from .planning.planner import ALLOWED, BudgetError, nbytes_of, plan
from .planning.profiling import Profile, profile
from .planning.solvers import SOLVERS
from .policy.methods import Method, methods, resolve
from .policy.plan import is_page
from .report import size
from .tools import bench, demo, targets
from .tools.targets import Target, TargetError
from .verify.check import check

_DEMO_PAGE = "lowtide-demo.html"


class _RefusedError(Exception):
    """What was asked cannot be done; the message says why, and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    The code is 0 if all is well, 1 if the answer is bad (unsafe gradients, a method that fails in ``doctor``, a limit
    that cannot be met), 2 if there is no answer because of an error, and 130 after an interrupt. An error is one line
    on standard error; ``--debug`` adds the traceback.
    """
    arguments = _parser().parse_args(_with_negatives(sys.argv[1:] if argv is None else argv))
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return 130
    except BudgetError as error:
        print(f"lowtide {arguments.command}: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"lowtide {arguments.command}: {_in_one_line(error, arguments.debug)}", file=sys.stderr)
        return 2


def _with_negatives(argv: Sequence[str]) -> list[str]:
    """Arguments in which ``--budget -1GiB`` is one: argparse would take its second half for an option."""
    found: list[str] = []
    for word in argv:
        if found and found[-1].startswith("--") and "=" not in found[-1] and word[:1] == "-" and word[1:2].isdigit():
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def _in_one_line(error: Exception, debug: bool) -> str:
    first, *more = str(error).splitlines() or [""]
    if isinstance(error, (_RefusedError, demo.MissingError, TargetError)):
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
    show.add_argument(
        "--json", type=_writable, nargs="?", const=True, metavar="PATH", help="write all numbers there, or print them"
    )
    show.add_argument(
        "--page", type=_page, default=_DEMO_PAGE, metavar="FILE.html", help="where to write the page (%(default)s)"
    )
    doctor = add("doctor", _doctor, "tell what serves here, and try every method")
    doctor.add_argument("--gpu", action="store_true", help="check the GPU instead, and write lowtide-gpu.json")
    for command in (doctor, add("methods", _methods, "list the methods and their options")):
        command.add_argument("--json", action="store_true", help="write JSON instead of text")
    judge = add("check", _check, "compare compressed gradients of your model with exact ones")
    judge.add_argument(
        "function",
        type=_module_and_function,
        metavar="MODULE:FUNCTION",
        help="or FILE.py:FUNCTION; called without arguments; returns (model, batch) or (model, batch, loss_fn)",
    )
    judge.add_argument("--method", default="auto", help="a name from 'lowtide methods' (%(default)s)")
    judge.add_argument(
        "--set", type=_option, action="append", default=[], metavar="KEY=VALUE", help="an option of the method"
    )
    judge.add_argument("--seeds", type=_seeds, default=4, help="draws of the rounding (%(default)s)")
    _add_output(judge, "the result")

    look = add("profile", _profile, "tell where the memory of a training step goes")
    _add_target(look)
    _add_step(look)
    _add_output(look, "the profile")
    choose = add("plan", _plan, "make a training step fit a limit")
    _add_target(choose, "; or a profile that 'lowtide profile --save' wrote")
    limit = choose.add_mutually_exclusive_group(required=True)
    limit.add_argument("--budget", type=_budget, help="memory for all of a step, such as 2GiB")
    limit.add_argument("--ratio", type=_above_zero, help="how many times fewer bytes are kept for backward")
    limit.add_argument("--bits", type=_above_zero, help="bits of each kept value on average")
    limit.add_argument("--error", type=_above_zero, help="relative error of the gradient; implies --real")
    _add_step(choose)
    _add_choices(choose)
    choose.add_argument(
        "--time-weight",
        type=float,
        metavar="W",
        help="how much time counts beside the error; with 0 the error alone counts (1)",
    )
    choose.add_argument("--verify", action="store_true", help="also measure real steps; implies --real")
    _add_output(choose, "the plan, for lowtide.attach(model, lowtide.Plan.load(PATH)),")
    largest = add("fit", _fit, "find the largest batch whose step fits a budget")
    _add_target(largest)
    largest.add_argument("--budget", type=_budget, required=True, help="memory for all of a step, such as 2GiB")
    largest.add_argument("--plain", action="store_true", help="of an ordinary step, without a plan")
    _add_choices(largest)
    largest.add_argument("--verify", action="store_true", help="also measure real steps of that size")
    _add_output(largest, "the plan, or with --plain the profile,")
    race = add("bench", _bench, "measure real steps, plain and with some methods")
    _add_target(race)
    race.add_argument(
        "--batch", type=_positive, help=f"samples ({targets.SAMPLES}, or those of a function's own batch)"
    )
    race.add_argument(
        "--method", action="append", choices=sorted(methods()), help=f"may be repeated ({', '.join(bench.METHODS)})"
    )
    _add_output(race, "the rows")
    tell = add("report", _report, "show what a file says, or turn it into a page")
    tell.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="what save() wrote: a report, profile, plan or check as JSON, several of one model, or a page",
    )
    _add_output(tell, "all of it")
    return parser


def _add_target(command: argparse.ArgumentParser, more: str = "") -> None:
    command.add_argument(
        "target",
        metavar="TARGET",
        help="FILE.py:FUNCTION or MODULE:FUNCTION, which returns (model, batch) or (model, batch, loss_fn) and may "
        f"take a number of samples; hf:gpt2 or hf:CONFIG.json; timm:NAME; torchvision:NAME{more}",
    )
    command.add_argument("--size", type=_positive, help="side of images (what the model is made for, or 224)")
    command.add_argument("--seq", type=_positive, help="tokens in a sample (512, or the most that the model takes)")
    command.add_argument(
        "--dtype",
        choices=targets.DTYPES,
        help="of weights and batch; autocast is that to bfloat16 (float32, but a function's model stays as it is)",
    )

    command.add_argument(
        "--optimizer",
        type=_optimizer,
        metavar="NAME[:KEY=VALUE,...]",
        help="count what this optimizer of torch.optim keeps, such as adamw or sgd:momentum=0.9",
    )


def _add_choices(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--allow",
        type=_names,
        metavar="WHAT[,WHAT...]",
        help=f"what a plan may do: {', '.join(ALLOWED)} (compress,rebuild)",
    )
    command.add_argument(
        "--blocks",
        type=_names,
        metavar="PATTERN[,PATTERN...]",
        help="modules that may run again in backward, such as 'layers.*' (members of a Sequential or ModuleList that "
        "have modules inside); goes with --allow checkpoint",
    )
    command.add_argument("--solver", choices=SOLVERS, help="how a plan is found (lagrangian)")


def _add_step(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--batch",
        type=_positive,
        help=f"samples ({targets.SAMPLES}, but those of its own batch if a function takes no number)",
    )
    command.add_argument("--real", action="store_true", help="run the step with data; else only sizes are computed")
    command.add_argument("--device", type=_device, help="compute the sizes for this device; not with --real")


def _add_output(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--save", type=_writable, metavar="PATH", help=f"also write {what} to this file; a page if it ends in .html"
    )
    command.add_argument("--json", action="store_true", help="write JSON instead of text")


def _module_and_function(text: str) -> str:
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise argparse.ArgumentTypeError(f"expected MODULE:FUNCTION, such as train:build; got {text!r}")
    return text


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names with commas between them; got {text!r}")
    return names


def _optimizer(text: str) -> tuple[str, type[torch.optim.Optimizer], dict[str, Any]]:
    name, _, rest = text.partition(":")
    kinds = {
        key.lower(): kind
        for key, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    if name.lower() not in kinds:
        raise argparse.ArgumentTypeError(f"torch.optim has no {name!r}; it has {', '.join(sorted(kinds))}")
    return text, kinds[name.lower()], dict(map(_option, rest.split(","))) if rest else {}


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"expected a number above zero; got {text!r}")
    return number


def _budget(text: str) -> int:
    if text.startswith("-"):
        raise argparse.ArgumentTypeError(f"a budget must be above zero; got {text!r}")
    try:
        return nbytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _device(text: str) -> str:
    try:
        return torch.device(text).type  # of several alike, any; with a number torch ends if it has none at all
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"expected a device, such as cuda; got {text!r}") from error


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


def _page(text: str) -> Path:
    if not is_page(text):
        raise argparse.ArgumentTypeError(f"expected a name that ends in .html; got {text!r}")
    return _writable(text)


def _demo(arguments: argparse.Namespace) -> int:
    """Show the table; with --json alone only the numbers go to standard output."""
    if arguments.json is not True:
        demo.run(arguments.steps, arguments.batch, arguments.json, arguments.page)
        return 0
    with contextlib.redirect_stdout(sys.stderr):
        content = demo.run(arguments.steps, arguments.batch, None, arguments.page)
    print(json.dumps(content, indent=1))
    return 0


def _methods(arguments: argparse.Namespace) -> int:
    print(json.dumps(methods(), indent=1) if arguments.json else "\n".join(methods().values()))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    """Judge what the user's function builds; what it prints goes to standard error."""
    try:
        method: Method = resolve(arguments.method, dict(arguments.set))
    except (TypeError, ValueError) as error:
        raise _RefusedError(str(error)) from error
    with _working("comparing gradients"):
        model, batch, loss_fn = targets.parts_of(_function(arguments)())
        result = check(model, batch, loss_fn, method, seeds=arguments.seeds)
    if arguments.save is not None:
        result.save(arguments.save)
    print(result.to_json() if arguments.json else result)
    return 0 if result.ok else 1


def _function(arguments: argparse.Namespace) -> Callable[[], Any]:
    """Import the user's function; a module or function that does not exist is a wrong argument."""
    try:
        return targets.function_of(arguments.function)
    except TargetError as error:
        if arguments.debug:
            traceback.print_exc()
        arguments.refuse(str(error))
        raise


def _profile(arguments: argparse.Namespace) -> int:
    found = _profiled(arguments, _resolved(arguments, fake=not arguments.real))
    if arguments.save is not None:
        found.save(arguments.save)
    print(found.to_json() if arguments.json else found)
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    target = None
    if arguments.target.endswith(".json") and not arguments.target.startswith("hf:"):
        found = _loaded(arguments)
    else:
        arguments.real |= arguments.verify or arguments.error is not None
        target = _resolved(arguments, fake=not arguments.real)
        found = _profiled(arguments, target)
    limits = {name: getattr(arguments, name) for name in ("budget", "ratio", "bits", "error")}
    with _working("planning"), _refusing():
        made = plan(found, **limits, **_chosen(arguments, "allow", "blocks", "solver", "time_weight"))
    if arguments.save is not None:
        made.save(arguments.save)
    verification = None
    if target is not None and arguments.verify:
        with _working("running real steps"):
            verification = made.verify(target.model, target.make_batch(target.batch), target.loss_fn)
        if arguments.save is not None:
            made.save(arguments.save, verification=verification)
    if arguments.json:
        measured = {} if verification is None else {"verification": verification.to_data()}
        print(json.dumps({**made.to_data(), **measured}, indent=1))
    else:
        print(made.summary())
        if verification is not None:
            print(verification)
    over = 0 if verification is None or arguments.budget is None else verification.peak - nbytes_of(arguments.budget)
    if over > 0:
        print(f"the measured peak is over the budget by {size(over)}", file=sys.stderr)
        return 1
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    arguments.batch = arguments.device = None  # sizes are what is looked for, and those of a CPU are computed
    target = _resolved(arguments, fake=not arguments.verify)
    with _working("trying sizes") as show:

        def make_batch(n: int) -> Any:
            show(f"trying a size of {n}")
            return target.make_batch(n)

        found = fit(
            *(target.model, make_batch, target.loss_fn, arguments.budget),
            method="plain" if arguments.plain else "plan",
            optimizer=_made_optimizer(arguments, target),
            run=arguments.verify,
            **_chosen(arguments, "allow", "blocks", "solver"),
        )
    if arguments.save is not None:
        (found.profile if found.plan is None else found.plan).save(arguments.save, verification=found.verification)
    if arguments.json:
        parts = {"plan": found.plan, "verification": found.verification}
        content = {name: None if part is None else part.to_data() for name, part in parts.items()}
        print(json.dumps({"size": found.size, "budget": found.budget, "peak": found.peak, **content}, indent=1))
    else:
        print(found)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    arguments.device = None
    target = _resolved(arguments, fake=False)
    batch = target.make_batch(target.batch)
    with _working("running real steps"):
        rows = bench.bench(target.model, batch, target.loss_fn, arguments.method or bench.METHODS, _say)
    if arguments.save is not None:
        writing.write(document(tables=[bench.table(rows)], title=f"Steps of {arguments.target}"), arguments.save)
    print(json.dumps(bench.to_data(rows), indent=1) if arguments.json else bench.text(rows))
    return 0


def _say(method: str) -> None:
    print(f"{method} ...", file=sys.stderr)


def _report(arguments: argparse.Namespace) -> int:
    try:
        made = writing.read(*arguments.files)
    except FileNotFoundError as error:
        raise _RefusedError(f"there is no file {error.filename!r}; write one with save(), or with --save") from error
    except (OSError, ValueError) as error:
        raise _RefusedError(str(error)) from error
    if arguments.save is not None:
        writing.write(made, arguments.save)
    print(json.dumps(made, indent=1) if arguments.json else writing.text(made))
    return 0


def _chosen(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options that the user gave; those of the library's own choice are left to it."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What the library refuses is a wrong argument, and its message says all that there is to say."""
    try:
        yield
    except BudgetError:
        raise
    except ValueError as error:
        raise _RefusedError(str(error)) from error


def _made_optimizer(arguments: argparse.Namespace, target: Target) -> torch.optim.Optimizer | None:
    if arguments.optimizer is None:
        return None
    text, kind, settings = arguments.optimizer
    make: Callable[..., torch.optim.Optimizer] = kind
    try:
        return make([p for p in target.model.parameters() if p.requires_grad], **{"lr": 1e-3, **settings})
    except (TypeError, ValueError) as error:
        raise _RefusedError(f"--optimizer {text}: {error}") from error


def _resolved(arguments: argparse.Namespace, fake: bool) -> Target:
    """Build what the user named, and say what there is to know about it."""
    if arguments.device is not None and not fake:
        arguments.refuse("--device goes with computed sizes; a real step runs where the model is")
    options = {name: getattr(arguments, name) for name in ("batch", "size", "seq", "dtype")}
    with _working(f"building {arguments.target}"):
        target = targets.resolve(arguments.target, **options, fake=fake)
    if target.note:
        print(f"note: {target.note}", file=sys.stderr)
    return target


def _profiled(arguments: argparse.Namespace, target: Target) -> Profile:
    fake = not arguments.real
    optimizer = _made_optimizer(arguments, target)
    with _working("computing the sizes of a step" if fake else "running a step"):
        batch = target.make_batch(target.batch)
        try:
            return profile(
                *(target.model, batch, target.loss_fn),
                fake=fake,
                device=arguments.device,
                optimizer=optimizer,
                measure=not fake,
            )
        except Exception as error:
            if not fake:
                raise
            first = (str(error).splitlines() or [""])[0]
            raise _RefusedError(
                f"{type(error).__name__}: {first} (--real runs the step with data; --debug shows the traceback)"
            ) from error


def _loaded(arguments: argparse.Namespace) -> Profile:
    """The profile that the user saved; there is no model then, nor anything else to choose about it."""
    given = [
        f"--{name}"
        for name in ("batch", "size", "seq", "dtype", "device", "optimizer", "real", "verify")
        if vars(arguments)[name]
    ]
    if given:
        arguments.refuse(f"{', '.join(given)}: this goes with a model; {arguments.target} is a saved profile")
    try:
        found = Profile.load(arguments.target)
    except FileNotFoundError as error:
        raise _RefusedError(f"there is no file {arguments.target!r}") from error
    except ValueError as error:
        raise _RefusedError(f"{arguments.target}: {error}") from error
    if found.fake and arguments.error is not None:
        raise _RefusedError(f"{arguments.target} was made without data and knows no errors; profile with --real")
    return found


@contextlib.contextmanager
def _working(text: str) -> Iterator[Callable[[str], None]]:
    """Show what takes a while, and for how long, if somebody sees it; the function given shows another text.

    What is printed meanwhile goes to standard error.
    """
    with contextlib.ExitStack() as stack:
        show: Callable[[str], None] = lambda text: None  # noqa: E731
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from rich.console import Console
                from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

                plain = TextColumn("{task.description}", markup=False)  # the name of a file may look like markup
                columns = (SpinnerColumn(), plain, TimeElapsedColumn())
                progress = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
                task = stack.enter_context(progress).add_task(text)
                show = lambda text: progress.update(task, description=text)  # noqa: E731
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield show


def _health() -> int:
    """Print as JSON what :func:`_doctor` prints as text."""
    abilities, tried, healthy = capture.probe(), {}, True
    with _working("trying every method"):
        for name in methods():
            try:
                tried[name] = _try(name)
            except Exception as error:  # a doctor reports what it finds and goes on
                tried[name] = f"failed: {type(error).__name__}: {error}"
                healthy = False
        kernels.prepare()
    healthy = healthy and abilities.slots
    versions = {"lowtide": __version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {package: _version(package) for package in ("numpy", "numba")}
    able = {"slots": abilities.slots, "foreign_hooks": abilities.foreign_hooks, "owners": abilities.sole is not None}
    allocator = {"tunable": can_tune(), "start_with": dict(start_environment())}
    found = {"healthy": healthy, "platform": platform.platform(), "threads": torch.get_num_threads()}
    found |= {"versions": versions, "abilities": able, "methods": tried, "allocator": allocator}
    print(json.dumps({**found, "kernels": kernels.status()}, indent=1))
    return 0 if healthy else 1


def _doctor(arguments: argparse.Namespace) -> int:
    """Print versions, abilities, a tiny step with each method, and the kernels that served it."""
    if arguments.gpu:
        from .tools import accelerator

        return accelerator.doctor(as_json=arguments.json)
    if arguments.json:
        return _health()
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
