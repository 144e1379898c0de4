"""Who this helper is: its configuration, keys, certificate and place in the helper set.

- `config`: the configuration file, checked in full before anything is opened
- `sites`: who may ask, added and removed in that file
- `membership`: this helper's place among the three, and its private keys
- `tls`: certificates that are pinned, for links between helpers
- `keygen`: making a helper's keys, its entry for the helper set and its configuration
"""
