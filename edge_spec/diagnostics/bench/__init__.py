"""`edge-spec bench`: drafting against plain decoding, and against other libraries, on one machine
in one run."""
