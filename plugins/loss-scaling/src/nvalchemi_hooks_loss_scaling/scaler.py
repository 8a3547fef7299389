"""A loss scaler whose unscaling folds into the update, and which never asks the host to wait."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from nvalchemi_hooks_loss_scaling.kernels import advance, advance_numbers, bound
from nvalchemi_hooks_loss_scaling.settings import ScalingOptions, ScalingSettings

__all__ = ["LossScaler"]


class LossScaler:
    """Scales the loss, says by what gradients have to be divided, and adapts when a window closes.

    It fulfils `nvalchemi.hooks.GradientScaler`; an orchestrator that finds it in ``ctx.grad_scaler`` drives it. Where
    neither floor nor ceiling binds, its scale goes through exactly the values of ``torch.amp.GradScaler``.

    Parameters
    ----------
    **options
        The settings of `ScalingSettings`: ``scale``, ``init_scale``, ``growth_factor``, ``backoff_factor``,
        ``growth_interval``, ``min_scale``, ``max_scale``.

    Raises
    ------
    ValueError
        A setting is out of its range.

    Notes
    -----
    Scale (0-dim float32) and growth tracker (0-dim int32) live on the device of the loss once a window has closed
    there, by a tensor; until then the host keeps count and touches the device only when the scale changes. A tensor
    that `divisor` has returned keeps its value when the window closes. Pickling and `state_dict` read both numbers, and
    so may wait for the device.

    References
    ----------
    P. Micikevicius et al., "Mixed Precision Training", ICLR 2018.

    Examples
    --------
    >>> scaler = LossScaler(init_scale=8.0)
    >>> scaler.scale(torch.tensor(0.5))
    tensor(4.)
    >>> scaler.close(found_inf=True)
    >>> scaler.get_scale()
    4.0
    """

    _scale: Tensor
    _known: tuple[float, int] | None  # scale and growth tracker, where the host knows how all windows have ended
    _growth_tracker: Tensor  # where it does not
    _given: Tensor | None  # the scale of the window that is open, within its bounds
    _flags: tuple[Tensor, Tensor] | None  # what `close` is told, on the device

    def __init__(self, **options: Unpack[ScalingOptions]) -> None:
        self.settings = ScalingSettings(**options)
        self.reset()

    def is_enabled(self) -> bool:
        """Return True: a run that does not scale has no such scaler."""
        return True

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss, scaled, and keep scale and growth tracker on its device.

        Parameters
        ----------
        loss : torch.Tensor
            0-dim. One in fp16 or bf16 comes back in float32, so that the product does not overflow.

        Returns
        -------
        torch.Tensor
            0-dim; its graph leads to `loss`.
        """
        if self._scale.device != loss.device:
            self._scale = self._scale.to(loss.device)
            self._growth_tracker = self._growth_tracker.to(loss.device)
            self._given = self._flags = None
        return loss.mul(self._of_window())

    def divisor(self, device: torch.device) -> Tensor:
        """Return the scale of this window: 0-dim float32 on `device`. It is not changed in place, ever."""
        return self._of_window().to(device)

    @property
    def largest_scale(self) -> float:
        """What it never scales by more than."""
        return float(self.settings.max_scale) if self._dynamic else self.settings.first_scale

    def close(self, found_inf: bool | Tensor | None) -> None:
        """End the window.

        Parameters
        ----------
        found_inf : bool, torch.Tensor or None
            True backs off, False counts a good window and grows in time, None leaves everything as it is. A 0-dim
            float32 tensor on the device of the loss (0 or 1) decides there, without the host.
        """
        if found_inf is None or not self._dynamic:
            return
        if isinstance(found_inf, Tensor):
            self._close_on_device(found_inf.to(self._scale.device))
        elif self._known is None:
            self._close_on_device(self._constant_flags()[found_inf])
        else:
            before, self._known = self._known[0], advance_numbers(*self._known, found_inf, self._rule)
            if self._known[0] != before:
                self._scale = torch.full_like(self._scale, self._known[0])  # whoever has the old one keeps it

    @property
    def place(self) -> tuple[int, ...] | None:
        """Where in memory windows are closed on the device; None as long as the host keeps count."""
        if not self._dynamic:
            return (self._scale.data_ptr(),)
        return None if self._known is not None else (self._scale.data_ptr(), self._growth_tracker.data_ptr())

    def reset(self) -> None:
        """Start afresh, as if no window had closed."""
        self._start(self.settings.first_scale, 0)

    def get_scale(self) -> float:
        """Return the scale as a number; the host waits for the device if a window has closed there."""
        return self._numbers()[0]

    def state_dict(self) -> dict[str, Any]:
        """Return scale, growth tracker and rule as plain numbers.

        >>> LossScaler(scale=128.0).state_dict()
        {'scale': 128.0, 'dynamic': False}
        """
        state: dict[str, Any] = {"scale": self.get_scale(), **self.settings.to_state()}
        if self.settings.dynamic:
            state["growth_tracker"] = self._numbers()[1]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved scale and growth tracker.

        Parameters
        ----------
        state : mapping
            What `state_dict` returned, here or of a ``torch.amp.GradScaler``. An empty one, which a disabled scaler
            leaves, gives a warning and a fresh scale.

        Raises
        ------
        ValueError
            A setting in the state differs from the one here, or its numbers can be no scale or no tracker. Nothing is
            changed then.
        """
        if not state:
            warnings.warn(
                "The saved state of the loss scaler is empty: the run that saved it did not scale its loss. This run "
                f"goes on from a fresh scale of {self.settings.first_scale!r}.",
                stacklevel=2,
            )
            self.reset()
            return
        self.settings.refuse_others(state)
        self._start(*_numbers(state, self.settings))

    def __getstate__(self) -> dict[str, Any]:
        # Numbers, not tensors: a spawned process would share the memory of tensors and count in its parent's tracker.
        scale, tracker = self._numbers()
        return {"settings": self.settings, "scale": scale, "tracker": tracker}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.settings = state["settings"]
        self._start(state["scale"], state["tracker"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings!r})"

    def _start(self, scale: float, growth_tracker: int) -> None:
        self._scale = torch.tensor(scale, dtype=torch.float32)
        self._growth_tracker = torch.tensor(growth_tracker, dtype=torch.int32)
        self._known = float(self._scale), growth_tracker
        self._dynamic, self._rule = self.settings.dynamic, self.settings.rule
        self._given = self._flags = None

    def _numbers(self) -> tuple[float, int]:
        """Return scale and growth tracker on the host."""
        if self._known is not None:
            return self._known
        return float(bound(self._scale, self._rule).item()), int(self._growth_tracker.item())

    def _of_window(self) -> Tensor:
        """Return the scale of this window, which does not change when the window closes."""
        if self._known is not None:
            return self._scale
        if self._given is None:
            bound(self._scale, self._rule, out=self._scale)  # in its place, which a captured update remembers
            self._given = self._scale.clone()
        return self._given

    def _close_on_device(self, found_inf: Tensor) -> None:
        """Decide there; from now on the host does not know."""
        if self._known is not None:
            self._scale = self._scale.clone()  # it is changed in place from now on
            self._growth_tracker = torch.full_like(self._growth_tracker, self._known[1], device=self._scale.device)
            self._known = None
        self._of_window()  # within the bounds
        advance(self._scale, self._growth_tracker, found_inf, self._rule)
        self._given = None

    def _constant_flags(self) -> tuple[Tensor, Tensor]:
        if self._flags is None:
            device = self._scale.device
            self._flags = torch.zeros((), device=device), torch.ones((), device=device)
        return self._flags


def _numbers(state: Mapping[str, Any], settings: ScalingSettings) -> tuple[float, int]:
    """Return scale and growth tracker of a saved state, or say why they are none."""
    scale, tracker = state.get("scale"), state.get("growth_tracker", state.get("_growth_tracker"))
    lowest, highest = (settings.min_scale, settings.max_scale) if settings.dynamic else (settings.first_scale,) * 2
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not _fits(scale, lowest, highest):
        raise ValueError(
            f"Loss scaling: scale is {scale!r} in the saved state, which holds {sorted(state)}, and must be a number "
            f"from {lowest!r} to {highest!r} here; change the settings, or start with a fresh scale."
        )
    if not settings.dynamic:
        return float(scale), 0
    if type(tracker) is not int or tracker < 0:
        raise ValueError(
            f"Loss scaling: growth_tracker is {tracker!r} in the saved state, which holds {sorted(state)}; it must be "
            "an int of 0 or more. Set it to 0 to count good steps afresh."
        )
    return float(scale), min(tracker, settings.growth_interval - 1)


def _fits(scale: float, lowest: float, highest: float) -> bool:
    """Return whether a saved float32 lies between two settings, which float32 may have rounded."""
    low, number, high = torch.tensor([lowest, scale, highest], dtype=torch.float32).tolist()
    return bool(low <= number <= high)
