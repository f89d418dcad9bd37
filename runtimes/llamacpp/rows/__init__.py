"""Our kernels for llama.cpp's narrow CPU passes, such as verification, where extra rows cost
little. build.py compiles them with the package.
"""
