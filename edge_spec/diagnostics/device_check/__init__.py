"""`edge-spec doctor --run`: what has to hold on a device, tried by the pieces that test it."""
