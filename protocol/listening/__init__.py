"""Listening to strangers over TLS: for helpers and collectors, which anyone may connect to.

- `connections`: who is connected, and who goes when there are too many
- `listener`: accepting connections, each counted before anything is known of it
- `seldom`: log lines that strangers could cause by the thousand
"""
