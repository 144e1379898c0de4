"""Three helpers on this machine."""
