"""One scan of the metadata, whatever lies about on the path."""

from __future__ import annotations

import shutil
import sys
import types
from collections import OrderedDict

import importlib_metadata
import pytest

import nvalchemi
from nvalchemi.hooks import activate_hooks, list_hooks, provenance_of, refresh_hooks
from nvalchemi.metadata import Provenance, core_version, entry_points


def names_and_versions():
    return [(record.name, record.distribution, record.version) for record in entry_points()]


def test_the_metadata_is_scanned_once_a_process(site, monkeypatch):
    """Two listings and two activations scan once; a refresh scans again."""
    site.add_plugin("acme-hooks", ["noise"])
    scans = []
    inner = importlib_metadata.distributions

    def counting(name=None):
        if name is None:
            scans.append(1)
        return inner(name=name)

    monkeypatch.setattr(importlib_metadata, "distributions", counting)
    for _ in range(2):
        list_hooks()
        activate_hooks(["noise"])
    assert len(scans) == 1
    refresh_hooks()
    list_hooks()
    assert len(scans) == 2


def test_importing_the_doors_scans_nothing(site):
    """Importing the three doors loads no metadata reader, no pluggy, no torch and no pydantic."""
    code = (
        "import sys, nvalchemi.hooks, nvalchemi.training, nvalchemi.training.hooks\n"
        "print([m for m in ('torch', 'pydantic', 'pluggy', 'importlib_metadata', 'packaging') if m in sys.modules])"
    )
    done = site.run("-c", code)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_refresh_sees_what_was_installed_meanwhile(site):
    """A distribution installed while Python runs is found after a refresh, and not before."""
    assert list_hooks() == []
    site.refreshes = False
    site.add_plugin("acme-hooks", ["noise"])
    assert list_hooks() == []
    refresh_hooks()
    assert [hook.name for hook in list_hooks()] == ["noise"]
    assert len(activate_hooks(["noise"])) == 1


@pytest.mark.parametrize("order", [list, lambda found: list(reversed(list(found)))])
def test_two_metadata_folders_of_one_distribution_count_once(site, order):
    """A dist-info and an egg-info of one plugin give one hook."""
    site.order = order
    site.add_plugin("acme-hooks", ["noise"])
    site.add("acme-hooks", hooks={"noise": "acme_hooks.plugin"}, egg_info=True)
    assert names_and_versions() == [("noise", "acme-hooks", "1.0")]
    assert len(activate_hooks(["noise"])) == 1


@pytest.mark.parametrize("order", [list, lambda found: list(reversed(list(found)))])
def test_of_two_versions_in_one_folder_the_newest_counts(site, order):
    """A stale metadata folder beside the newer one is not listed, in whatever order the disk gives them."""
    site.order = order
    site.add("acme-hooks", "1.9", hooks={"noise": "acme_hooks.plugin"})
    site.add("Acme_Hooks", "1.10", hooks={"noise": "acme_hooks.plugin"})
    assert names_and_versions() == [("noise", "Acme_Hooks", "1.10")]


def test_the_first_on_the_path_counts_as_it_does_for_imports(site, tmp_path):
    """Of two installations on different places of the path, the one Python would import is listed, newer or not."""
    later = tmp_path / "later"
    site.roots.append(later)
    site.add("acme-hooks", "1.0", hooks={"noise": "acme_hooks.plugin"})
    site.add("acme-hooks", "2.0", hooks={"noise": "acme_hooks.plugin"}, root=later)
    assert names_and_versions() == [("noise", "acme-hooks", "1.0")]


def test_a_distribution_without_hooks_shadows_its_later_namesake(site, tmp_path):
    """When the first installation on the path has no hooks, those of a later one, out of reach, are not listed."""
    later = tmp_path / "later"
    site.roots.append(later)
    site.add("acme-hooks", "2.0")
    site.add("acme-hooks", "1.0", hooks={"noise": "acme_hooks.plugin"}, root=later)
    assert names_and_versions() == []


def test_the_order_is_sorted_and_not_that_of_the_disk(site):
    """Names are sorted, then distributions, whatever order the metadata folders are read in."""
    site.add("zeta", hooks={"b": "zeta", "a": "zeta"})
    site.add("alpha", hooks={"c": "alpha", "b": "alpha"})
    expected = [("a", "zeta"), ("b", "alpha"), ("b", "zeta"), ("c", "alpha")]
    assert [(hook.name, hook.distribution) for hook in list_hooks()] == expected
    site.order = lambda found: list(reversed(list(found)))
    refresh_hooks()
    assert [(hook.name, hook.distribution) for hook in list_hooks()] == expected


def test_damaged_metadata_never_stops_the_listing(site):
    """Folders without metadata, with undecodable files and with nonsense lines leave the good ones listed."""
    (site.add("no-metadata", hooks={"orphan": "orphan"}) / "METADATA").unlink()
    (site.add("bad-bytes", hooks={"x": "x"}) / "entry_points.txt").write_bytes(b"[nvalchemi.hooks]\n\xff\xfe = \xff")
    (site.add("bad-header", hooks={"headless": "y"}) / "METADATA").write_bytes(b"\xff\xfe\x00")
    (site.add("bad-lines", hooks={"z": "z"}) / "entry_points.txt").write_text("[nvalchemi.hooks]\nno equals sign\n=\n[")
    site.add("bad-range", hooks={"unreadable": "r"}, requires=["nvalchemi-hooks >>> 1", "nvalchemi-hooks=="])
    site.add("good", hooks={"fine": "good"})
    refresh_hooks()
    listed = {hook.name: (hook.distribution, hook.version) for hook in list_hooks()}
    assert listed["fine"] == ("good", "1.0")
    assert listed["orphan"] == ("unknown", "0+unknown")
    assert {"headless", "no equals sign", "unreadable"} <= set(listed)


@pytest.mark.parametrize("form", ["folder", "windows", "zip", "no path", "egg file"])
def test_metadata_is_read_whatever_form_it_has(site, tmp_path, monkeypatch, form):
    """A folder, one with the line ends of Windows, a zip file, a foreign finder's, a single old file: all alike."""
    folder = site.add("acme-hooks", "1.2", hooks={"noise": "acme"}, requires=["nvalchemi-hooks>=0.1"])
    with (folder / "METADATA").open("a") as file:
        file.write("Requires-Dist: nvalchemi-hooks<0.1 is what its card says\n")
    if form == "windows":
        for path in folder.iterdir():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    elif form == "zip":
        packed = shutil.make_archive(str(tmp_path / "packed"), "zip", site.path)
        monkeypatch.setattr(site, "roots", [packed])
    elif form == "no path":
        site.order = lambda found: [_Foreign(dist) for dist in found]
    elif form == "egg file":
        (site.path / "nvalchemi_hooks.egg-info").write_text(
            "Metadata-Version: 1.0\nName: nvalchemi-hooks\nVersion: 0.7\n"
        )
    refresh_hooks()
    [hook] = list_hooks()
    assert (hook.name, hook.target, hook.version, hook.api_range) == ("noise", "acme", "1.2", ">=0.1")
    assert core_version() == ("0.7" if form == "egg file" else "0+unknown")


class _Foreign:
    """A distribution of another finder: it has what is documented, and no more."""

    def __init__(self, dist):
        self.read_text, self.locate_file, self.requires = dist.read_text, dist.locate_file, []


def test_a_finder_that_raises_is_passed_over(site, monkeypatch):
    """A metadata folder of a foreign finder whose methods raise does not stop the listing."""

    class Hostile:
        def read_text(self, filename):
            raise RuntimeError("hostile")

        def locate_file(self, path):
            raise RuntimeError("hostile")

    site.add("good", hooks={"fine": "good"})
    inner = importlib_metadata.distributions
    monkeypatch.setattr(
        importlib_metadata,
        "distributions",
        lambda name=None: [Hostile(), *inner()] if name is None else inner(name=name),
    )
    refresh_hooks()
    assert [hook.name for hook in list_hooks()] == ["fine"]


def test_the_requirements_of_an_egg_info_count_too(site):
    """The range of core versions is read from requires.txt where the metadata is of the old kind."""
    site.add("nvalchemi-hooks", "3.0")
    folder = site.add("old-hooks", hooks={"old": "old"}, egg_info=True)
    (folder / "requires.txt").write_text("nvalchemi-hooks<2\n")
    refresh_hooks()
    [old] = list_hooks()
    assert (old.api_range, old.state) == ("<2", "incompatible")


def test_the_core_knows_its_version_from_the_metadata(site):
    """``nvalchemi.__version__`` is that of the installed distribution, and says so when there is none."""
    assert nvalchemi.__version__ == core_version() == "0+unknown"
    site.add("nvalchemi-hooks", "7.1")
    assert nvalchemi.__version__ == "7.1"


def test_provenance_is_that_of_the_distribution_whose_entry_point_is_nearest(site):
    """Two distributions that share a top-level package are told apart by the longer common module path."""
    site.add("acme-a", "1.0", hooks={"a": "acme.one.plugin"}, modules={"acme.one.hook": "class A: pass"})
    site.add("acme-b", "2.0", hooks={"b": "acme.two.plugin:obj"}, modules={"acme.two.hook": "class B: pass"})
    one = __import__("acme.one.hook", fromlist=["A"])
    two = __import__("acme.two.hook", fromlist=["B"])
    assert provenance_of(one.A()) == Provenance("acme-a", "1.0")
    assert provenance_of(two.B) == Provenance("acme-b", "2.0")


def test_provenance_without_entry_points_is_that_of_the_packages_owner(site):
    """A hook from an installed package that offers no entry point is traced to the distribution of its package."""
    folder = site.add("plain-lib", "4.2", modules={"plain_lib.hooks": "class Mine: pass"})
    (folder / "top_level.txt").write_text("plain_lib\n")
    module = __import__("plain_lib.hooks", fromlist=["Mine"])
    assert provenance_of(module.Mine()) == Provenance("plain-lib", "4.2")


def test_provenance_of_the_core_is_the_core(site):
    """A hook class of the core itself comes from nvalchemi-hooks."""
    site.add("nvalchemi-hooks", "7.1")
    assert provenance_of(nvalchemi.metadata.Provenance) == Provenance("nvalchemi-hooks", "7.1")


@pytest.mark.parametrize("obj", [OrderedDict(), len, None, 3, type("Local", (), {"__module__": "__main__"})()])
def test_provenance_of_what_nobody_distributes_is_none(site, obj):
    """Objects of the standard library and of the running script come from no distribution."""
    assert provenance_of(obj) is None


def test_provenance_never_fails(site, monkeypatch):
    """When the survey of all packages raises, or a class has no sensible module, the answer is None."""

    def fails():
        raise KeyError("Name")

    monkeypatch.setattr(importlib_metadata, "packages_distributions", fails)
    monkeypatch.setitem(sys.modules, "loose_module", types.ModuleType("loose_module"))
    assert provenance_of(type("Loose", (), {"__module__": "loose_module"})()) is None
    assert provenance_of(type("Odd", (), {"__module__": None})()) is None
