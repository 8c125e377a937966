"""What a checkpoint holds, as data and as a table. No communication."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from zero_optim.checkpoint import manifest as manifests
from zero_optim.checkpoint.manifest import Manifest
from zero_optim.checkpoint.reader import CheckpointReader
from zero_optim.errors import CheckpointError


def inspect(folder: Path) -> "Inspection":
    """Read all of a checkpoint and compare every byte with its checksum; CheckpointError without a folder."""
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}: there is no such folder")
    manifest = Manifest(0, 0, {}, {}, {}, {}, {})
    try:
        manifest = manifests.parse(folder)
        CheckpointReader(folder).check_all()
    except CheckpointError as error:
        return Inspection(folder, str(error), manifest)
    return Inspection(folder, "", manifest)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a folder holds, and the reason why that is no complete checkpoint; empty if it is one."""

    folder: Path
    reason: str
    manifest: Manifest

    @property
    def complete(self) -> bool:
        """Whether nothing is missing or damaged."""
        return not self.reason

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON: sizes in bytes, time in UTC; little if there is no manifest."""
        time = datetime.fromtimestamp(self.manifest.time_ns / 1e9, timezone.utc)
        return {
            "path": str(self.folder),
            "complete": self.complete,
            "reason": self.reason,
            "version": self.manifest.version,
            "saved": time.strftime("%Y-%m-%d %H:%M:%S UTC") if self.manifest.time_ns else "",
            "world_size": self.manifest.world_size,
            "software": dict(self.manifest.software),
            "sections": self._sections(),
            "files": [(name, file.rank, file.nbytes) for name, file in self.manifest.files.items()],
        }

    def _sections(self) -> list[dict[str, Any]]:
        """Count what is in each part: the model, the optimizer's state, and so on."""
        entries, values = self.manifest.entries, self.manifest.values
        sections = []
        for name in sorted({_section(key) for key in (*values, *entries)}):
            sizes = [entry.nbytes for key, entry in entries.items() if _section(key) == name]
            counts = {"num_tensors": len(sizes), "nbytes": sum(sizes)}
            sections.append({"name": name, **counts, "num_values": sum(_section(k) == name for k in values)})
        return sections

    def __str__(self) -> str:
        """Write it as a table."""
        told = self.to_dict()
        head = [("checkpoint", told["path"]), ("complete", f"no: {self.reason}" if self.reason else "yes")]
        if told["saved"]:
            by = ", ".join(f"{name} {version}" for name, version in told["software"].items())
            ranks = f"{told['world_size']} rank{'s' if told['world_size'] > 1 else ''}"
            head += [("saved", f"{told['saved']} by {ranks}, {by}"), ("format", f"version {told['version']}")]
        lines = [f"{name:<12}{value}" for name, value in head]
        if told["sections"]:
            rows = [list(section.values()) for section in told["sections"]]
            lines += ["", *_table(("section", "tensors", "bytes", "values"), rows)]
        if told["files"]:
            rows = [[name, str(rank), nbytes] for name, rank, nbytes in told["files"]]
            lines += ["", *_table(("file", "rank", "bytes"), rows)]
        return "\n".join(lines)


def _section(key: str) -> str:
    return re.split(r"[/.]", key, maxsplit=1)[0]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Align rows in columns: the first to the left, the others to the right."""
    text = [head, *([f"{cell:,}" if isinstance(cell, int) else cell for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*text, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in text
    ]
