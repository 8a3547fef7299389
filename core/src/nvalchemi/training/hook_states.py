"""The states of a run's hooks, under names that hold whatever their order, and where each comes from."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvalchemi.errors import CheckpointMismatchError, CheckpointWarning, HookConflictError, HookStateMissingError
from nvalchemi.hooks.protocols import CheckpointableHook
from nvalchemi.metadata import Provenance, entry_points, provenance_of
from nvalchemi.training.arguments import global_rank
from nvalchemi.training.plain import host_copy
from nvalchemi.training.saved_tensor import placed

if TYPE_CHECKING:
    from nvalchemi.hooks.registry import HookRegistry

__all__ = ["HookStates", "NamedHook"]


@dataclass(frozen=True)
class NamedHook:
    """A hook of a run, and what a checkpoint says of it.

    Attributes
    ----------
    key : str
        Identifies the instance among the others.
    hook : object
        The hook itself.
    name : str
        The name by which it was activated, or that of its class.
    provenance : Provenance or None
        Its distribution and version.
    """

    key: str
    hook: Any
    name: str
    provenance: Provenance | None

    @property
    def record(self) -> dict[str, Any]:
        """What a checkpoint says of it, its state apart."""
        kind = type(self.hook)
        origin = self.provenance or provenance_of(self.hook)
        return {
            "name": self.name,
            "class": f"{kind.__module__}:{kind.__qualname__}",
            "distribution": origin.distribution if origin else None,
            "version": origin.version if origin else None,
        }

    @property
    def keeps_state(self) -> bool:
        """Whether it has a state to be saved."""
        return isinstance(self.hook, CheckpointableHook)


class HookStates:
    """All hooks of a run by key, with the states of hooks that a checkpoint held and this run has not.

    Parameters
    ----------
    hooks : iterable of NamedHook
        In the order of their calls.

    Raises
    ------
    HookConflictError
        A ``ValueError``: two hooks, at least one of which keeps state, have one key.
    """

    def __init__(self, hooks: Iterable[NamedHook]) -> None:
        self._hooks: dict[str, NamedHook] = {}
        self._kept: dict[str, dict[str, Any]] = {}
        for hook in hooks:
            key = hook.key
            if key in self._hooks and (hook.keeps_state or self._hooks[key].keeps_state):
                raise HookConflictError(
                    f"Two hooks are called {key!r} ({type(self._hooks[key].hook).__name__} and "
                    f"{type(hook.hook).__name__}), so their states could not be told apart; give them labels: "
                    'hooks={"first": ..., "second": ...}.'
                )
            count = 2
            while key in self._hooks:  # neither keeps state: nothing depends on which is which
                key, count = f"{hook.key}#{count}", count + 1
            self._hooks[key] = hook

    def state_dict(self) -> dict[str, Any]:
        """Return record and, where there is one, state of every hook, and of those that were kept from a checkpoint."""
        own: dict[str, Any] = {}
        for key, hook in self._hooks.items():
            own[key] = hook.record
            if hook.keeps_state:
                own[key]["state"] = hook.hook.state_dict()
        return {**self._kept, **own}

    def check(self, states: Mapping[str, Mapping[str, Any]], fresh: Collection[str] = ()) -> None:
        """Refuse states that lack that of a hook, unless it is said to be fresh.

        Raises
        ------
        HookStateMissingError
            A ``ValueError`` that names the hook, where it comes from, what the file holds instead, and the remedy.
        CheckpointMismatchError
            A ``ValueError``: `fresh` names no hook of this run.
        """
        for key in fresh:
            if key not in self._hooks:
                raise CheckpointMismatchError(
                    f"fresh names {key!r}, but the hooks are {sorted(self._hooks)}; use one of these keys."
                )
        saved = sorted(key for key, record in states.items() if "state" in record)
        for key, hook in self._hooks.items():
            if hook.keeps_state and key not in saved and key not in fresh:
                near = difflib.get_close_matches(key, saved, n=1)
                raise HookStateMissingError(
                    f"The hook {key!r} ({type(hook.hook).__name__}, {hook.provenance or 'no installed distribution'}) "
                    f"keeps state, but the checkpoint has none of it: it holds the states of {saved}. "
                    f"{f'Was it called {near[0]!r} then? ' if near else ''}"
                    f"Leave the hook out, or let it start from scratch: fresh=[{key!r}]."
                )

    def load(self, states: Mapping[str, Mapping[str, Any]], fresh: Collection[str], undo: ExitStack) -> None:
        """Give every hook its state; `undo` is told how each gets back what it had, should one refuse.

        States of hooks that this run has not are kept, to be saved again, with a `CheckpointWarning`.
        """
        for key, hook in self._hooks.items():
            if not hook.keeps_state or key in fresh or "state" not in states.get(key, {}):
                continue
            before = hook.hook.state_dict()
            undo.callback(hook.hook.load_state_dict, before)
            try:
                hook.hook.load_state_dict(placed(states[key]["state"], before))
            except Exception as error:  # noted and raised again
                error.add_note(_where(key, states[key], hook))
                raise
        undo.callback(setattr, self, "_kept", self._kept)
        self._kept = {
            key: host_copy(placed(dict(one)))
            for key, one in states.items()
            if "state" in one and key not in self._hooks
        }
        for key, record in self._kept.items() if global_rank() == 0 else ():
            warnings.warn(_left_over(key, record), CheckpointWarning, stacklevel=4)

    def last_calls(self, registry: HookRegistry) -> dict[str, dict[str, int]]:
        """Return when hooks that do not run at every dispatch ran last, by key and stage."""
        calls = {key: registry.last_calls(hook.hook) for key, hook in self._hooks.items()}
        return {key: last for key, last in calls.items() if last}

    def set_last_calls(self, registry: HookRegistry, calls: Mapping[str, Mapping[str, int]]) -> None:
        """Give back what `last_calls` returned; hooks that are not there any more are passed over."""
        for key, hook in self._hooks.items():
            registry.set_last_calls(hook.hook, calls.get(key, {}))


def _where(key: str, record: Mapping[str, Any], hook: NamedHook) -> str:
    saved_by = f"{record.get('distribution')} {record.get('version')}"
    return f"While loading the state of the hook {key!r}, saved by {saved_by}, into {hook.provenance or hook.name}."


def _left_over(key: str, record: Mapping[str, Any]) -> str:
    distribution, version = record.get("distribution"), record.get("version")
    installed = {one.distribution for one in entry_points()}
    what = (
        f"The checkpoint holds the state of the hook {key!r} ({record.get('class')}, "
        f"{f'{distribution} {version}' if distribution else 'no installed distribution'}), which this run has not; "
        "it is kept and saved again."
    )
    if distribution and distribution not in installed:
        return f"{what} {distribution} is not installed here: pip install {distribution}=={version}"
    return f"{what} To go on with it, add the hook: hooks=[..., {record.get('name')!r}]."
