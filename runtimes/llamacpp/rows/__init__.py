"""Rows that cost next to nothing: kernels of our own for the passes of a few rows in which
llama.cpp verifies draft tokens on a CPU. build.py compiles them when the package is built."""
