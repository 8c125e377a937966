"""A hook of MkDocs that adds the documents to the site as they lie in the repository.

Paths stay what they are there, so the links of the documents lead to the same places. A notebook, a source or
a folder that a document links to becomes a page as well: PATH.md.
"""

import base64
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("*.md", "docs/*.md", "benchmarks/*.md", "examples/*.md", "docs/*.png", "benchmarks/*.png")
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
LINK = re.compile(r"(?<=\]\()[^)\s#]+")
UNSEARCHED = "---\nsearch: { exclude: true }\nhide: [toc]\n---\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the documents and what they link to."""
    names = [path.relative_to(ROOT).as_posix() for pattern in DOCUMENTS for path in ROOT.glob(pattern)]
    for name in sorted(names):
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    documents = [name for name in names if name.endswith(".md")]
    sources = {
        source for name in documents for source in linked_sources((ROOT / name).read_text(), name).values()
    }
    for path in sorted({*sources, *NOTEBOOKS}):
        for name, content in pages_of(path).items():
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to the pages of sources, and Markdown inside of HTML tables be read."""
    sources = linked_sources(markdown, page.file.src_uri)
    markdown = LINK.sub(lambda link: f"{link[0]}.md" if link[0] in sources else link[0], markdown)
    return re.sub(r"<(table|tr|td)>", r"<\1 markdown>", markdown)


def linked_sources(markdown: str, name: str) -> dict[str, Path]:
    """The links of a document to sources, notebooks and folders of the repository, with their paths."""
    targets = {
        link: posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
        for link in LINK.findall(markdown)
    }
    paths = {link: ROOT / target for link, target in targets.items()}
    return {link: path for link, path in paths.items() if path.suffix in {".py", ".ipynb"} or path.is_dir()}


def pages_of(path: Path) -> dict[str, str | bytes]:
    """The page of a source, a notebook or a folder, and the pictures on it."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        children = sorted(child for child in path.iterdir() if not child.name.startswith(("_", ".")))
        items = [
            f"- [{child.name}]({path.name}/{child.name}.md)" if child in NOTEBOOKS else f"- {child.name}"
            for child in children
        ]
        return {f"{name}.md": "\n".join([UNSEARCHED, f"# {name}", "", *items, ""])}
    if path in NOTEBOOKS:
        return notebook_pages(path, name)
    return {f"{name}.md": f"{UNSEARCHED}# {name}\n\n{fenced('python', path.read_text())}\n"}


def notebook_pages(path: Path, name: str) -> dict[str, str | bytes]:
    """The page of a notebook with the outputs that it was saved with, and its pictures."""
    parts: list[str] = []
    files: dict[str, str | bytes] = {}
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced("python", source))
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{path.stem}-{len(files)}.png"
                files[f"notebooks/{picture}"] = base64.b64decode(data["image/png"])
                parts.append(f"![what the cell above draws]({picture})")
            else:
                parts.append(
                    fenced("{.text .printed}", "".join(output.get("text", data.get("text/plain", ""))))
                )
    return {f"{name}.md": "\n\n".join(parts), **files}


def fenced(language: str, text: str) -> str:
    """A code block that may hold three backticks."""
    return f"``````{language}\n{text.rstrip()}\n``````"
