"""Build the documentation site: hooks for `mkdocs.yml`, and the page `docs/configuration.md`."""
