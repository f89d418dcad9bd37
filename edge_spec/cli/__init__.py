"""The command `edge-spec`: one thin file a command."""
