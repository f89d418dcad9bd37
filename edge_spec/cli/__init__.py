"""The command `edge-spec`: a thin layer over what commands do."""
