"""Who this helper is: its configuration, keys, certificate and place in the helper set."""
