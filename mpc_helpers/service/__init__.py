"""The helper as a process: its HTTPS interface, its queries, and its connections to the peers.

- `daemon`: one helper assembled from its configuration, serving until it is stopped, and the reload of its sites
- `server`: the HTTPS routes
- `queries`: every query of a helper, from submission to answer
- `tracked_query`: one query: its folder, its durable state, its task
- `policy`: which queries are accepted, and the reasons for a refusal
- `storage`: disk space for columns, and uploads in progress
- `transport`: messages to the two peers, each pinned to its certificate
- `workers`: a worker process for every attempt, its port, and how the three of an attempt find each other
- `monitoring`: log lines, metrics, and the resource usage of processes
- `health`: what stops queries; whether the peers respond, when keys and certificates expire
- `housekeeping`: hourly rounds, and how far this machine's clock is trusted
"""
