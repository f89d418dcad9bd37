"""Trained heads as drafters: they draft from the target's own features."""
