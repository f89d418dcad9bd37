"""Our kernels for llama.cpp's narrow CPU passes, where more rows cost little. build.py compiles
them.
"""
