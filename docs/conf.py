"""Sphinx configuration. The API pages import lowpeak with torch and triton mocked."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "packages" / name / "src") for name in ("core", "trainers", "bench")]

project = "lowpeak"
author = "The lowpeak developers"
copyright = "2026, the lowpeak developers"
release = (ROOT / "VERSION").read_text(encoding="utf-8").strip()

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"lowpeak {release}"
copybutton_prompt_text = r"\$ "

autodoc_mock_imports = ["torch", "triton", "transformers", "trl", "peft", "datasets", "accelerate"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
