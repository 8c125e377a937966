"""Links in the documents lead somewhere, their code fits this version, the reference is complete."""

import ast
import inspect
import re
import runpy
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from zero_optim import ZeroRedundancyOptimizer, __version__, checkpoint
from zero_optim.compat import private

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "examples/*.md")
    for path in ROOT.glob(pattern)
)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
NOTES = re.compile(
    r"\bNotes? ((?:\[[^]]+\](?:, and | and |, )?)+)"
)  # as they are named; a definition names itself
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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


def test_the_newest_pytorch_of_the_makefile_is_that_of_messages_and_of_what_was_run() -> None:
    found = re.search(r"^NEWEST := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    newest = found[1]
    assert private.WORKS_WITH.rpartition(" ")[2] == newest.rpartition(".")[0]
    assert f"| {newest}, " in (ROOT / "docs/versions.md").read_text()


def imported(tree: ast.Module) -> dict[str, Any]:
    """What a block of code imports from this package, by name; nothing of adapters, which need frameworks."""
    objects: dict[str, Any] = {}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        module = getattr(node, "module", None) or (names[0] if names else "")
        if "zero_optim.integrations" in module:
            spec = find_spec(module)
            assert spec is not None, module
            assert spec.origin is not None
            assert isinstance(node, ast.Import) or all(
                name in Path(spec.origin).read_text() for name in names
            )
        elif module.split(".")[0] == "zero_optim":
            package = import_module(module)
            objects |= (
                {} if isinstance(node, ast.Import) else {name: getattr(package, name) for name in names}
            )
    return objects


def calls(tree: ast.Module, objects: dict[str, Any]) -> Iterator[tuple[Any, list[str]]]:
    """The functions of this package that are called, with the keywords that they get."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = [keyword.arg for keyword in node.keywords if keyword.arg]
        match node.func:
            case ast.Name(name) if name in objects:
                yield objects[name], keywords
            case ast.Attribute(ast.Name(name), method) if name in objects:
                yield getattr(objects[name], method), keywords


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_on_a_page_imports_and_calls_what_there_is(page: Path) -> None:
    """Also where it needs frameworks; all else is run by test_code_blocks."""
    known = {"ZeroRedundancyOptimizer": ZeroRedundancyOptimizer, "checkpoint": checkpoint}
    if page.name != "migrating.md":  # has optimizers of others
        known["optimizer"] = ZeroRedundancyOptimizer
    for code in CODE.findall(page.read_text()):
        tree = ast.parse(code)
        for function, keywords in calls(tree, {**known, **imported(tree)}):
            parameters = inspect.signature(function).parameters
            takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            assert takes_any or set(keywords) <= parameters.keys(), (
                f"{page.name}: {function} takes no {keywords}"
            )


def public_names(package: str) -> Iterator[str]:
    """The paths of the public names as the site's reference has them."""
    if package != "zero_optim.integrations":
        for name in import_module(package).__all__:
            path = f"{package}.{name}"
            yield f"{path}.{name}" if find_spec(path) else path  # a function may lie in a module of its name
        return
    for module in ("accelerate", "lightning", "pytorch_lightning", "transformers"):
        spec = find_spec(f"{package}.{module}")
        for node in ast.parse(Path(spec.origin).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield f"{package}.{module}.{node.name}"


@pytest.mark.parametrize("name", ["zero_optim", "checkpoint", "ddp", "hooks", "integrations"])
def test_the_reference_has_every_public_name_once(name: str) -> None:
    package = name if name == "zero_optim" else f"zero_optim.{name}"
    text = (ROOT / "docs" / "site" / "pages" / "reference" / f"{name}.md").read_text()
    assert sorted(re.findall(r"^::: (\S+)$", text, re.MULTILINE)) == sorted(public_names(package))


def test_the_page_of_benchmarks_is_that_of_the_records() -> None:
    write = runpy.run_path(str(ROOT / "benchmarks" / "make_readme.py"))
    assert write["PAGE"].read_text() == write["page"]()


def test_the_figures_of_memory_in_the_readme_are_those_of_the_planner() -> None:
    figures = runpy.run_path(str(ROOT / "docs" / "make_memory_picture.py"))["figures"]()
    text = (ROOT / "README.md").read_text()
    shown = [int(number) for number in re.findall(r"\d+", text.partition("![GB")[2].partition("]")[0])]
    totals = [round(sum(parts.values())) for stages in figures.values() for parts in stages.values()]
    assert [number for number in shown if number in totals] == totals


def test_the_citation_has_this_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_each_claim_links_to_a_test_that_exists() -> None:
    lines = (ROOT / "docs" / "claims.md").read_text().splitlines()
    claims = [line for line in lines if line.startswith("| ") and "shown by" not in line]
    assert len(claims) > 30
    for claim in claims:
        links = [link for link in LINK.findall(claim.split(" | ")[-1]) if "/tests/" in f"/{link}"]
        assert links, claim
        assert all((ROOT / "docs" / link).is_file() for link in links), claim


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
