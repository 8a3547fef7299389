"""Settings that cannot be meant are refused where they are given."""

from __future__ import annotations

import pytest

from nvalchemi_hooks_checkpoint import CheckpointHook


@pytest.mark.parametrize("name", ["every_steps", "every_epochs", "keep"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3"])
def test_a_count_is_an_int_of_one_or_more(root, name, value):
    """0, negative numbers, floats, bools and strings are refused, with name, value and remedy."""
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; give an int of 1 or more"):
        CheckpointHook(**{"root": root, "every_steps": 1, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_mode", "least"),
        ("asynchronous", 1),
        ("at_end", None),
        ("on_error", "no"),
        ("best", True),
        ("best", ""),
    ],
)
def test_words_that_mean_nothing_are_refused(root, name, value):
    """Each choice is one of those that are documented; the message has the value and the choices."""
    with pytest.raises(ValueError, match=f"{name} is {value!r}; give "):
        CheckpointHook(**{"root": root, "every_steps": 1, name: value})


def test_a_hook_that_would_never_save_is_refused(root):
    """At least one of the three occasions to save is needed."""
    with pytest.raises(
        ValueError, match="would save nothing while the run lasts; give every_steps, every_epochs or best"
    ):
        CheckpointHook(root=root)


@pytest.mark.parametrize("value", ["", None, 3, b""])
def test_a_root_is_a_path(value):
    """Nothing but a path that is not empty is a root."""
    with pytest.raises(ValueError, match=f"root is {value!r}; give the path of a folder"):
        CheckpointHook(root=value, every_steps=1)


def test_a_root_is_no_file(tmp_path):
    """A file in the place of the folder is found at once, not after the first hour."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"root is '.*file', which is a file"):
        CheckpointHook(root=tmp_path / "file", every_steps=1)


def test_the_root_stays_where_it_is(tmp_path, monkeypatch, run, steps):
    """A relative root is that of the moment when the hook was made, whatever becomes of the working directory."""
    monkeypatch.chdir(tmp_path)
    hook = CheckpointHook(root="here", every_steps=4)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    run(hook, num_steps=4)
    assert steps(tmp_path / "here") == [4]
