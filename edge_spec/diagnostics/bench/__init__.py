"""`edge-spec bench`: compare drafting with plain decoding and with other programs in one run."""
