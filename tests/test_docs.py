"""Links in the documents lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(path for pattern in ("*.md", "docs/*.md", "benchmarks/*.md") for path in ROOT.glob(pattern))
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
NOTES = re.compile(
    r"\bNotes? ((?:\[[^]]+\](?:, and | and |, )?)+)"
)  # as they are named; a definition names itself
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(page.read_text()))
    return {title.strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if re.match(r"https?://|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page if not name else page.parent / name
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {link}"


def test_there_are_pages() -> None:
    names = {path.name for path in PAGES}
    assert names >= {
        "README.md",
        "CONTRIBUTING.md",
        "design.md",
        "checkpoints.md",
        "hooks.md",
        "migrating.md",
    }


def sources() -> list[Path]:
    folders = ("zero_optim", "ddp", "hooks", "tests", "benchmarks")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.packaging
def test_every_note_that_is_named_is_written_somewhere() -> None:
    texts = [path.read_text() for path in (*PAGES, *sources())]
    written = {
        title for text in texts for title in re.findall(r"^ *(?:# )?Note \[(.+)\]$", text, re.MULTILINE)
    }
    joined = [re.sub(r"\s+(?:# )?", " ", text) for text in texts]
    named = {
        title for text in joined for part in NOTES.findall(text) for title in re.findall(r"\[(.+?)\]", part)
    }
    assert written >= {"Late reports", "Streams"}
    assert named - written == set()
