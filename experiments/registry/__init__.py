"""Run folders as a registry: what lies below a folder, and how two differ."""
