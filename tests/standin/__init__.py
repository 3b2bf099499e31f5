"""A stand-in for an accelerator: host memory behind a device of its own, which counts what would wait for a real one.

Importing it builds ``device.cpp`` (half a minute, once) and registers the device ``tide`` in this process for good, so
import it in a child process. Operators run as torch's CPU kernels. What differs is what a GPU differs in: the device of
tensors, autograd's thread for it, current devices and streams by thread, and each way of waiting, which :func:`watch`
counts.
"""

from __future__ import annotations

import atexit
import os
import sys
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import load

import lowtide

from . import races

HERE = Path(__file__).parent
LOWTIDE, TORCH = (f"{Path(package.__file__).parent}/" for package in (lowtide, torch))
DEVICE: Any = load("lowtide_standin", [str(HERE / "device.cpp")], extra_cflags=["-O1", "-w"], verbose=False)


def _register() -> None:
    torch.utils.rename_privateuse1_backend("tide")
    module: Any = types.ModuleType("torch.tide")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = DEVICE.current_device
    module.set_device = lambda device: DEVICE.set_device(
        device if isinstance(device, int) else torch.device(device).index
    )
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = module.manual_seed = lambda seed: None
    module.get_rng_state = lambda device=0: torch.empty(0, dtype=torch.uint8)
    module.set_rng_state = lambda state, device=0: None
    module.get_rng_state_all = list
    module.set_rng_state_all = lambda states: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.synchronize = lambda *device: None
    module.memory_allocated = lambda *device: DEVICE.counts()["allocated"]
    module.max_memory_allocated = lambda *device: DEVICE.counts()["peak"]
    module.reset_peak_memory_stats = lambda *device: DEVICE.reset()
    races.register(module, DEVICE)
    torch._register_device_module("tide", module)
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


def _leave() -> None:
    """End the process as it is: a thread of autograd may still be dropping a graph, and aborts if Python is gone.

    torch leaves a context of Python in every graph task; its owner, a thread of the device, needs Python to drop it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_value") else 0)


_register()
atexit.register(_leave)


@contextmanager
def watch() -> Iterator[Counter[tuple[str, str]]]:
    """Counts waits by kind and by the innermost line of lowtide; "(user)" if lowtide is not on the stack.

    Kinds are ``item`` (a number is read), ``d2h`` (a tensor is read) and ``h2d`` (a tensor is sent, and waited for).
    Waits inside the reference kernels do not count: on a GPU others serve.
    """
    waits: Counter[tuple[str, str]] = Counter()

    def tell(what: str, size: int) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(LOWTIDE):
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "__torch_function__":  # it passes on what others call
            frame = frame.f_back
            while frame is not None and frame.f_code.co_filename.startswith(TORCH):
                frame = frame.f_back
        where = "(user)"
        if frame is not None and frame.f_code.co_filename.startswith(LOWTIDE):
            where = f"{frame.f_code.co_filename.removeprefix(LOWTIDE)}:{frame.f_lineno}"
        if not where.startswith("kernels/reference") and not what.endswith("async"):
            waits[what, where] += 1

    DEVICE.observe(tell)
    try:
        yield waits
    finally:
        DEVICE.observe(None)
