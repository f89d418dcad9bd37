"""Sessions on programs of fixed shapes, such as Core ML's and NPUs', independent of the engine."""
