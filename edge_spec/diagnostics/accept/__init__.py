"""`edge-spec accept`: everything that has to hold on a device nobody has tried yet, in one run."""
