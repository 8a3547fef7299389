"""Every target, in one place. `value <= at_most` is what holds."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True)
class Target:
    """What one row should reach.

    Parameters
    ----------
    row : str
        What is measured.
    at_most : float, optional
        The largest value with which the row holds; None where the figure is there to be read, not to be judged.
    stretch : float, optional
        What a reckless loop written by hand would come to.
    unit : str
        Of the value; empty for a plain number.
    """

    row: str
    at_most: float | None = None
    stretch: float | None = None
    unit: str = ""

    def __str__(self) -> str:
        if self.at_most is None:
            return ""
        stretch = "" if self.stretch is None else f" ({self.stretch:g})"
        return f"{self.at_most:g}{stretch}{self.unit and ' '}{self.unit}"


TARGETS = {
    # exact counts
    "reads eager": Target("host reads a step, all plugins on", 1),
    "reads lazy": Target("host reads a step, all plugins on, lazy", 0),
    "bytes": Target("bytes a parameter, all plugins on, fused AdamW in fp32", 48),
    "bytes triton": Target("bytes a parameter, with the one-pass Triton kernel", 40),
    "ops eager": Target("operations of the update, for 300 tensors as for 8", 14),
    "ops lazy": Target("operations of the update, for 300 tensors as for 8, lazy", 16),
    "skipped": Target("tensors that a skipped step changes: weights, moments, counters, average", 0),
    # whole steps of a tiny network, as a ratio to the same loop written by hand
    "four": Target("all four plugins, tiny MLP: ratio to the raw loop", 0.90, 0.75),
    "four lazy": Target("all four plugins, tiny MLP, lazy: ratio to the raw loop", 0.90, 0.75),
    "empty": Target("an empty orchestrator: ratio to the raw loop without clip and EMA", 1.02),
    "strategy": Target("a TrainingStrategy step, all four plugins: ratio to the raw loop", 1.00, 0.80),
    "strategy lazy": Target("a TrainingStrategy step, all four plugins, lazy: ratio to the raw loop", 1.00, 0.80),
    "dispatch": Target("hook dispatch, 6 stages x 4 hooks", 1.0, unit="µs"),
    # the update alone
    "ema large": Target("EMA, 20M parameters in 200 tensors: ratio to AveragedModel", 0.75),
    "ema tiny": Target("EMA, 200 tiny tensors: ratio to AveragedModel", 0.05),
    "update fused": Target("update path, 20M: ratio to naive with fused AdamW", 0.78, 0.72),
    "update foreach": Target("update path, 20M: ratio to naive with foreach AdamW", 0.32, 0.27),
    "update tiny": Target("update path, 200 tiny tensors: ratio to naive with fused AdamW", 0.40, 0.31),
    # processes
    "import": Target("import of nvalchemi.hooks, over torch", 10, unit="ms"),
    "list 0": Target("listing 0 plugins among 100 other distributions", 8, unit="ms"),
    "list 10": Target("listing 10 plugins among 100 other distributions", 8, unit="ms"),
    "list 200": Target("listing 200 plugins among 100 other distributions", 18, unit="ms"),
    "list again": Target("listing 200 plugins, the second time", 0.1, unit="ms"),
    # for gpu.py
    "h200 stock": Target("H200, update path of 100M parameters in fp32, torch's operations", 1.25, unit="ms"),
    "h200 triton": Target("H200, update path of 100M parameters in fp32, the one-pass kernel", 1.03, unit="ms"),
    "h200 ema": Target("H200, EMA of 100M parameters in fp32", 0.31, unit="ms"),
}
