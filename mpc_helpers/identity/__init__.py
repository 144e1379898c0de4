"""The identity of a helper: its configuration, keys, certificate and position in the helper set.

- `config`: the configuration file, checked in full before anything is opened; commands that change its sites
- `membership`: this helper's position among the three, and its private keys
- `tls`: mutual TLS with pinned certificates
- `keygen`: creation of a helper's keys, its entry for the helper set and its configuration
"""
