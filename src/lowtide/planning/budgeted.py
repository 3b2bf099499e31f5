"""A budget for an attached model: plan from shapes before its first step, and from measurements after it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from ..policy.plan import Plan
from ..policy.tuners.mix import Finding, MixTuner
from ..report import size
from ..session.session import Session
from .memory_errors import surrogate_loss
from .planner import BudgetError, BudgetPlan, plan
from .profiling import Profile, with_findings, without_data


class Budgeted:
    """Lets a session of ``auto`` choose by a budget for the peak."""

    def __init__(self, session: Session, limit: int) -> None:
        tuner = session.policy.tuner
        assert isinstance(tuner, MixTuner)
        self.limit = limit
        self.plan: BudgetPlan | None = None
        """The last that was made."""
        self._session = session
        self._tuner = tuner
        self._profile: Profile | None = None
        self._short = 0  # bytes by which the last plan is above the limit
        tuner.planner = self._decide

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before each forward: the first one is profiled, without data and aside."""
        if self._profile is not None or self._session.is_aside or not torch.is_grad_enabled():
            return
        with self._session.aside():
            found = without_data(module, (args, kwargs), surrogate_loss, min_numel=self._session.policy.min_numel)
        self.plan = plan(found, self.limit)  # raises if that is too little
        self._profile = found
        if self._session.step == 0:
            self._tuner.follow(self.plan)

    def _decide(self, findings: list[Finding]) -> Plan:
        profile = self._profile
        if profile is None:  # nothing is known of the step yet, as after a state was loaded
            return Plan()
        known = {finding.sites[0]: finding for finding in findings}
        saved = tuple(with_findings(profile.saved, known, self._session.method))
        measured = dataclasses.replace(profile, saved=saved, fake=False)
        try:
            made = plan(measured, self.limit)
            self._short = 0
        except BudgetError as error:  # without options whose bias is too large less is possible
            made = plan(measured, error.least)
            self._short = int(error.least) - self.limit
        self.plan = made
        return made

    def notes(self) -> tuple[str, ...]:
        """What a report should say."""
        if self.plan is None or self.plan.predicted is None:
            return (f"a budget of {size(self.limit)}, not planned for yet",)
        over = f", {size(self._short)} above it: less would bias the gradients" if self._short else ""
        return (f"a budget of {size(self.limit)}: predicted peak {size(self.plan.predicted.peak)}{over}",)
