"""What every hook has to fulfil."""

from __future__ import annotations

from grad_centralization import GradCentralizationHook

from nvalchemi.testing import HookConformance


class TestGradCentralizationHook(HookConformance):
    entry_point = "grad_centralization"
    factory = GradCentralizationHook


class TestConvolutionsOnly(TestGradCentralizationHook):
    arguments = {"min_dims": 4}
