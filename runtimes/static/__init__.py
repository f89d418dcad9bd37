"""Sessions on programs of fixed shapes, as Core ML and NPUs run them, whatever runs a program."""
