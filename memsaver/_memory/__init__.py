"""Memory of tags: regions, torch's pools, preloading, backups, and their costs."""
