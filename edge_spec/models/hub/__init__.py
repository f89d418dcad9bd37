"""Models of the Hugging Face hub: what a name means, which files are fetched, and how.

Files live in the cache of the library huggingface_hub, laid out as it documents, so that other
programs find them there and we find theirs. Nothing of huggingface_hub is imported before a
model's name begins with "hf:".
"""
