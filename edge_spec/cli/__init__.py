"""The command `edge-spec`, a thin layer over the packages that do the work."""
