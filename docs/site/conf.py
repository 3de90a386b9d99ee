"""Sphinx's settings of the site: Markdown pages, the API from its docstrings, every option."""

project = "persia-testbed"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "persia-testbed"
exclude_patterns = ["docs/site"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}

# Pages are written for GitHub: links to headings, and relative ones to files.
myst_heading_anchors = 4
myst_all_links_external = False

# Docstrings are plain words: single backticks are code, types stand in the signature.
default_role = "code"
autodoc_typehints = "none"
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}
autodoc_preserve_defaults = True
