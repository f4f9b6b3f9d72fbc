"""The `servekit` command, one file per family of verbs; what takes long to import comes late."""
