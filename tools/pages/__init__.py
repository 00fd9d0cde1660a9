"""Build the documentation site: what `mkdocs.yml` and `docs/configuration.md` need."""
