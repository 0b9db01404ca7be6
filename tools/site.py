"""What MkDocs does besides: README is the home page, generated pages are added, and links that leave docs/ lead
somewhere or become text.

`make site` builds the pages by mkdocs.yml, which names this file as a hook.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
AT_THE_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
AT_THE_ROOT |= {"SECURITY.md": "security.md"}
"""Pages at the root of the repository, and their names on the site."""
BENCHMARKS = ROOT / "out" / "benchmarks.md"
"""The page of all suites, which `python -m benchmarks.report` has written."""
MODULES = {
    "fastdpo": "patching trainers",
    "fastdpo.ops": "building blocks of custom loops",
    "fastdpo.ref_logps": "reference log-probabilities",
    "fastdpo.metrics": "means over steps and ranks",
}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """The address of the repository is that of pyproject.toml, once there is one."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    if "Repository" in urls:
        config.repo_url, config.repo_name = urls["Repository"], "fastdpo"
    return config


def on_files(files: Files, config: Any) -> Files:
    for name, page in AT_THE_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, "api.md", content=api()))
    files.append(File.generated(config, BENCHMARKS.name, content=BENCHMARKS.read_text(encoding="utf-8")))
    return files


def api() -> str:
    """The page of the API reference, which mkdocstrings fills from docstrings."""
    parts = ["# API reference\n\nThis page has the public names of each module, from their docstrings."]
    parts += [f"## `{module}`: {purpose}\n\n::: {module}" for module, purpose in MODULES.items()]
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Rewrites links that are right in the repository to what they are on the site."""
    on_site = {page: name for name, page in AT_THE_ROOT.items()}
    at = ROOT / (on_site.get(page.file.src_uri) or f"docs/{page.file.src_uri}")
    here = (ROOT / "docs" / page.file.src_uri).parent

    def rewritten(match: re.Match[str]) -> str:
        text, link = match.groups()
        path, hash_, heading = link.partition("#")
        if not path or ":" in path:
            return match[0]
        target = Path(os.path.normpath(at.parent / path))
        if not target.exists():
            raise PluginError(f"{at.relative_to(ROOT)}: {link} does not exist")
        name = str(target.relative_to(ROOT))
        if name in AT_THE_ROOT:
            target = ROOT / "docs" / AT_THE_ROOT[name]
        elif not name.startswith("docs/"):
            return f"[{text}]({config.repo_url.rstrip('/')}/tree/main/{name})" if config.repo_url else text
        return f"[{text}]({os.path.relpath(target, here)}{hash_}{heading})"

    markdown = LINK.sub(rewritten, markdown)
    if at.parent == ROOT:  # pictures of README
        markdown = re.sub(r'(src|srcset)="docs/', r'\1="', markdown)
    return re.sub(r"<picture>.*?</picture>", both_themes, markdown, flags=re.S)


def both_themes(match: re.Match[str]) -> str:
    """A picture follows the theme that a reader has chosen on the site, not that of the system."""
    light, dark = re.search(r'src="([^"]+)"', match[0])[1], re.search(r'srcset="([^"]+)"', match[0])[1]
    rest = re.search(r'src="[^"]+" ([^>]+)>', match[0])[1]
    return f'<p class="picture"><img src="{light}#only-light" {rest}><img src="{dark}#only-dark" {rest}></p>'
