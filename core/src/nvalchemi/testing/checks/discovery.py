"""Whether the hook is found, says who it is, and costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys

import importlib_metadata

from nvalchemi.hooks import HookListing, HookState, activate_hooks, list_hooks
from nvalchemi.testing.checks.base import Checks, check, require

__all__ = ["DiscoveryChecks"]

_LIST_AND_IMPORT = """
import importlib, sys
from nvalchemi.hooks import list_hooks
list_hooks()
package = {module!r}.partition(".")[0]
print(package in sys.modules, "torch" in sys.modules)
importlib.import_module({module!r})
print("torch" in sys.modules)
"""


class DiscoveryChecks(Checks):
    """Only for a hook that is installed: one with an `entry_point`."""

    @check(
        'install the package (pip install -e .) with `name = "package.plugin"` under '
        '[project.entry-points."nvalchemi.hooks"], and offer HookOffer(name, factory) there.'
    )
    def test_it_is_found_by_its_entry_point(self) -> None:
        """A strategy that names the hook gets the class that is tested."""
        listing = self._listing()
        require(listing.state is HookState.AVAILABLE, f"{listing} is {listing.state}: {listing.reason}")
        hook = self.fresh_hook()
        [activated] = activate_hooks([{listing.qualified_name: self.arguments}])
        require(
            type(activated.hook) is type(hook),
            f"the name {listing.name!r} makes a {type(activated.hook).__name__}, the factory a {type(hook).__name__}",
        )

    @check("fill in `description`, `readme`, `license` and `requires-python` under [project] in pyproject.toml.")
    def test_its_metadata_is_complete(self) -> None:
        """Whoever finds the distribution reads what it does, under which licence, and for which Python."""
        metadata = importlib_metadata.metadata(self._listing().distribution)
        wanted = {"Summary": ("Summary",), "License": ("License-Expression", "License", "License-File")}
        wanted |= {"Requires-Python": ("Requires-Python",), "Description": ("Description",)}
        missing = [name for name, headers in wanted.items() if not any(metadata.get(header) for header in headers)]
        require(not missing, f"{self._listing().distribution} says nothing of its {', '.join(missing)}")

    @check('depend on the core in a range, `"nvalchemi-hooks>=0.1,<0.2"` for example.')
    def test_it_declares_the_range_of_the_core(self) -> None:
        """The versions of the core that it was made for stand in its metadata, with a lower and an upper bound."""
        listing = self._listing()
        declared = listing.api_range
        bounded = any(mark in declared for mark in ("<", "~=", "==")) and any(
            mark in declared for mark in (">", "~=", "==")
        )
        require(bounded, f"{listing.distribution} asks for nvalchemi-hooks {declared or 'in any version'}")

    @check("import torch where the hook is made: inside nvalchemi_hooks() or the factory, not at the top of a module.")
    def test_listing_it_imports_no_torch(self) -> None:
        """Neither a list of what is installed nor the plugin's own module costs an import of torch."""
        listing = self._listing()
        module = listing.target.partition(":")[0].strip()
        code = _LIST_AND_IMPORT.format(module=module)
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        require(done.returncode == 0, f"{module} could not be imported in a process of its own:\n{done.stderr}")
        listed, torch_listed, torch_imported = done.stdout.split()
        require(listed == torch_listed == "False", f"listing imports {module.partition('.')[0]} or torch")
        require(torch_imported == "False", f"importing {module} imports torch")

    def _listing(self) -> HookListing:
        self.applies(self.entry_point is not None, "entry_point is None: the hook is not published")
        found = [hook for hook in list_hooks() if self.entry_point in (hook.name, hook.qualified_name)]
        require(bool(found), f"no installed distribution has a hook called {self.entry_point!r}")
        return found[0]
