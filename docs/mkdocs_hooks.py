"""Hooks of MkDocs: README as the index, an API page per public module, links to the sources."""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
README = "index.md"
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:)([^()#\s]+)(#[^()\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the API to the navigation."""
    config.nav = [*config.nav, {"API": [f"api/{module}.md" for module in public_modules()]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README, the pages of the API, and the plots that pages show."""
    files.append(File.generated(config, README, content=(ROOT / "README.md").read_text()))
    for module in public_modules():
        text = f"# {module}\n\n::: {module}\n    options:\n      show_root_heading: false\n"
        files.append(File.generated(config, f"api/{module}.md", content=text))
    for plot in sorted((ROOT / "bench/results/plots").glob("*.svg")):
        path = plot.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(plot)))
    return files


def public_modules() -> list[str]:
    """Return the names of amp_ext's modules that list their public names."""
    found = []
    for path in sorted((ROOT / "amp_ext").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts) and lists_names(path):
            found.append(".".join(parts))
    return found


def lists_names(path: Path) -> bool:
    """Return whether a module assigns ``__all__``."""
    return any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for node in ast.parse(path.read_text()).body
    )


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point README's links at the pages, and replace links to other files by their text.

    Raises:
        PluginError: the repository has no such file.
    """
    uri = page.file.src_uri
    folder = "" if uri == README else posixpath.join("docs", posixpath.dirname(uri))

    def resolved(link: re.Match[str]) -> str:
        image, text, path, anchor = link.groups()
        target = posixpath.normpath(posixpath.join(folder, path))
        if not (ROOT / target).exists():
            raise PluginError(f"{uri}: no {target} in the repository")
        target = "index.md" if target == "README.md" else target.removeprefix("docs/")
        if files.get_file_from_path(target) is None:
            return text
        target = posixpath.relpath(target, posixpath.dirname(uri) or ".")
        return f"{image}[{text}]({target}{anchor or ''})"

    if uri.startswith("api/"):
        return markdown
    return LINK.sub(resolved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show Sphinx's roles, as editors read them in docstrings, as code."""
    return re.sub(r":(?:attr|class|exc|func|meth|mod):<code>~?", "<code>", html)
