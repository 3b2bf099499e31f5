"""What a trainer writes into its logs about an attached model."""

from __future__ import annotations

import torch

from ..attachment import Attachment
from ..machine.measure import resident

_MIB = 2**20


def figures(handle: Attachment, device: torch.device) -> dict[str, float]:
    """Bytes of the last forward and the peak so far, in MiB, by the names that logs use.

    ``plain`` is what autograd would keep, ``kept`` what is kept instead, ``held`` what other code keeps alive anyway.
    ``peak`` is that of the process: on CUDA of tensors, since torch's counter was last reset; on the CPU of resident
    memory, on Linux only. Where there is no such counter it is left out.
    """
    report = handle.report()
    found = {
        "lowtide_plain_mib": report.plain_nbytes / _MIB,
        "lowtide_kept_mib": report.stored_nbytes / _MIB,
        "lowtide_held_mib": report.held_nbytes / _MIB,
    }
    peak = _peak_nbytes(device)
    return found if peak is None else {**found, "lowtide_peak_mib": peak / _MIB}


def _peak_nbytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        return resident("VmHWM") if device.type == "cpu" else None
    except OSError:
        return None


def rank() -> int:
    """This process among those that train together; 0 if it is alone."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0
