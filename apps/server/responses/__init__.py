"""OpenAI's Responses API: items instead of messages, and a stream of named events. Nothing is
stored, so each request has the whole conversation."""
