"""Our kernels for llama.cpp's CPU passes of few rows, where a row costs little (see build.py)."""
