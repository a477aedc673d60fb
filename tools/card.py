"""Fills CARD.md, the template of the repository's page, as kernel-builder does."""

from __future__ import annotations

import ast
from pathlib import Path

from .build_toml import BuildToml
from .errors import BuildError


def render_card(root: Path, config: BuildToml) -> str:
    """The README.md of the Hub repository's main branch.

    Raises:
        BuildError: no template, no repository id, or a template that gives no card.
    """
    from huggingface_hub import RepoCard
    from jinja2 import Environment, StrictUndefined, TemplateError
    from yaml import YAMLError

    path = root / "CARD.md"
    if config.general.hub.repo_id is None:
        raise BuildError("build.toml: general.hub.repo-id is missing; the card names it")
    package = root / "torch-ext" / config.general.python_name
    names = _literal_all(package / "__init__.py")
    try:
        template = Environment(trim_blocks=True, undefined=StrictUndefined).from_string(
            path.read_text()
        )
        text = template.render(
            repo_id=config.general.hub.repo_id,
            version=config.general.version,
            functions=[name for name in names if name != "layers"] or None,
            layers=(_classes(package) or None) if "layers" in names else None,
            has_benchmark=(root / "benchmarks" / "benchmark.py").is_file(),
            upstream=config.general.upstream,
            source=config.general.source,
            license=config.general.license.lower(),
        )
        RepoCard(text)  # the Hub refuses a header that is no YAML
        return text
    except FileNotFoundError:
        raise BuildError(f"{path.name}: no such file in the commit") from None
    except (TemplateError, ValueError, YAMLError) as error:
        raise BuildError(f"{path.name}: {error}") from None


def _literal_all(path: Path) -> list[str]:
    """The strings of a literal `__all__`; a computed one shows no names on the card."""
    for statement in ast.parse(path.read_text()).body:
        if (
            isinstance(statement, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "__all__" for t in statement.targets)
            and isinstance(statement.value, ast.List)
        ):
            elements = statement.value.elts
            return [e.value for e in elements if isinstance(e, ast.Constant)]
    return []


def _classes(package: Path) -> list[str]:
    for path in (package / "layers.py", package / "layers" / "__init__.py"):
        if path.is_file():
            body = ast.parse(path.read_text()).body
            return [node.name for node in body if isinstance(node, ast.ClassDef)]
    return []
