"""Run the command line as `python -m edge_spec`, where the script is not on the path."""

from __future__ import annotations

import sys

from edge_spec.cli.start import main

sys.argv[0] = "edge-spec"
main()
