"""The kernels are not compiled on Windows, so that nothing can be said of them there."""

import sys

collect_ignore = ["test_attention.py", "test_products.py"] if sys.platform == "win32" else []
