"""HTML pages and SVG charts: templates, a stylesheet, and drawing primitives."""
