"""Whether the hook is found, says who it is, and costs nothing until it is used."""

from __future__ import annotations

from nvalchemi.hooks import HookListing, HookState, activate_hooks, list_hooks
from nvalchemi.hooks.plugins.published import import_fault, is_bounded, missing_headers
from nvalchemi.testing.checks.base import Checks, check, require

__all__ = ["DiscoveryChecks"]


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
        missing = missing_headers(self._listing().distribution)
        require(not missing, f"{self._listing().distribution} says nothing of its {', '.join(missing)}")

    @check('depend on the core in a range, `"nvalchemi-hooks>=0.1,<0.2"` for example.')
    def test_it_declares_the_range_of_the_core(self) -> None:
        """The versions of the core that it was made for stand in its metadata, with a lower and an upper bound."""
        listing = self._listing()
        declared = listing.api_range or "in any version"
        require(is_bounded(listing.api_range), f"{listing.distribution} asks for nvalchemi-hooks {declared}")

    @check("import torch where the hook is made: inside nvalchemi_hooks() or the factory, not at the top of a module.")
    def test_listing_it_imports_no_torch(self) -> None:
        """Neither a list of what is installed nor the plugin's own module costs an import of torch."""
        fault = import_fault(self._listing().target)
        require(not fault, fault)

    def _listing(self) -> HookListing:
        self.applies(self.entry_point is not None, "entry_point is None: the hook is not published")
        found = [hook for hook in list_hooks() if self.entry_point in (hook.name, hook.qualified_name)]
        require(bool(found), f"no installed distribution has a hook called {self.entry_point!r}")
        return found[0]
