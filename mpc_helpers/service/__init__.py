"""The helper as a process: its HTTPS interface, its queries and its way to the peers.

- `daemon`: one helper put together from its configuration, serving until it is stopped
- `server`: the HTTPS routes
- `health`: what stops queries, and what an operator should look at
- `refusal`: why a request is not served
- `policy`: who may ask what
- `jobs`: one query at this helper: its files, its task, its state
- `registry`: every query this helper knows
- `storage`: what queries keep on disk, and when it goes
- `uploads`: columns on their way to disk, each a draft of its own
- `runs`: a task for every query
- `intake`: what queriers ask for
- `transport`: messages to the two peers, each pinned to its certificate
- `rendezvous`: where the workers of one attempt find each other
- `worker_sessions`: a worker process for every attempt
- `clocks`: how far this machine's clock may be believed
- `housekeeping`: what is done every hour
- `peer_watch`: whether the two peers are there
- `expiry`: when keys and certificates end
- `reloading`: the configuration read again while a helper runs
- `logs`: what a helper writes to its log
- `metrics`: what a helper counts, for Prometheus
- `processes`: what a helper's processes have used
- `figures`: build, process, disk and ledger among it
"""
