"""Settings of Sphinx: `sphinx-build -W docs build/docs`."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import tfdist_ext  # noqa: E402

project = "tfdist_ext"
author = copyright = "the founders of tfdist_ext"
version = release = tfdist_ext.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "alabaster"
html_theme_options = {"page_width": "1100px", "description": "tf.distribute for Keras 3"}
myst_heading_anchors = 3
# Public names are those of `__all__`, also where another file of the folder defines them.
autodoc_default_options = {"members": True, "imported-members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"
default_role = "code"
