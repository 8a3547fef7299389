"""What is asked of a published plugin, besides that it works: metadata, a range of the core, and a cheap import."""

from __future__ import annotations

import subprocess
import sys

from nvalchemi.metadata import all_headers

__all__ = ["import_fault", "is_bounded", "missing_headers"]

_HEADERS = {
    "Summary": ("Summary",),
    "License": ("License-Expression", "License", "License-File"),
    "Requires-Python": ("Requires-Python",),
    "Description": ("Description",),
}

_LIST_AND_IMPORT = """
import importlib, sys
sys.path[:] = {path!r}
from nvalchemi.hooks import list_hooks
list_hooks()
print({package!r} in sys.modules, "torch" in sys.modules)
importlib.import_module({module!r})
print("torch" in sys.modules)
"""


def missing_headers(distribution: str) -> list[str]:
    """Return what a distribution does not say of itself, of what a reader looks for.

    >>> missing_headers("nvalchemi-hooks")
    []
    """
    said = all_headers(distribution)
    return [name for name, headers in _HEADERS.items() if said is None or not any(map(said.get, headers))]


def is_bounded(api_range: str) -> bool:
    """Return whether a range of versions has a lower and an upper bound.

    >>> is_bounded(">=0.1,<0.2"), is_bounded("~=0.1"), is_bounded(">=0.1"), is_bounded("")
    (True, True, False, False)
    """
    both = any(mark in api_range for mark in ("~=", "=="))
    return both or ("<" in api_range and ">" in api_range)


def import_fault(target: str) -> str:
    """Import a plugin's module in a process of its own, and say what is wrong with that; nothing when it is cheap.

    Parameters
    ----------
    target : str
        An entry point's target.

    Returns
    -------
    str
        What cannot be imported, or what imports torch too early; empty when a list of hooks and the import of the
        module leave torch out.
    """
    module = target.partition(":")[0].strip()
    package = module.partition(".")[0]
    code = _LIST_AND_IMPORT.format(path=sys.path, package=package, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        return f"{module} could not be imported in a process of its own:\n{done.stderr}"
    package_listed, torch_listed, torch_imported = done.stdout.split()[-3:]
    if "True" in (package_listed, torch_listed):
        return f"listing imports {package} or torch"
    return f"importing {module} imports torch" if torch_imported == "True" else ""
