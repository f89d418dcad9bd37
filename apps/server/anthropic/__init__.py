"""Anthropic's Messages API over the server's own requests and answers."""
