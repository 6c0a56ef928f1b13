"""Settings of Sphinx for the site. `make site` runs it on the folder of docs/make_site.py."""

import sys
from pathlib import Path

import course_pp

sys.path.insert(0, str(Path(course_pp.__file__).parents[1] / "docs"))

project = "course_pp"
author = "The course_pp authors"
project_copyright = "2026, the course_pp authors; code MIT, prose and figures CC BY 4.0"
language = "en"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_additions",
]
exclude_patterns = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]

# Outputs are those that the notebooks were committed with.
nb_execution_mode = "off"
nb_ipywidgets_js = {}
# No kernel answers here: a widget shows its still picture.
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
nb_merge_streams = True
nb_output_stderr = "show"

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 4
myst_all_links_external = False
suppress_warnings: list[str] = []

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False
add_module_names = False
toc_object_entries = False
python_display_short_literal_types = True
viewcode_line_numbers = True

# Formulas become MathML while the site is built: no script, nothing to load.
html_math_renderer = "mathml"

html_theme = "pydata_sphinx_theme"
html_title = "course_pp"
html_show_sourcelink = False
html_copy_source = False
html_last_updated_fmt = None
html_theme_options = {
    "navbar_align": "left",
    "header_links_before_dropdown": 6,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "show_version_warning_banner": False,
}
