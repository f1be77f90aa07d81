"""Sphinx configuration. The API pages come from the installed packages, torch and all.

Mocked, torch breaks annotations such as `torch.device | str`.
"""

from pathlib import Path

ROOT = Path(__file__).parents[1]

project = "lowpeak"
author = "The lowpeak developers"
copyright = "2026, the lowpeak developers"
release = (ROOT / "VERSION").read_text(encoding="utf-8").strip()

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"lowpeak {release}"
copybutton_prompt_text = r"\$ "

default_role = "code"
myst_heading_anchors = 2
autodoc_member_order = "bysource"
autodoc_typehints = "description"
