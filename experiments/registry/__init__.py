"""Run folders as a registry: what lies below a folder, how two differ, a page about one."""
