"""The manifest of a checkpoint: what is in it, in which files, with which sums. Reading it needs no torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from nvalchemi.errors import CheckpointDamagedError, CheckpointFormatError, CheckpointMissingError

__all__ = [
    "DATA_FOLDER",
    "FORMAT",
    "MANIFEST",
    "Manifest",
    "SectionFile",
    "open_section",
    "read_manifest",
    "section_path",
]

FORMAT = 1
MANIFEST = "manifest.json"
DATA_FOLDER = re.compile(r"data-[0-9a-f]{16}")
_FILE = re.compile(r"[0-9]+(\.[A-Za-z0-9_-]+)*\.pt")  # a plain name: a manifest cannot point out of its folder


@dataclass(frozen=True, slots=True)
class SectionFile:
    """Where one section lies: its file, how many bytes that has, and their SHA-256."""

    file: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``manifest.json`` says.

    Attributes
    ----------
    kind : str
        ``"training"`` or ``"models"``.
    data : str
        The folder of the files.
    sections : dict of str to SectionFile
        By name, ``models/main`` for instance.
    metadata : dict
        JSON data: hooks with distribution and version, model specs, counters.
    """

    kind: str
    data: str
    sections: dict[str, SectionFile]
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the text of the file, which ends with the digest of everything else in it."""
        content = {
            "format": FORMAT,
            "kind": self.kind,
            "data": self.data,
            "metadata": self.metadata,
            "sections": {
                name: {"file": one.file, "size": one.size, "sha256": one.sha256} for name, one in self.sections.items()
            },
        }
        return json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"


def read_manifest(root: str | Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Parameters
    ----------
    root : path
        The folder of the checkpoint.

    Raises
    ------
    CheckpointMissingError
        A ``FileNotFoundError``: there is no checkpoint in `root`, or none that was completed.
    CheckpointFormatError
        A ``ValueError``: it has a format number that this version does not know.
    CheckpointDamagedError
        A ``ValueError``: it is not what was written.
    """
    path = Path(root) / MANIFEST
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointMissingError(_no_checkpoint(Path(root))) from error
    try:
        content = json.loads(text)
    except ValueError as error:
        raise CheckpointDamagedError(f"{path} is damaged: it is no JSON ({error}); {_RESTORE}.") from error
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise CheckpointDamagedError(f"{path} is damaged: it has no format number; {_RESTORE}.")
    if content["format"] != FORMAT:
        newer = "upgrade it: pip install --upgrade nvalchemi-hooks"
        remedy = newer if content["format"] > FORMAT else "read it with the version that wrote it"
        raise CheckpointFormatError(
            f"{path} has the format {content['format']}, but this nvalchemi-hooks reads the format {FORMAT}; {remedy}."
        )
    digest = content.pop("digest", None)
    if digest != _digest(content):
        raise CheckpointDamagedError(f"{path} is damaged: its digest is not that of its content; {_RESTORE}.")
    return _checked(content, path)


def open_section(root: str | Path, manifest: Manifest, name: str) -> BinaryIO:
    """Return the file of a section, open, after comparing its size and sum.

    Raises
    ------
    CheckpointMissingError, CheckpointDamagedError
        The file is missing, is truncated, or holds other bytes than were written.
    """
    section = manifest.sections[name]
    path = section_path(root, manifest, name)
    file = path.open("rb")
    found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != section.sha256:
        file.close()
        raise CheckpointDamagedError(
            f"{path} (section {name!r}) is damaged: its SHA-256 is {found[:12]}..., not {section.sha256[:12]}... as "
            f"when it was written; {_RESTORE}."
        )
    return file


def section_path(root: str | Path, manifest: Manifest, name: str) -> Path:
    """Return the file of a section after comparing its size alone."""
    section = manifest.sections[name]
    path = Path(root) / manifest.data / section.file
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise CheckpointMissingError(
            f"{path} (section {name!r}) is missing, although the manifest names it; {_RESTORE}."
        ) from error
    if size != section.size:
        what = "truncated" if size < section.size else "damaged"
        raise CheckpointDamagedError(
            f"{path} (section {name!r}) is {what}: it has {size} bytes instead of {section.size}; {_RESTORE}."
        )
    return path


_RESTORE = "bring it back from a copy, or use an earlier checkpoint"


def _checked(content: Mapping[str, Any], path: Path) -> Manifest:
    try:
        sections = {name: SectionFile(**one) for name, one in content["sections"].items()}
        manifest = Manifest(content["kind"], content["data"], sections, content["metadata"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointDamagedError(
            f"{path} is damaged: a field is missing or wrong ({error}); {_RESTORE}."
        ) from error
    for file in (one.file for one in sections.values()):
        if not _FILE.fullmatch(str(file)):
            raise CheckpointDamagedError(f"{path} names the file {file!r}, which no save writes; do not trust it.")
    if not DATA_FOLDER.fullmatch(str(manifest.data)):
        raise CheckpointDamagedError(
            f"{path} names the folder {manifest.data!r}, which no save makes; do not trust it."
        )
    return manifest


def _no_checkpoint(root: Path) -> str:
    if not root.is_dir():
        return f"There is no checkpoint in {root}: there is no such folder."
    below = sorted(path.parent.name for path in root.glob(f"*/{MANIFEST}"))
    if below:
        return (
            f"There is no checkpoint in {root} itself, but in its folders: {', '.join(below[-3:])}; name one of them."
        )
    interrupted = any(DATA_FOLDER.fullmatch(path.name) for path in root.iterdir())
    why = "a save was begun there and never completed" if interrupted else f"it has no {MANIFEST}"
    return f"There is no checkpoint in {root}: {why}."


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
