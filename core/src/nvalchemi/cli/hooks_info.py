"""``nvalchemi hooks info``: everything about one hook."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nvalchemi.cli.inputs import keyword_arguments
from nvalchemi.cli.output import coloured, print_json
from nvalchemi.cli.parsers import add_command

if TYPE_CHECKING:
    from nvalchemi.cli.parsers import Subparsers
    from nvalchemi.hooks.plugins.catalog import HookListing
    from nvalchemi.hooks.plugins.specs import HookOffer

__all__ = ["add_to", "describe", "run"]

_DESCRIPTION = """\
Say everything about one hook: from its metadata, and, as this one plugin is loaded, what it does at which stage.
Of a hook that is broken, incompatible or switched off everything is said that the metadata knows, and why.
"""

_EPILOG = """\
exit codes:
  0  shown, and the hook can be used
  1  there is no such hook, several have the name, or it cannot be used (what is known of it is shown all the same)
  2  the command line was not understood

examples:
  nvalchemi hooks info ema
  nvalchemi hooks info nvalchemi-hooks-ema:ema    where two distributions offer the name
  nvalchemi hooks info mixed_precision --arguments '{"precision": "bf16"}'    a hook that needs arguments
"""


def add_to(commands: Subparsers) -> None:
    """Add the command to the words of ``nvalchemi hooks``."""
    parser = add_command(
        commands,
        "info",
        help="everything about one hook: whose it is, what it does and when",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument("name", metavar="NAME", help="the name of an installed hook, or distribution:name")
    parser.add_argument(
        "--arguments", metavar="JSON", default="{}", help="keyword arguments to make it with, as a JSON object"
    )
    parser.add_argument("--card", action="store_true", help="print the distribution's own description as well")
    parser.add_argument("--json", action="store_true", help="print a JSON object for a program, the card included")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is known; 1 when the hook cannot be used."""
    from nvalchemi.hooks.plugins.catalog import find_hook
    from nvalchemi.hooks.plugins.switches import Switches

    arguments = keyword_arguments(options.arguments)
    shown = describe(find_hook(options.name, Switches.from_environment()), arguments)
    if options.json:
        print_json(shown)
    else:
        _print(shown)
        if options.card:
            print(f"\n{shown['about'].get('card', 'Its distribution has no description.')}")
    return 0 if shown["state"] == "available" else 1


def describe(listing: HookListing, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is shown, as data; the plugin is loaded, and its hook made, as far as they let themselves."""
    from nvalchemi.errors import PluginLoadError
    from nvalchemi.hooks.plugins.catalog import HookState
    from nvalchemi.hooks.plugins.loader import load_offer
    from nvalchemi.hooks.plugins.specs import HOOK_API_VERSION
    from nvalchemi.metadata import core_version

    shown: dict[str, Any] = {
        "name": listing.name,
        "qualified_name": listing.qualified_name,
        "state": str(listing.state),
        "reason": listing.reason,
        "distribution": listing.distribution,
        "version": listing.version,
        "target": listing.target,
        "api_range": listing.api_range,
        "core_version": core_version(),
        "hook_api": HOOK_API_VERSION,
        "about": about(listing.distribution),
    }
    if listing.state not in (HookState.AVAILABLE, HookState.BROKEN):
        return shown
    try:
        offer = load_offer(listing)
    except PluginLoadError as error:
        return {**shown, "state": str(HookState.BROKEN), "reason": str(error)}
    return {**shown, "state": str(HookState.AVAILABLE), "reason": "", **_offered(offer, arguments)}


def about(distribution: str) -> dict[str, Any]:
    """Return what a distribution's metadata says to a reader: summary, licence, links. Empty where there is none."""
    from nvalchemi.metadata import all_headers

    headers = all_headers(distribution)
    if headers is None:
        return {}
    links = [link.partition(",")[::2] for link in headers.get_all("Project-URL") or []]
    said = {
        "summary": headers.get("Summary"),
        "license": headers.get("License-Expression") or headers.get("License"),
        "requires_python": headers.get("Requires-Python"),
        "homepage": headers.get("Home-page"),
        "links": {name.strip(): url.strip() for name, url in links},
        "card": headers.json.get("description"),
    }
    return {key: value for key, value in said.items() if value}


def _offered(offer: HookOffer, arguments: Mapping[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict

    from nvalchemi.cli.specimen import examine

    said: dict[str, Any] = {"summary": offer.summary, "default_kwargs": offer.default_kwargs}
    try:
        specimen = examine(offer.factory(**{**(offer.default_kwargs or {}), **arguments}))
    except Exception as error:  # a guest's constructor may raise anything; the rest is said
        return {**said, "not_made": f"{type(error).__name__}: {error}"}
    return {**said, **asdict(specimen)}


def _print(shown: dict[str, Any]) -> None:
    state = coloured(shown["state"], "green" if shown["state"] == "available" else "red")
    print(
        f"{coloured(shown['name'], 'bold')} ({state}){': ' if shown.get('summary') else ''}{shown.get('summary', '')}"
    )
    for title, text in _lines(shown):
        print(f"  {title:<12}  {text}")
    if "not_made" in shown:
        print(f"\nIt was not made, so that its stages are not known: {shown['not_made']}\nGive it --arguments JSON.")
    if shown["reason"]:
        print(f"\nIt cannot be used: {shown['reason']}")


def _lines(shown: dict[str, Any]) -> list[tuple[str, str]]:
    about = shown["about"]
    lines = [
        ("from", f"{shown['distribution']} {shown['version']}"),
        ("about", about.get("summary", "")),
        ("entry point", f"{shown['name']} = {shown['target']}"),
        ("core", f"{shown['api_range'] or 'any'} ({shown['core_version']} is installed, hook API {shown['hook_api']})"),
        ("licence", about.get("license", "")),
        ("python", about.get("requires_python", "")),
        ("homepage", about.get("homepage", "")),
        *((name.lower(), url) for name, url in about.get("links", {}).items()),
    ]
    if "default_kwargs" in shown:
        joins = "no: it has no default arguments" if shown["default_kwargs"] is None else "yes"
        given = f", with {shown['default_kwargs']}" if shown["default_kwargs"] else ""
        lines.append(('hooks="auto"', f"{joins}{given}"))
    if "kind" in shown:
        every = f", every {shown['frequency']} steps" if (shown["frequency"] or 1) > 1 else ""
        order = "" if shown["priority"] is None else f"{shown['priority']}: {shown['priority_reason']}"
        lines += [("class", f"{shown['cls']}, {shown['kind']}{every}"), ("priority", order)]
        lines += [("acts at", ", ".join(shown["stages"]) or "no stage"), ("powers", ", ".join(shown["powers"]))]
    return [(title, text) for title, text in lines if text]
